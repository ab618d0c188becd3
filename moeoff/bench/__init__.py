"""Speed and memory of a model on this machine: each configuration in a process of its own, on the same text, stock llama.cpp too.

`measure` runs one.
"""

from .job import MOEOFF, STOCK, BenchTest, Job, Measurement
from .run import Grid, measure

__all__ = ["MOEOFF", "STOCK", "BenchTest", "Grid", "Job", "Measurement", "measure"]
