"""Traces of gate events, and their replay through cache policies: what each policy would have kept and read."""

from ..trace import Trace
from .simulator import Result, simulate

__all__ = ["Result", "Trace", "simulate"]
