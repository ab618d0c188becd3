"""GGUF files: reading, writing, quantization, tensor indexes and download."""
