"""The model file: what it holds and where, its types and their conversion, and where to get it."""
