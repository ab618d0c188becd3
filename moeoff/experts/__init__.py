"""A model's other files: its experts again in other precisions (the sidecar), and measurements of it (the profile)."""

from .. import _offer_modules

_offer_modules(globals())
