"""Speed and memory of a model on this machine: each configuration in a process of its own, on the same text, stock llama.cpp too.

For scripts: `compare` runs jobs in turn, in rounds, and returns medians and spreads; `measure` runs one.
"""

from .job import MOEOFF, STOCK, BenchTest, Job, Measurement, prompt_then_tokens, two_turns
from .run import Comparison, Grid, Spread, compare, measure

__all__ = ["MOEOFF", "STOCK", "BenchTest", "Comparison", "Grid", "Job", "Measurement", "Spread", "compare", "measure", "prompt_then_tokens", "two_turns"]
