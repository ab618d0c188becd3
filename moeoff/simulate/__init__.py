"""Traces of gate events, and their replay through cache policies: what each policy would have kept and read."""

from .simulator import Result, simulate
from .trace import Trace

__all__ = ["Result", "Trace", "simulate"]
