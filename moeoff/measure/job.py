"""Measurement jobs: llama-bench's tests, run in one process with one configuration."""

from __future__ import annotations

import contextlib
import importlib.resources
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import OptionError
from ..system import files

MOEOFF, STOCK = "moeoff", "stock"


@dataclass(frozen=True)
class BenchTest:
    """A test: a prompt, then single tokens, at an untimed context depth of `depth`
    tokens.

    Attributes:
        continues: True if the previous test leaves those tokens in the context (in a
            job of one repetition); otherwise they are computed first.
    """

    n_prompt: int
    n_gen: int
    depth: int = 0
    continues: bool = False

    @property
    def name(self) -> str:
        """llama-bench's name: pp512, tg128, pp512+tg128, tg128 @ d4096."""
        parts = [f"pp{self.n_prompt}"] * bool(self.n_prompt) + [f"tg{self.n_gen}"] * bool(
            self.n_gen
        )
        return "+".join(parts) + (f" @ d{self.depth}" if self.depth else "")

    @property
    def n_tokens(self) -> int:
        """Number of timed tokens."""
        return self.n_prompt + self.n_gen


@dataclass(frozen=True)
class Job:
    """The description of a measuring process.

    Attributes:
        model: Path of the GGUF.
        engine: MOEOFF, or STOCK for llama_cpp.Llama from the same library.
        options: Picklable options of `moeoff.Llama`, or for stock of
            `moeoff.llamacpp.llama.StockLlama` and `n_cpu_moe`, the number of first
            layers with experts in host memory, as llama.cpp's `--n-cpu-moe`.
        tests: Tests in order; residency carries over.
        repetitions: Repetitions of each test, each on another piece of text.
        warm_up: True to add an uncounted repetition first.
        text: File whose tokens are computed; None: `default_text`.
        answer: Tokens to decode instead of the text's, followed by the model's
            likeliest ones, so an empty answer is greedy. The measurement's
            `closed["answer"]` has the result. None: the text's.
        seconds: Time after which a test ends early, without repetitions; None: no
            limit.
        probe_seconds: Duration of the final measurement of the disk; 0: none.
        limit_bytes: Limit of a memory cgroup around the process, or None.
        registers: Python files to import first, which register policies, predictors and
            presets.
        environment: Additional environment variables.
        meter: "module:class" in `registers` that meters the time of single tokens
            (`scripts/research/time_parts.py`), or "".
        tells: True to report progress twice a second.
        flags: Options as errors name them, with the form of their value. Empty: longest
            names.
    """

    model: str
    engine: str = MOEOFF
    options: Mapping[str, Any] = field(default_factory=dict)
    tests: tuple[BenchTest, ...] = ()
    repetitions: int = 5
    warm_up: bool = True
    text: str | None = None
    answer: tuple[int, ...] | None = None
    seconds: float | None = None
    probe_seconds: float = 1.0
    limit_bytes: int | None = None
    registers: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    meter: str = ""
    tells: bool = False
    flags: Mapping[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Sample:
    """A repetition of a test.

    Attributes:
        test: Index in the job.
        n_tokens: Timed tokens.
        seconds: Time in llama_decode.
        counters: Counters of `moeoff.Stats` by name; empty for stock.
        parts: Sums of the job's meter for single tokens, by name.
    """

    test: int
    n_tokens: int
    seconds: float
    cpu_seconds: float = 0.0
    page_faults: int = 0
    counters: Mapping[str, float] = field(default_factory=dict)
    parts: Mapping[str, float] = field(default_factory=dict)

    @property
    def tps(self) -> float:
        return self.n_tokens / self.seconds if self.seconds else 0.0


def rates(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the combined figures of a test's repetitions, without unknown ones.

    Returns:
        tps, cpu_ms_per_token, page_faults_per_token; mb_per_token (10^6 bytes read from
        disk), hit_rate and device_hit_rate (share of the routed slices in memory and on
        a GPU), stall_share (of the time), driver_ms_per_token, evictions_per_token,
        prefetched_per_token, prefetch_precision (share of prefetches that were used),
        low and skipped (share of the routed experts).
    """
    n, seconds = sum(s.n_tokens for s in samples), sum(s.seconds for s in samples)
    if not n or not seconds:
        return {}
    out = {
        "tps": n / seconds,
        "cpu_ms_per_token": 1e3 * sum(s.cpu_seconds for s in samples) / n,
        "page_faults_per_token": sum(s.page_faults for s in samples) / n,
    }
    if not all(s.counters for s in samples):
        return out
    c = {name: sum(s.counters[name] for s in samples) for name in samples[0].counters}
    uses, chosen = max(c["demand_hits"] + c["demand_misses"], 1), max(c["expert_uses"], 1)
    return out | {
        "mb_per_token": c["bytes_read"] / 1e6 / n,
        "hit_rate": c["demand_hits"] / uses,
        "device_hit_rate": c["device_hits"] / uses,
        "stall_share": c["stall_seconds"] / seconds,
        "driver_ms_per_token": 1e3 * c["driver_seconds"] / n,
        "evictions_per_token": c["evictions"] / n,
        "prefetched_per_token": c["prefetch_issued"] / n,
        "prefetch_precision": c["prefetch_useful"] / max(c["prefetch_issued"], 1),
        "low": c["served_low"] / chosen,
        "skipped": c["skipped"] / chosen,
    }


@dataclass
class Measurement:
    """A job's results.

    Attributes:
        opened: Facts of the opened model: seconds, arena and budget in bytes,
            micro-batch, ...
        closed: Facts at the end: peak_rss_bytes, cgroup_peak_bytes (with a limit;
            includes the page cache), disk_bytes_per_second, direct_io, prefetch_on,
            prefetch_gain, ...
        samples: Samples of all tests in order.
        error: Reason for an early end, or "".
    """

    job: Job
    opened: dict[str, Any] = field(default_factory=dict)
    closed: dict[str, Any] = field(default_factory=dict)
    samples: list[Sample] = field(default_factory=list)
    error: str = ""

    def of(self, test: int) -> list[Sample]:
        return [sample for sample in self.samples if sample.test == test]


_CHUNK = 1 << 16  # characters that are tokenized at once


def default_text() -> str:
    """Return half a million characters of Python's `help()` texts, English prose with
    code.

    Raises:
        OptionError: This Python has no help texts.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise OptionError(
            "this Python comes without its help texts, which are fed by default", hint={"text": ...}
        ) from None
    return "\n".join(topics[name] for name in sorted(topics))


@contextlib.contextmanager
def default_texts(text: Sequence[str | os.PathLike[str]]) -> Iterator[list[str]]:
    """Yield the given paths, or the package's calibration text and Python's help texts.

    Raises:
        OptionError: No text is given, and this Python has no help texts.
    """
    if text:
        yield [os.fspath(path) for path in text]
        return
    with tempfile.TemporaryDirectory(prefix="moeoff-text-") as folder:
        path = os.path.join(folder, "python-help.txt")
        with open(path, "w", encoding="utf-8") as file:
            file.write(default_text())
        data = importlib.resources.files(__package__.split(".")[0]) / "data" / "calibration.txt"
        yield [str(data), path]


def read_text_or_default(path: str | os.PathLike[str] | None) -> str:
    """Return the text of a file, or the default one.

    Raises:
        OptionError: The file is unreadable or empty.
    """
    if path is None:
        return default_text()
    text = files.read_text(path, errors="replace", newlines=True)
    if not text.strip():
        raise OptionError(f"{os.fspath(path)}: holds no text")
    return text


class TokenStream:
    """Consecutive pieces of a text, which repeats at its end.

    Args:
        tokenizer: Object with `tokenize` and `token_bos`, as llama_cpp.Llama.
        adds_bos: True to begin contexts with the beginning-of-text token.
    """

    def __init__(self, tokenizer: Any, text: str, adds_bos: bool):
        self._tokenizer, self._text = tokenizer, text
        self._bos = tokenizer.token_bos() if adds_bos else None
        self._tokens: list[int] = []
        self._at = 0

    def take(self, n: int, first: bool = False) -> list[int]:
        """Return the next n tokens.

        Args:
            first: True at the beginning of a context.
        """
        while len(self._tokens) < n:
            piece = self._text[self._at : self._at + _CHUNK]
            self._at = self._at + _CHUNK if self._at + _CHUNK < len(self._text) else 0
            self._tokens += self._tokenizer.tokenize(
                piece.encode("utf-8", "replace"), add_bos=False
            )
        out, self._tokens = self._tokens[:n], self._tokens[n:]
        if first and self._bos is not None and out:
            out[0] = self._bos
        return out
