"""The machine and what every program needs of it: memory, files, the disk, the terminal. Knows neither models nor llama.cpp."""
