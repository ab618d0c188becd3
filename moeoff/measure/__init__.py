"""Passes over text that measure a model: profile, perplexity, what lower precision costs, and its speed, stock llama.cpp's too."""

from .. import _offer_modules

_offer_modules(globals())
