"""How a bound of a device's memory is divided: what llama.cpp takes there, and slots for experts in the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import BudgetError, OptionError, Remedy
from ..memory import MIB, format_size, parse_size

__all__ = ["DeviceBound", "DeviceRoom", "slots_that_fit"]


@dataclass(frozen=True)
class DeviceBound:
    """What may be allocated on each device, experts and llama.cpp's own together: bytes, or a share of what is free before a model is loaded."""

    nbytes: int = 0
    share: float = 0.0

    @classmethod
    def parse(cls, text: str | int) -> DeviceBound:
        """Of 2 << 30, "2G" or "80%".

        Raises:
            OptionError: neither a size nor a share.
        """
        if isinstance(text, str) and text.strip().endswith("%"):
            try:
                share = float(text.strip()[:-1]) / 100
            except ValueError:
                share = 0.0
            if not 0 < share <= 1:
                raise OptionError(f"vram: a share of the device's memory lies between 0% and 100%, not {text!r}")
            return cls(share=share)
        return cls(nbytes=parse_size(text))

    def __str__(self) -> str:
        return format_size(self.nbytes) if self.nbytes else f"{self.share:.0%}"

    def of(self, free: int) -> int:
        """Bytes, on a device that had so many free."""
        return self.nbytes or int(self.share * free)


@dataclass(frozen=True)
class DeviceRoom:
    """One device, in bytes.

    Attributes:
        bound: of everything that is allocated there.
        taken: by llama.cpp: weights, caches, compute buffers.
        free: by the driver's count, now.
    """

    name: str
    bound: int
    taken: int
    free: int

    @property
    def for_experts(self) -> int:
        return min(self.bound - self.taken, self.free)


def slots_that_fit(room: DeviceRoom, bytes_of: Sequence[Callable[[int], int]], n_experts: int) -> int:
    """Slots for each of the device's layers with experts, the same number for all of them: as many as fit, at most one for each expert.

    Args:
        bytes_of: of each layer, what n slots take.

    Raises:
        BudgetError: not one fits, or the bound is more than the device has.
    """

    def total(n: int) -> int:
        return sum(of(n) for of in bytes_of)

    if room.bound > room.taken + room.free:
        most = (room.taken + room.free) // MIB * MIB
        raise BudgetError(
            f"{format_size(room.bound)} is more than {room.name} has: {format_size(room.taken)} taken by llama.cpp and {format_size(room.free)} free",
            Remedy.LESS_VRAM,
            needed=most,
        )
    least = total(1)
    if least > room.for_experts:
        needed = -(-(room.taken + least) // MIB) * MIB
        raise BudgetError(
            f"{format_size(max(room.bound, 0))} on {room.name} is too small: llama.cpp takes {format_size(room.taken)} there, and one expert of each layer "
            f"{format_size(least)}",
            Remedy.MORE_VRAM,
            needed=needed,
        )
    low, high = 1, n_experts  # total(low) fits
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if total(middle) <= room.for_experts else (low, middle - 1)
    return low
