"""Attention by ggml's own kernels, in a run that loads this (`Job.registers`): what
ours are compared with, everything else alike.
"""

from moeoff.llamacpp.native import use_attention_kernels

use_attention_kernels(False)
