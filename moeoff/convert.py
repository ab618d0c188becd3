"""`moeoff.convert`: the public path of `moeoff.companion.convert`."""

from .companion.convert import Converted, convert

__all__ = ["Converted", "convert"]
