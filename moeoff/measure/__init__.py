"""Measurements of a model: profiles, perplexity, quality loss, and speed."""

from .. import _offer_modules

_offer_modules(globals())
