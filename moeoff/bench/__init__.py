"""Speed and memory of a model on this machine: each configuration in a process of its own, on the same text, beside stock llama.cpp."""

from .grid import Grid
from .job import BenchTest, Job
from .process import measure

__all__ = ["BenchTest", "Grid", "Job", "measure"]
