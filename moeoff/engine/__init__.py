"""The running model: llama.cpp with an expert buffer, its driver and its statistics."""
