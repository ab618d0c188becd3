"""What a measurement consists of: tests, as llama-bench names them, run in one process with one configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MOEOFF, STOCK = "moeoff", "stock"


@dataclass(frozen=True)
class BenchTest:
    """Tokens of a prompt, then tokens one by one, behind `depth` tokens that are in the context already and are not timed."""

    n_prompt: int
    n_gen: int
    depth: int = 0

    @property
    def name(self) -> str:
        """llama-bench's: pp512, tg128, pp512+tg128, tg128 @ d4096."""
        parts = [f"pp{self.n_prompt}"] * bool(self.n_prompt) + [f"tg{self.n_gen}"] * bool(self.n_gen)
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def n_tokens(self) -> int:
        """That are timed."""
        return self.n_prompt + self.n_gen


@dataclass(frozen=True)
class Job:
    """One process.

    Attributes:
        model: path of the GGUF.
        engine: MOEOFF, or STOCK: llama_cpp.Llama from the same library.
        options: of `moeoff.Llama`, or for stock of llama_cpp.Llama and `use_extra_bufts`.
        tests: run one after the other; what one leaves in memory is there for the next.
        repetitions: of each test, each on another piece of the text.
        warm_up: one more before them, that is not counted.
        text: file whose tokens are fed; None: `moeoff.bench.text.usual_text`.
        skip: tokens of the text that are left out at its beginning.
        seconds: after so many a test ends with the tokens that it has, and is not repeated; None: never.
        probe_seconds: that the disk's rate is measured for at the end; 0: not at all.
        limit_bytes: of a memory cgroup around the process; None: none of its own.
    """

    model: str
    engine: str = MOEOFF
    options: Mapping[str, Any] = field(default_factory=dict)
    tests: tuple[BenchTest, ...] = ()
    repetitions: int = 5
    warm_up: bool = True
    text: str | None = None
    skip: int = 0
    seconds: float | None = None
    probe_seconds: float = 1.0
    limit_bytes: int | None = None

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Job:
        """Of `dataclasses.asdict`, as JSON has kept it."""
        return cls(**fields | {"tests": tuple(BenchTest(**test) for test in fields["tests"])})


@dataclass(frozen=True)
class Sample:
    """One repetition of a test. Counters are those of `moeoff.Stats`; of stock they are 0.

    Attributes:
        test: its place in the job.
        n_tokens: computed and timed.
        seconds: inside llama_decode.
    """

    test: int
    n_tokens: int
    seconds: float
    bytes_read: int = 0
    stall_seconds: float = 0.0
    hits: int = 0
    misses: int = 0
    driver_seconds: float = 0.0
    cpu_seconds: float = 0.0
    device_hits: int = 0

    @property
    def tps(self) -> float:
        return self.n_tokens / self.seconds if self.seconds else 0.0


@dataclass
class Measurement:
    """What a job gave.

    Attributes:
        opened: facts of the opened model: seconds, arena and budget in bytes, micro-batch, ...
        closed: facts at the end: peak_rss_bytes, disk_bytes_per_second, direct_io, prefetch_on, prefetch_gain, ...
        samples: of all tests, in the order of time.
        error: why it ended early; empty: it did not.
    """

    job: Job
    opened: dict[str, Any] = field(default_factory=dict)
    closed: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    error: str = ""

    def of(self, test: int) -> list[Sample]:
        return [sample for sample in self.samples if sample.test == test]
