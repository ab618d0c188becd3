"""`moeoff tune`: measures a model on this machine once, and leaves beside it what `run`, `serve` and `Llama` then use by themselves."""

from .tuner import Request, Tuned, tune

__all__ = ["Request", "Tuned", "tune"]
