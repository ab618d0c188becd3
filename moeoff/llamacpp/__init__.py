"""The binding to llama.cpp and our native library, and all of ctypes."""
