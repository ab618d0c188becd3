"""Speed and memory of a model on this machine: each configuration in a process of its own, on the same text, beside stock llama.cpp."""
