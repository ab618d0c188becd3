"""Damage to files: a bit, or anything that may happen to one."""

from __future__ import annotations

import random
import struct
from pathlib import Path


def flip_bit(path: str | Path, offset: int) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A flipped bit, noise, zeros, an extreme number, bytes cut out or put in, the end cut off; half of it in the first 3000 bytes."""
    at = rng.randrange(min(len(data), 3000)) if rng.random() < 0.5 else rng.randrange(len(data))
    kind = rng.randrange(7)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + rng.randbytes(8) + data[at + 8 :]
    if kind == 2:
        return data[:at]
    if kind == 3:
        return data[:at] + data[at + rng.randrange(1, 5000) :]
    if kind == 4:
        return data[:at] + rng.randbytes(rng.randrange(1, 100)) + data[at:]
    if kind == 5:
        value = rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
        return data[:at] + struct.pack("<Q", value) + data[at + 8 :]
    end = min(at + rng.randrange(1, 5000), len(data))
    return data[:at] + bytes(end - at) + data[end:]
