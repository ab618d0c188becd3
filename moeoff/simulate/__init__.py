"""Traces of gate events, and their replay through cache policies: what each policy would have kept and read."""

from ..trace import Trace
from .route_trace import read_trace
from .simulator import Result, simulate

__all__ = ["Result", "Trace", "read_trace", "simulate"]
