"""The machine: memory, files, disk, terminal."""
