"""Routing: gate events, traces and recordings of them, and routers."""

from .. import _offer_modules

_offer_modules(globals())
