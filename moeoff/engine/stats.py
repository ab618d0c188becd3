"""Statistics of a run: native counters, decode times and the engine's choices."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

from ..experts.sidecar import ORIGINAL
from ..llamacpp import native


class Metric(NamedTuple):
    """A figure of /metrics: name without prefix, help, and values by label set."""

    name: str
    text: str
    samples: Mapping[str, float]

    def __str__(self) -> str:
        """Format the metric in Prometheus' text format."""
        kind = "counter" if self.name.endswith("_total") else "gauge"
        head = [f"# HELP moeoff_{self.name} {self.text}", f"# TYPE moeoff_{self.name} {kind}"]
        return "\n".join(
            [
                *head,
                *(f"moeoff_{self.name}{labels} {value}" for labels, value in self.samples.items()),
            ]
        )


@dataclass
class Timing:
    """Time in llama_decode for prompt processing and generation, of all sequences."""

    prompt_tokens: int = 0
    prompt_seconds: float = 0.0
    gen_tokens: int = 0
    gen_seconds: float = 0.0
    drafts_rejected: int = 0

    def add(self, n_tokens: int, seconds: float, decode: bool) -> None:
        if decode:
            self.gen_tokens += n_tokens
            self.gen_seconds += seconds
        else:
            self.prompt_tokens += n_tokens
            self.prompt_seconds += seconds


def _figure(
    text: str,
    unit: str = "",
    default: Any = 0,
    *,
    counter: bool = False,
    metric: str | bool = False,
    factory: Any = None,
) -> Any:
    """Return a field of `Stats`.

    Args:
        text: Description in a sentence.
        unit: Unit of the value.
        counter: True for a counter, False for a gauge.
        metric: Name in /metrics, or True for the field's own.
    """
    metadata = {"text": text, "unit": unit, "counter": counter, "metric": metric}
    return (
        field(default_factory=factory, metadata=metadata)
        if factory
        else field(default=default, metadata=metadata)
    )


@dataclass(frozen=True, kw_only=True)
class Stats:
    """The statistics in --stats-json, `run --json`, bench, eval and most of /metrics.

    docs/reference/stats.md is generated from these fields. Names are stable. Sizes are
    in bytes, times in seconds. A slice is one matrix of one expert.
    """

    model: str = _figure("Path of the model.", default="")
    strategy: str = _figure("Name of the strategy.", default="")
    budget_bytes: int = _figure(
        "The bound of the process now; 0 where only the experts are bounded.", "bytes", metric=True
    )
    budget_start_bytes: int = _figure(
        "The bound given by --memory, or the default one before other programs needed memory.",
        "bytes",
        metric=True,
    )
    budget_cuts: int = _figure(
        "How often other programs' need lowered the bound; it counts again once the bound is"
        " whole.",
        counter=True,
        metric=True,
    )
    memory: dict[str, int] = _figure(
        "What the process holds or plans for, by name: the items of the memory plan.",
        "bytes",
        factory=dict,
    )
    peak_rss_bytes: int = _figure("The most that the process has had in memory.", "bytes")
    cache_bytes: int = _figure(
        "Memory that experts may take.", "bytes", metric="expert_cache_bytes"
    )
    low_cache_bytes: int = _figure("Memory that low versions of experts may take.", "bytes")
    row_table_bytes: int = _figure(
        "Of tables that stay on disk and whose rows are read as tokens name them, as the token"
        " embedding.",
        "bytes",
    )
    micro_batch: int = _figure("Tokens of a prompt that are computed at once.", "tokens")
    micro_batch_reason: str = _figure("Why so many.", default="")
    io_threads: int = _figure(
        "Reads that may be in flight at a time: as many as the disk is seen to gain from, or as"
        " --io-threads says.",
        metric=True,
    )
    direct_io: bool = _figure("Whether every read went around the page cache.", default=False)

    prompt_tokens: int = _figure(
        "Tokens of prompts that were computed.", "tokens", counter=True, metric=True
    )
    prompt_seconds: float = _figure(
        "Time inside llama_decode for them.", "seconds", 0.0, counter=True
    )
    prompt_tps: float = _figure("Their rate.", "tokens per second", 0.0)
    gen_tokens: int = _figure(
        "Tokens that were decoded, of all answers.", "tokens", counter=True, metric="decoded_tokens"
    )
    gen_seconds: float = _figure("Time inside llama_decode for them.", "seconds", 0.0, counter=True)
    gen_tps: float = _figure(
        "Their rate, without the tokens of drafts that were rejected.", "tokens per second", 0.0
    )
    cpu_seconds: float = _figure(
        "CPU time of the process, of all threads.", "seconds", 0.0, counter=True
    )
    driver_seconds: float = _figure(
        "Time in which policies and predictors ran.", "seconds", 0.0, counter=True
    )
    events_dropped: int = _figure(
        "Gate events that policies, predictors and traces never saw, because too many waited: 0,"
        " unless the driver is far too slow.",
        counter=True,
    )

    hit_rate: float = _figure(
        "Of the slices that gates chose, the share that was resident then.", "share", 0.0
    )
    demand_hits: int = _figure(
        "Expert slices resident when they were asked for.",
        "slices",
        counter=True,
        metric="expert_hits",
    )
    demand_misses: int = _figure(
        "Expert slices that had to be read.", "slices", counter=True, metric="expert_misses"
    )
    evictions: int = _figure(
        "Expert slices dropped for others.", "slices", counter=True, metric="expert_evictions"
    )
    slot_moves: int = _figure(
        "Experts copied within the cache to free memory for experts of another size.",
        "experts",
        counter=True,
        metric="expert_moves",
    )
    bytes_read: int = _figure(
        "Bytes of experts read from disk.", "bytes", counter=True, metric="expert_read_bytes"
    )
    low_bytes_read: int = _figure("Of these, bytes of low versions.", "bytes", counter=True)
    row_hits: int = _figure(
        "Rows of tables on disk that tokens named and that were in memory; of a batch each counts"
        " once.",
        "rows",
        counter=True,
        metric=True,
    )
    row_misses: int = _figure("Rows that were read from disk.", "rows", counter=True, metric=True)
    row_bytes_read: int = _figure(
        "Bytes read for them, in whole pages.", "bytes", counter=True, metric="row_read_bytes"
    )
    stall_seconds: float = _figure(
        "Time compute waited for experts, mean over its threads.",
        "seconds",
        0.0,
        counter=True,
        metric=True,
    )
    disk_busy_seconds: float = _figure(
        "Time in which experts were being read.", "seconds", 0.0, counter=True, metric=True
    )
    prefetch_issued: int = _figure("Expert slices read ahead.", "slices", counter=True, metric=True)
    prefetch_useful: int = _figure(
        "Of these, slices that were then asked for.", "slices", counter=True, metric=True
    )
    prefetch_on: bool | None = _figure(
        "Whether prefetching pays at the moment, as measured; None: the strategy does not prefetch,"
        " or does not compare.",
        default=None,
        metric=True,
    )
    prefetch_gain: float | None = _figure(
        "Speed with it relative to without, minus 1, when it was last compared.", "share", None
    )
    prediction_accuracy: float | None = _figure(
        "Of the experts selected in decode, the share that had been predicted (ProMoE §4.1); None:"
        " no preset of a paper predicts.",
        "share",
        None,
    )
    fetch_rate: float | None = _figure(
        "Of these, the share that was where it is computed when their router selected.",
        "share",
        None,
    )
    good_pred: float | None = _figure("prediction_accuracy times fetch_rate.", "share", None)
    draft_length: int | None = _figure(
        "Tokens that are drafted at a time, as it pays at the moment; None: no drafts.",
        default=None,
        metric=True,
    )
    drafts_rejected: int = _figure(
        "Of gen_tokens, those of drafts that were rejected.", "tokens", counter=True, metric=True
    )
    drafts_gain: float | None = _figure(
        "Speed with drafts relative to without, minus 1, by what batches took and how many tokens"
        " were accepted.",
        "share",
        None,
    )

    expert_uses: int = _figure("Experts that gates chose for a token.", "experts", counter=True)
    experts_per_token: int = _figure(
        "Experts that all gates together choose for a token.", "experts"
    )
    tier: str = _figure(
        "The sidecar's tier that all experts are read in; original: their own precision.",
        default=ORIGINAL,
    )
    tau: float = _figure(
        "Weight below which an expert that is not in memory is left out of a decoded token; 0:"
        " none is.",
        default=0.0,
        metric=True,
    )
    served_low: int = _figure(
        "Of expert_uses, those that a low version served; the others were in `tier`.",
        "experts",
        counter=True,
    )
    skipped: int = _figure(
        "Of expert_uses, those not computed at all: with tau, of the decoded ones.",
        "experts",
        counter=True,
    )
    simulated_misses: int = _figure(
        "Experts that the cache which a deterministic run simulates would have had to read.",
        "experts",
        counter=True,
    )
    max_loss: float | None = _figure(
        "The bound of --max-loss, as a share of perplexity; None: no promise.",
        "share",
        None,
        metric=True,
    )
    estimated_loss: float | None = _figure(
        "Loss that was measured of what is given up within it.", "share", None, metric=True
    )

    device_hits: int = _figure(
        "Of the hits, expert slices that a GPU held.", "slices", counter=True, metric=True
    )
    device_uploads: int = _figure(
        "Experts written into a GPU's memory.", "experts", counter=True, metric=True
    )
    device_ahead: int = _figure(
        "Of these, those that began before their router selected.",
        "experts",
        counter=True,
        metric=True,
    )
    device_ahead_used: int = _figure(
        "Of these, those that it then did.", "experts", counter=True, metric=True
    )
    device_bytes: int = _figure(
        "Bytes of device_uploads.", "bytes", counter=True, metric="device_upload_bytes"
    )
    device_upload_seconds: float = _figure(
        "Time that writing them took.", "seconds", 0.0, counter=True, metric=True
    )
    device_downloads: int = _figure(
        "Slices that went from a GPU's slot, taken by another expert, back to the host.",
        "slices",
        counter=True,
    )
    device_bytes_down: int = _figure(
        "Bytes that went from a GPU's memory back to the host's.",
        "bytes",
        counter=True,
        metric="device_download_bytes",
    )
    device_download_seconds: float = _figure(
        "Time that reading them took.", "seconds", 0.0, counter=True, metric=True
    )
    device_wait_seconds: float = _figure(
        "Of writing into a GPU's memory, what compute waited for.",
        "seconds",
        0.0,
        counter=True,
        metric=True,
    )
    device_experts: int = _figure("Experts in GPUs' memory.", "experts", metric=True)
    device_memory: dict[str, dict[str, int]] = _figure(
        "Of each device with slots: the fewest and the most of a layer, their bytes with those of"
        " the stage, and what llama.cpp takes there.",
        factory=dict,
    )
    device_mode: str = _figure(
        "With vram_mode auto, how the next token will be computed.", default=""
    )
    device_gain: float | None = _figure(
        "Speed with devices relative to without, minus 1, when it was last compared.", "share", None
    )

    @property
    def device_hit_rate(self) -> float:
        """Share of the routed slices that were on a device."""
        uses = self.demand_hits + self.demand_misses
        return self.device_hits / uses if uses else 0.0

    @property
    def hit_summary(self) -> str:
        """Hit rate in words."""
        off = (
            ", off: the CPU alone is faster"
            if self.device_mode == "cpu" and self.device_gain is not None
            else ""
        )
        return f"hit rate {self.hit_rate:.1%}" + (
            f" ({self.device_hit_rate:.1%} on the GPU{off})" if self.device_memory else ""
        )

    @property
    def decoded_uses(self) -> int:
        """Part of expert_uses from decoded tokens."""
        return self.gen_tokens * self.experts_per_token

    @property
    def precision_summary(self) -> str:
        """Allowed and actual loss of precision in words; empty if there is none."""
        uses = max(self.expert_uses, 1)
        parts = [f"all experts in {self.tier}"] if self.tier != ORIGINAL else []
        if self.served_low:
            parts.append(f"{self.served_low / uses:.1%} of experts in low precision")
        if self.tau:  # the only reason to skip
            parts.append(
                f"{self.skipped / max(self.decoded_uses, 1):.1%} of experts left out below a weight"
                f" of {self.tau:.3g}"
            )
        elif self.skipped:
            parts.append(f"{self.skipped / uses:.1%} of experts skipped")
        if not parts:
            return ""
        bound = (
            ""
            if self.max_loss is None
            else f" (measured loss {self.estimated_loss:.2%}, bound {self.max_loss:.2%})"
        )
        return ", ".join(parts) + bound

    def metrics(self) -> Iterator[Metric]:
        """Yield the known metrics, including those of several figures."""
        for f in fields(self):
            value, name = getattr(self, f.name), f.metadata["metric"]
            name = f.name if name is True else name
            if (
                name
                and value is not None
                and (self.device_memory or not f.name.startswith("device_"))
            ):
                yield Metric(
                    name + "_total" * f.metadata["counter"],
                    f.metadata["text"],
                    {"": int(value) if isinstance(value, bool) else value},
                )
        by_precision = {
            "high": self.expert_uses - self.served_low - self.skipped,
            "low": self.served_low,
            "none": self.skipped,
        }
        text = "Experts that gates chose for a token, by the precision that served them."
        yield Metric(
            "expert_uses_total",
            text,
            {f'{{precision="{name}"}}': n for name, n in by_precision.items()},
        )
        yield Metric("tier_info", _TABLE["tier"]["text"], {f'{{tier="{self.tier}"}}': 1})
        if self.device_memory:
            yield Metric(
                "device_bytes",
                "GPU memory that experts may take.",
                {
                    f'{{device="{name}"}}': use["experts"]
                    for name, use in self.device_memory.items()
                },
            )

    @classmethod
    def of(cls, counters: native.Stats, timing: Timing, **facts: Any) -> Stats:
        """Make statistics from native counters and decode times.

        Args:
            facts: Further fields.
        """
        counted = {name: getattr(counters, counter) for name, counter in _NATIVE.items()}
        counted = {
            name: n / 1e9 if name.endswith("_seconds") else n for name, n in counted.items()
        } | asdict(timing)
        return cls(**counted, **_rates(counted), **facts)

    def since(self, earlier: Stats) -> Stats:
        """Return the difference from an earlier snapshot."""
        counted: dict[str, Any] = {
            name: getattr(self, name) - getattr(earlier, name) for name in COUNTERS
        }
        return replace(self, **counted, **_rates(counted))

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2) + "\n"


def _native_name(name: str) -> str:
    return name.removesuffix("_seconds") + "_ns" if name.endswith("_seconds") else name


def _rates(counted: Mapping[str, float]) -> dict[str, Any]:
    uses = counted["demand_hits"] + counted["demand_misses"]
    n_tokens = {
        "prompt": counted["prompt_tokens"],
        "gen": counted["gen_tokens"] - counted["drafts_rejected"],
    }
    rates = {
        f"{kind}_tps": n / seconds if (seconds := counted[f"{kind}_seconds"]) else 0.0
        for kind, n in n_tokens.items()
    }
    return rates | {"hit_rate": counted["demand_hits"] / uses if uses else 0.0}


_TABLE = {f.name: f.metadata for f in fields(Stats)}
_NATIVE = {
    name: counter
    for name in _TABLE
    if (counter := _native_name(name)) in {name for name, *_ in native.Stats._fields_}
}
COUNTERS = tuple(name for name, line in _TABLE.items() if line["counter"])
