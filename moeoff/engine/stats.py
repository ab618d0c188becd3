"""Statistics of a run: the native counters in the units people ask for, the tokens decoded in what time, and what was chosen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np

from .. import native
from ..gate_event import GateEvent, Observer
from ..sidecar.file import ORIGINAL


@dataclass
class Timing:
    """Time inside llama_decode: text that is read is prompt, tokens that are decoded, of any number of sequences, are generation."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    gen_tokens: int = 0
    gen_seconds: float = 0.0

    def add(self, n_tokens: int, seconds: float, decode: bool) -> None:
        if decode:
            self.gen_tokens += n_tokens
            self.gen_seconds += seconds
        else:
            self.prompt_tokens += n_tokens
            self.prompt_seconds += seconds


class LayerHits(Observer):
    """Hits and misses of each layer.

    Args:
        layers: of each gate, the layer's number.

    Attributes:
        layers: the same.
        counts: [n_gates, 2] slices that were resident when their gate chose them, and that were not.
    """

    def __init__(self, layers: Sequence[int]):
        self.layers = layers
        self.counts = np.zeros((len(layers), 2), np.int64)

    def observe(self, event: GateEvent) -> None:
        self.counts[event.gate] += event.n_hit, event.n_miss


@dataclass(frozen=True)
class Stats:
    """The fields of --stats-json. Names stay stable; sizes in bytes, times in seconds, rates per second.

    hit_rate counts slices (one matrix of one expert) that were resident when their gate chose them.
    tier is the sidecar's that all experts are read in, "original" the model's own precision. expert_uses counts what gates chose, an
    expert for a token; of these served_low were computed in low precision (in another tier than "original" all of them), skipped not at all (with tau, of decoded_uses those that were missing and weighed less), and rerouted by
    a resident expert in the place of the router's; rerouted_margin is the most that one of these scored below the other, as a share of the range
    of scores. simulated_misses: experts that the cache which a deterministic run simulates would have had to read. max_loss is the bound that was
    promised for that, estimated_loss what it was measured to cost; None: no promise.
    experts_per_token is what all gates together choose for a token.
    prefetch_on tells whether prefetching is on at the moment, and prefetch_gain the speed with it relative to without, minus 1,
    when it was last compared; None: the strategy does not prefetch or does not compare.
    prediction_accuracy is the share of the experts that were selected in decode that had been predicted, fetch_rate the share of
    these that was resident when their router selected, good_pred their product (ProMoE §4.1); None: no preset of a paper predicts.
    drafts_on and drafts_gain say the same of a server's drafts; None: it makes none.
    embedding_disk_bytes: of the token embedding, whose rows are read as tokens name them; 0 where it is in memory.
    device_hits: of demand_hits, the slices that a device holds; device_uploads: experts that were written into a device's slot, of device_bytes bytes, in
    device_upload_seconds; device_downloads: slices that went from a slot that another expert took back to host memory, of device_bytes_down bytes, in
    device_download_seconds; device_wait_seconds: of device_upload_seconds, what compute waited for (vram_mode centric and waves); device_experts: on
    devices now; device_memory: of each device with slots, their number for each layer, their bytes, and what llama.cpp takes there; device_mode: with vram_mode auto, how the next token will be computed, and device_gain the speed with devices relative to
    without, minus 1, when it was last compared.
    io_threads is the number of threads that read experts, io_threads_reason why so many.
    micro_batch is the number of tokens of a prompt that are computed at once, micro_batch_reason why.
    events_dropped counts the gate events that policies, predictors and traces never saw, because too many waited: 0, unless the driver is far too slow.
    stall_seconds is how long compute waited for bytes, averaged over its threads.
    """

    model: str
    strategy: str
    budget_bytes: int
    peak_rss_bytes: int
    arena_bytes: int
    hit_rate: float
    demand_hits: int
    demand_misses: int
    evictions: int
    prefetch_issued: int
    prefetch_useful: int
    bytes_read: int
    stall_seconds: float
    lane_busy_seconds: float
    driver_seconds: float
    direct_io: bool
    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    prompt_tps: float = 0.0
    gen_tokens: int = 0
    gen_seconds: float = 0.0
    gen_tps: float = 0.0
    prefetch_on: bool | None = None
    prefetch_gain: float | None = None
    prediction_accuracy: float | None = None
    fetch_rate: float | None = None
    good_pred: float | None = None
    cpu_seconds: float = 0.0
    expert_uses: int = 0
    tier: str = ORIGINAL
    served_low: int = 0
    skipped: int = 0
    tau: float = 0.0
    experts_per_token: int = 0
    rerouted: int = 0
    rerouted_margin: float = 0.0
    simulated_misses: int = 0
    low_bytes_read: int = 0
    low_arena_bytes: int = 0
    embedding_disk_bytes: int = 0
    events_dropped: int = 0
    max_loss: float | None = None
    estimated_loss: float | None = None
    io_threads: int = 0
    io_threads_reason: str = ""
    micro_batch: int = 0
    micro_batch_reason: str = ""
    drafts_on: bool | None = None
    drafts_gain: float | None = None
    memory: dict[str, int] = field(default_factory=dict)
    device_hits: int = 0
    device_uploads: int = 0
    device_bytes: int = 0
    device_upload_seconds: float = 0.0
    device_downloads: int = 0
    device_bytes_down: int = 0
    device_download_seconds: float = 0.0
    device_wait_seconds: float = 0.0
    device_experts: int = 0
    device_memory: dict[str, dict[str, int]] = field(default_factory=dict)
    device_mode: str = ""
    device_gain: float | None = None

    @property
    def device_hit_rate(self) -> float:
        """Share of the slices that gates chose that a device held."""
        uses = self.demand_hits + self.demand_misses
        return self.device_hits / uses if uses else 0.0

    @property
    def hit_summary(self) -> str:
        """Hit rate, in words."""
        off = ", off: the CPU alone is faster" if self.device_mode == "cpu" and self.device_gain is not None else ""
        return f"hit rate {self.hit_rate:.1%}" + (f" ({self.device_hit_rate:.1%} on the GPU{off})" if self.device_memory else "")

    @property
    def decoded_uses(self) -> int:
        """Of expert_uses, those of tokens that were decoded."""
        return self.gen_tokens * self.experts_per_token

    @property
    def precision_summary(self) -> str:
        """The precision that may be given up, and how much was, in words; empty if none was and nothing is left out."""
        uses = max(self.expert_uses, 1)
        parts = [f"all experts in {self.tier}"] if self.tier != ORIGINAL else []
        if self.tau:  # nothing else skips then
            parts += [f"{self.served_low / uses:.1%} of experts in low precision"] if self.tier == ORIGINAL and self.served_low else []
            parts.append(f"{self.skipped / max(self.decoded_uses, 1):.1%} of experts left out below a weight of {self.tau:.3g}")
        elif self.tier == ORIGINAL and (self.served_low or self.skipped):
            parts.append(f"{self.served_low / uses:.1%} of experts in low precision, {self.skipped / uses:.1%} skipped")
        elif self.skipped:
            parts.append(f"{self.skipped / uses:.1%} skipped")
        if self.rerouted:
            parts.append(f"{self.rerouted / uses:.1%} rerouted, by at most {self.rerouted_margin:.1%} of the scores' range")
        if not parts:
            return ""
        bound = "" if self.max_loss is None else f" (measured loss {self.estimated_loss:.2%}, bound {self.max_loss:.2%})"
        return ", ".join(parts) + bound

    @classmethod
    def of(cls, counters: native.Stats, timing: Timing, **facts: Any) -> Stats:
        """The native counters and the time of the decodes, with what else is known of the run.

        Args:
            facts: fields that neither has.
        """
        counted = {name: getattr(counters, there) for name, there in _NATIVE.items()}
        counted = {name: n / 1e9 if name.endswith("_seconds") else n for name, n in counted.items()} | asdict(timing)
        if facts.get("tier", ORIGINAL) != ORIGINAL:
            counted["served_low"] = counters.expert_uses
        return cls(**counted, **_rates(counted), **facts)

    def since(self, earlier: Stats, cpu_seconds: float = 0.0) -> Stats:
        """The difference between an earlier snapshot and this one."""
        counted: dict[str, Any] = {name: getattr(self, name) - getattr(earlier, name) for name in _COUNTERS}
        return replace(self, **counted, **_rates(counted), cpu_seconds=cpu_seconds)

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def _native_name(name: str) -> str:
    if name == "lane_busy_seconds":
        return "io_thread_busy_ns"
    return name.removesuffix("_seconds") + "_ns" if name.endswith("_seconds") else name


def _rates(counted: Mapping[str, float]) -> dict[str, Any]:
    uses = counted["demand_hits"] + counted["demand_misses"]
    rates = {f"{kind}_tps": counted[f"{kind}_tokens"] / seconds if (seconds := counted[f"{kind}_seconds"]) else 0.0 for kind in ("prompt", "gen")}
    return rates | {"hit_rate": counted["demand_hits"] / uses if uses else 0.0}


_NATIVE = {f.name: there for f in fields(Stats) if (there := _native_name(f.name)) in {name for name, *_ in native.Stats._fields_}}
_COUNTERS = {*_NATIVE, *(f.name for f in fields(Timing))} - {"arena_bytes", "low_arena_bytes", "device_experts", "rerouted_margin"}  # which do not add up
