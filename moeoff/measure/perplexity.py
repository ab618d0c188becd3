"""`evaluate`: a model on windows of text, token by token as llama-perplexity scores them, alone or compared with the lossless one.

Knows a `Llama` and its logits; how it came by its experts is not known here. Memory: logits of one batch (planned for by
`Llama(logits_all=True)`) and about 10 MB; the lossless model's predictions lie in a temporary file.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..engine.llama import Llama
from ..engine.stats import Stats
from ..errors import ModelError, OptionError
from ..experts.sidecar import ORIGINAL
from ..gguf.model_index import ModelIndex
from ..option import table_of
from ..precision import Precision
from ..system.files import Closing, read_text
from ..system.memory import format_size, trim
from .statistics import Quality, Scores, divergence, log_probs

N_BATCH = 512  # tokens in a graph, as llama-perplexity's -ub
MODES = ("prefill", "decode", "simulated")
_CHUNK = 1 << 18  # logits turned into probabilities at once: about 1 MB for each temporary
_FLOOR = -1e4  # of stored log-probabilities, where a model forbids a token


def open_model(model: str, ctx: int, **options: Any) -> Llama:
    """The model with room for windows of ctx tokens and the logits of all of them."""
    trim()  # what a model closed before this one has left would count against the budget
    n_batch = min(ctx, options.pop("n_batch", N_BATCH))
    return Llama(model, n_ctx=ctx, n_batch=n_batch, n_ubatch=min(n_batch, options.pop("n_ubatch", n_batch)), logits_all=True, **options)


@dataclass(frozen=True)
class Window:
    """n_ctx tokens of a text, its first one replaced by the beginning-of-text token where the model wants one.

    text: which of the texts, from 0.
    """

    tokens: tuple[int, ...]
    text: int


def n_scored(n_ctx: int, n_prompt: int | None = None) -> int:
    """How many tokens of a window are scored: those behind its prompt, by default its first half, that have a successor in it."""
    return n_ctx - (n_ctx // 2 if n_prompt is None else n_prompt) - 1


def read_windows(llm: Llama, paths: Sequence[str | os.PathLike[str]], n_ctx: int, chunks: int | None = None) -> list[Window]:
    """The windows that llama-perplexity makes of each file: consecutive, without overlap, the remainder left out.

    Args:
        chunks: at most so many of each file.

    Raises:
        OptionError: a file cannot be read, is not UTF-8, or is shorter than a window.
    """
    if n_ctx < 4:
        raise OptionError(f"windows of {n_ctx} tokens are too short: at least 4 are needed")
    add_bos, bos = llm.adds_bos(), llm.token_bos()
    windows = []
    for index, path in enumerate(paths):
        text = read_text(path).removesuffix("\n")
        tokens = llm.tokenize(text.encode(), add_bos=True, special=False)
        n = len(tokens) // n_ctx
        if n == 0:
            raise OptionError(
                f"{path}: has {len(tokens)} tokens, fewer than a window of {n_ctx}: it takes a longer text, or shorter windows", hint={"ctx": ...}
            )
        for start in range(0, min(n, chunks or n) * n_ctx, n_ctx):
            window = tokens[start : start + n_ctx]
            windows.append(Window((bos, *window[1:]) if add_bos else tuple(window), index))
    return windows


class Reference(Closing):
    """The lossless model's predictions for each scored token. Use with `with`: the log-probabilities lie in a temporary file.

    They are kept as float16 below the likeliest token's and made to sum to one again when read: KL is exact to about 1e-6.
    The token's own probability and the likeliest token are kept as they were.

    Attributes:
        nll: [n_windows, n_scored] float64.
        top: [n_windows, n_scored] int32.
    """

    def __init__(self, n_windows: int, n_tokens: int, n_vocab: int):
        """Raises `OptionError` if the folder of temporary files (TMPDIR) has no room."""
        self.nll = np.full((n_windows, n_tokens), np.nan)
        self.top = np.zeros((n_windows, n_tokens), np.int32)
        self._shape = (n_windows, n_tokens, n_vocab)
        needed, folder = 2 * n_windows * n_tokens * n_vocab, tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if needed > free:
            raise OptionError(
                f"{folder}: {format_size(needed)} are needed for the lossless model's predictions, and {format_size(free)} are free: set TMPDIR, or evaluate fewer windows",
                hint={"chunks": ...},
            )
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)

    @classmethod
    def record(
        cls, llm: Llama, windows: Sequence[Window], mode: str = "prefill", progress: Callable[[int], None] | None = None, n_prompt: int | None = None,
        until: float = math.inf, least: int = 1,
    ) -> Reference:  # fmt: skip
        """Asks the lossless model; see `evaluate`.

        Args:
            until: of `time.monotonic`, when no further window is begun, but so many are read at the least.
        """
        reference = cls(len(windows), n_scored(len(windows[0].tokens), n_prompt), llm.n_vocab())
        try:
            n = llm.call(_run, llm, windows, mode, progress, reference._put, n_prompt, until, least)
            reference.nll, reference.top = reference.nll[:n], reference.top[:n]
        except BaseException:
            reference.close()
            raise
        return reference

    def _put(self, window: int, row: int, logits: np.ndarray, targets: np.ndarray) -> None:
        logp = log_probs(logits)
        rows = slice(row, row + len(logits))
        self.nll[window, rows] = -logp[np.arange(len(targets)), targets]
        self.top[window, rows] = logits.argmax(axis=1)
        logp -= logp.max(axis=1, keepdims=True)
        os.pwrite(self._file.fileno(), np.maximum(logp, _FLOOR).astype("<f2").tobytes(), self._offset(window, row))

    def read(self, window: int, row: int, n: int) -> np.ndarray:
        """[n, n_vocab] float32 log-probabilities of n scored tokens."""
        n_vocab = self._shape[2]
        data = os.pread(self._file.fileno(), 2 * n * n_vocab, self._offset(window, row))
        return log_probs(np.frombuffer(data, "<f2").reshape(n, n_vocab).astype(np.float32))

    def _offset(self, window: int, row: int) -> int:
        return 2 * self._shape[2] * (window * self._shape[1] + row)

    def close(self) -> None:
        self._file.close()


def evaluate(
    llm: Llama,
    windows: Sequence[Window],
    reference: Reference | None = None,
    *,
    mode: str = "prefill",
    progress: Callable[[int], None] | None = None,
    n_prompt: int | None = None,
) -> Scores:
    """Scores what lies behind the prompt of each window.

    Args:
        llm: opened with `logits_all=True` and room for a window.
        reference: the lossless model's predictions for the same windows, or for more that begin with them, in the same mode.
        mode: "prefill" feeds whole batches, as llama-perplexity does; "decode" feeds what is scored token by token, as an
            answer is computed; "simulated" feeds it in batches whose tokens are each decided as if decoded alone, behind a simulated
            cache: what a deterministic `Llama` with `Precision.resident` computes token by token, in less time.
        progress: told the number of tokens computed so far.
        n_prompt: tokens of a window that are its prompt; None: its first half, as llama-perplexity has it.

    Raises:
        OptionError: windows longer than the model's context, or an unknown mode.
        MoeoffError: what `Llama` raises while computing.
    """
    shape = (len(windows), n_scored(len(windows[0].tokens), n_prompt))
    nll, kl, same = np.empty(shape), np.empty(shape), np.empty(shape, bool)

    def score(window: int, row: int, logits: np.ndarray, targets: np.ndarray) -> None:
        logp = log_probs(logits)
        rows = slice(row, row + len(logits))
        nll[window, rows] = -logp[np.arange(len(targets)), targets]
        if reference is not None:
            kl[window, rows] = divergence(reference.read(window, row, len(logits)), logp)
            same[window, rows] = logits.argmax(axis=1) == reference.top[window, rows]

    before = llm.stats().bytes_read
    llm.call(_run, llm, windows, mode, progress, score, n_prompt)
    bytes_read = llm.stats().bytes_read - before
    return Scores(nll, bytes_read=bytes_read) if reference is None else Scores(nll, reference.nll[: len(windows)], kl, same, bytes_read)


def _run(llm: Llama, windows: Sequence[Window], mode: str, progress: Callable[[int], None] | None,
         sink: Callable[[int, int, np.ndarray, np.ndarray], None], n_prompt: int | None = None, until: float = math.inf, least: int = 1) -> int:  # fmt: skip
    """Gives `sink` (window, row, logits [n, n_vocab], the tokens that came [n]) for each run of scored tokens. Returns how many windows it read."""
    n_ctx = len(windows[0].tokens)
    if mode not in MODES:
        raise OptionError(f"no mode {mode!r}; there are {', '.join(MODES)}")
    if n_ctx > llm.n_ctx():
        raise OptionError(f"windows of {n_ctx} tokens do not fit the context of {llm.n_ctx()}")
    first, last, n_vocab = n_ctx // 2 if n_prompt is None else n_prompt, n_ctx - 1, llm.n_vocab()
    step = max(_CHUNK // n_vocab, 1)
    n = 0
    for index, window in enumerate(windows):
        if index >= least and time.monotonic() > until:
            windows = windows[:index]
            break
        llm.clear_context()
        tokens = np.asarray(window.tokens, np.int32)
        for start, stop in _batches(n_ctx, first, llm.n_batch, mode):
            with llm.batches_as(decode=True) if mode == "simulated" and start >= first else contextlib.nullcontext():
                llm.decode_batch(tokens[start:stop].tolist(), start, first)
            scored = (max(start, first), min(stop, last))
            if scored[0] < scored[1]:
                logits = llm.batch_logits(scored[1] - scored[0])
                if np.isnan(logits).any():
                    raise ModelError(f"{llm.model_path}: what it computes is not a number (NaN): its weights are damaged, or too large for their type")
                for row in range(scored[0], scored[1], step):
                    end = min(row + step, scored[1])
                    sink(index, row - first, logits[row - scored[0] : end - scored[0]], tokens[row + 1 : end + 1])
            n += stop - start
            if progress:
                progress(n)
    llm.clear_context()
    return len(windows)


def _batches(n_ctx: int, n_prompt: int, n_batch: int, mode: str) -> list[tuple[int, int]]:
    whole = n_ctx if mode == "prefill" else n_prompt
    batches = [(start, min(start + n_batch, whole)) for start in range(0, whole, n_batch)]
    step = n_batch if mode == "simulated" else 1
    return batches + [(start, min(start + step, n_ctx - 1)) for start in range(whole, n_ctx - 1, step)]  # the last token's prediction is not scored


@dataclass(frozen=True)
class Evaluation:
    """Results of `evaluate_model`: quality over all texts and of each; n_tokens were computed, not all of them scored; bytes_read of experts."""

    quality: Quality
    texts: tuple[Quality, ...]
    precision: Precision
    stats: Stats
    n_tokens: int
    seconds: float
    bytes_read: int


_CONTEXT = ("attention", "type_k", "type_v")  # of a lossless model f16
_LOSSY = {"tier", "precision", "max_loss", "deterministic", "stride", *table_of(Precision), *_CONTEXT}  # options without which a model is lossless


def evaluate_model(model: str, text: Sequence[str], *, ctx: int = 512, chunks: int | None = None, mode: str = "prefill",
                   progress: Callable[[str, int, int], None] | None = None, **options: Any) -> Evaluation:  # fmt: skip
    """Measures perplexity, and with a lower precision the distance from the lossless model on the same windows.

    Args:
        ctx: tokens of a window; its second half is scored.
        chunks: only the first windows of each text.
        mode: "prefill", "decode" or "simulated", see `moeoff.measure.perplexity.evaluate`; the last for deterministic runs alone.
        progress: told what is computed, tokens done and tokens there are.
        **options: of `moeoff.Llama`.

    Raises:
        MoeoffError: the model, a text, the budget or an option is no good.
    """
    if mode == "simulated" and not options.get("deterministic"):
        raise OptionError("mode simulated is for deterministic runs: others decide by what is in memory, token by token")
    ModelIndex.read(model).require_text()
    # of the same tokens, by a cache that gives nothing up and needs no sidecar
    lossless = {name: value for name, value in options.items() if name not in _LOSSY} | {"strategy": "lru", "experts": False, "verify_reads": False}

    def tokens(stage: str, windows: Sequence[Window]) -> Callable[[int], None] | None:
        return progress and functools.partial(lambda total, n: progress(stage, n, total), len(windows) * ctx)

    def measured(llm: Llama, reference: Reference | None) -> tuple[list[Window], Scores, float, Stats, Precision]:
        windows = read_windows(llm, text, ctx, chunks)
        started = time.perf_counter()
        scores = evaluate(llm, windows, reference, mode=mode, progress=tokens("evaluating", windows))
        return windows, scores, time.perf_counter() - started, llm.stats(), llm.engine.quality.precision

    # what is wrong with the options comes before minutes of computing, and what is given up is known with the strategy's own
    with open_model(model, ctx, **options) as llm:
        quality, config = llm.engine.quality, llm.engine.config
        lossy = quality.selected is not None or not quality.precision.lossless or quality.source.tier != ORIGINAL
        lossy |= any(getattr(config, name) not in (None, "f16") for name in _CONTEXT)
        result = None if lossy else measured(llm, None)
    if result is None:
        with open_model(model, ctx, **lossless) as llm:
            windows = read_windows(llm, text, ctx, chunks)
            reference = Reference.record(llm, windows, mode, tokens("lossless", windows))
        with reference, open_model(model, ctx, **options) as llm:
            result = measured(llm, reference)
    windows, scores, seconds, stats, precision = result
    starts = np.searchsorted([window.text for window in windows], range(len(text) + 1)).tolist()
    by_text = [scores.quality(slice(*ends)) for ends in zip(starts, starts[1:])]
    return Evaluation(scores.quality(), tuple(by_text), precision, stats, len(windows) * ctx, seconds, scores.bytes_read)
