"""What a replay with three places for experts took (`moeoff.simulate.tiered`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["TieredResult"]


@dataclass(frozen=True)
class TieredResult:
    """What a replay took.

    Attributes:
        ns: of the simulated clock; wait_ns: in which neither processor computed.
        decoded, decode_ns: of tokens and time, those that were decoded.
        device, host, disk: uses of experts by where these were when their router had selected: on the device, in host memory, or neither.
        low, skipped: of the uses, those that a smaller copy served, and those that nothing did.
        uploads: experts that were sent to the device.
        up_bytes, read_bytes: over the link, from disk.
    """

    n_tokens: int
    ns: int
    wait_ns: int
    decoded: int
    decode_ns: int
    device: int
    host: int
    disk: int
    low: int
    skipped: int
    uploads: int
    up_bytes: int
    read_bytes: int

    @property
    def decode_tps(self) -> float:
        """Tokens a second; 0 where none is decoded."""
        return 1e9 * self.decoded / max(self.decode_ns, 1)

    @property
    def prompt_tps(self) -> float:
        return 1e9 * (self.n_tokens - self.decoded) / max(self.ns - self.decode_ns, 1)

    def to_dict(self) -> dict[str, Any]:
        uses, n = max(self.device + self.host + self.disk, 1), max(self.n_tokens, 1)
        return {
            "tokens": self.n_tokens,
            "decode_tps": self.decode_tps,
            "prompt_tps": self.prompt_tps,
            "on_device": self.device / uses,
            "in_memory": self.host / uses,
            "on_disk": self.disk / uses,
            "waiting": self.wait_ns / max(self.ns, 1),
            "up_bytes_per_token": self.up_bytes / n,
            "read_bytes_per_token": self.read_bytes / n,
        }
