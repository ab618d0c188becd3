"""What routers choose: gate events, traces of them, and the routers themselves. Knows no cache and no running model."""

from .. import _offer_modules

_offer_modules(globals())
