"""What a simulated machine moves and computes in a second: disk, the link to a device, and the two processors. docs/guides/gpu.md has sources."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..errors import OptionError

__all__ = ["Bandwidths"]


@dataclass(frozen=True)
class Bandwidths:
    """Rates in GB/s (10^9 bytes). Tokens that are decoded read every weight once, so that a processor's rate is its memory's.

    The defaults are a desktop computer with an RTX 4090 in a PCIe 4.0 x16 slot: 85 % of what data sheets say.

    Attributes:
        disk: reads.
        link: from host memory to the device.
        device, host: of weights that are computed with.
        device_tokens, host_tokens: of a batch, so many tokens take as long as one; beyond, arithmetic is what takes the time.
        layer_us: what a layer takes beside its routed experts.
    """

    disk: float = 6.3
    link: float = 26.8
    device: float = 857.0
    host: float = 76.2
    device_tokens: int = 54
    host_tokens: int = 4
    layer_us: float = 150.0

    def __post_init__(self) -> None:
        for field in fields(self):
            if not getattr(self, field.name) > 0:
                raise OptionError(f"{field.name} of a simulated machine must be positive, not {getattr(self, field.name)}")

    @property
    def layer_ns(self) -> int:
        return round(1000 * self.layer_us)

    def on_disk_ns(self, nbytes: float) -> int:
        return round(nbytes / self.disk)

    def on_link_ns(self, nbytes: float) -> int:
        return round(nbytes / self.link)

    def device_ns(self, nbytes: float, n_tokens: int) -> int:
        """Computing with a weight of so many bytes, for so many tokens."""
        return round(nbytes / self.device * max(1.0, n_tokens / self.device_tokens))

    def host_ns(self, nbytes: float, n_tokens: int) -> int:
        return round(nbytes / self.host * max(1.0, n_tokens / self.host_tokens))
