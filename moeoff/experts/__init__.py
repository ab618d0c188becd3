"""A model's other files: the sidecar (its experts repacked) and the profile."""

from .. import _offer_modules

_offer_modules(globals())
