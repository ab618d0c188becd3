"""llama.cpp: its Python binding, the native library, threads, devices, chat templates and the habits of its programs. All of ctypes is here."""
