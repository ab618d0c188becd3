"""Damage to files: one bit. More of it: scripts/faults/mutants.py."""

from __future__ import annotations

from pathlib import Path


def flip_bit(path: str | Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
