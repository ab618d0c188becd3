"""A measurement: tests, as llama-bench names them, run in one process with one
configuration on the tokens of a text; and what it gave.
"""

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
    """Tokens of a prompt, then tokens one by one, behind `depth` tokens that are in the
    context already and are not timed.

    Attributes:
        continues: the test before this one has left those tokens in the context (in a
            job of one repetition); otherwise they are computed first.
    """

    n_prompt: int
    n_gen: int
    depth: int = 0
    continues: bool = False

    @property
    def name(self) -> str:
        """llama-bench's: pp512, tg128, pp512+tg128, tg128 @ d4096."""
        parts = [f"pp{self.n_prompt}"] * bool(self.n_prompt) + [f"tg{self.n_gen}"] * bool(
            self.n_gen
        )
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
        options: of `moeoff.Llama`, objects that can be pickled, or for stock of
            `moeoff.llamacpp.llama.StockLlama`, and `n_cpu_moe`: the experts of so many
            first layers stay in the CPU's memory, as with `--n-cpu-moe` of llama.cpp's
            programs.
        tests: run one after the other; what one leaves in memory is there for the next.
        repetitions: of each test, each on another piece of the text.
        warm_up: one more before them, that is not counted.
        text: file whose tokens are fed; None: `default_text`.
        answer: tokens that are decoded one by one in the place of the text's, and
            behind them the model's own, always the likeliest. So the empty one is the
            model's greedy answer, which the measurement's `closed["answer"]` has, for
            others to decode the same. None: the text's.
        seconds: after so many a test ends with the tokens that it has, and is not
            repeated; None: never.
        probe_seconds: that the disk's rate is measured for at the end; 0: not at all.
        limit_bytes: of a memory cgroup around the process; None: none of its own.
        registers: Python files that are imported before the model is opened, for the
            policies, predictors and presets they register.
        environment: variables of the process, added to this one's.
        meter: "module:class" of `registers`, which meters the time of single tokens
            (`scripts/research/time_parts.py`); empty: nothing does.
        tells: how far it is, twice a second.
        flags: of options, as an error shall name them, with the form of their value;
            empty: by their longest names.
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
    """One repetition of a test.

    Attributes:
        test: its place in the job.
        n_tokens: computed and timed.
        seconds: inside llama_decode.
        counters: those of `moeoff.Stats`, by name; of stock there are none.
        parts: of a test of single tokens, what the job's meter has summed up, by name.
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
    """Figures of some repetitions of one test together; those that are unknown, as of
    stock all about experts, are left out.

    Returns:
        tps, cpu_ms_per_token, page_faults_per_token; mb_per_token (10^6 bytes read from
        disk), hit_rate and device_hit_rate (of the slices that routers selected, those
        in memory and those on a GPU), stall_share (of the time), driver_ms_per_token,
        evictions_per_token, prefetched_per_token, prefetch_precision (of what was
        prefetched, the share that was used), low and skipped (of the experts that
        routers selected).
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
        opened: facts of the opened model: seconds, arena and budget in bytes,
            micro-batch, ...
        closed: facts at the end: peak_rss_bytes, cgroup_peak_bytes (page cache
            included, with a limit), disk_bytes_per_second, direct_io, prefetch_on,
            prefetch_gain, ...
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


_CHUNK = 1 << 16  # characters that are tokenized at once


def default_text() -> str:
    """Half a million characters of English prose about Python, with code in it, which
    every Python brings along: the help of its `help()`.

    Raises:
        OptionError: this Python has been stripped of it.
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
    """Yield the paths of the given texts or, if there are none, of the package's
    calibration text and of the help texts of Python.

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


def read_text(path: str | os.PathLike[str] | None) -> str:
    """The text of a file, or the usual one.

    Raises:
        OptionError: it cannot be read, or is empty.
    """
    if path is None:
        return default_text()
    text = files.read_text(path, errors="replace", newlines=True)
    if not text.strip():
        raise OptionError(f"{os.fspath(path)}: holds no text")
    return text


class TokenStream:
    """Pieces of a text, one behind the other and from its beginning again where it
    ends.

    Args:
        tokenizer: has `tokenize` and `token_bos`, as llama_cpp.Llama.
        adds_bos: each piece that begins a context begins with the token that the model
            wants there.
    """

    def __init__(self, tokenizer: Any, text: str, adds_bos: bool):
        self._tokenizer, self._text = tokenizer, text
        self._bos = tokenizer.token_bos() if adds_bos else None
        self._tokens: list[int] = []
        self._at = 0

    def take(self, n: int, first: bool = False) -> list[int]:
        """The next n tokens.

        Args:
            first: they begin a context.
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
