"""The running model: llama.cpp with an expert buffer, what drives it, and its
statistics.
"""
