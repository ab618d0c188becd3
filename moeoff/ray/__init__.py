"""More than one machine: the server as a Ray Serve application, a replica for each machine (`pip install 'moeoff[ray]'`)."""

from ..errors import OptionError

try:
    import ray.serve  # noqa: F401
except ImportError:
    raise OptionError("moeoff.ray needs Ray Serve: pip install 'moeoff[ray]'") from None

from .application import deployment

__all__ = ["deployment"]
