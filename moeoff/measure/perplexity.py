"""Perplexity of a model on windows of text, as in llama-perplexity, and its quality
loss.

It takes about 10 MB besides the logits of one batch, which `Llama(logits_all=True)`
plans.
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
from .statistics import QualityMetrics, Scores, divergence, log_probs

N_BATCH = 512  # micro-batch size in tokens, as in llama-perplexity
EVAL_MODES = ("prefill", "decode", "simulated")
_CHUNK = 1 << 18  # logits processed at once: about 1 MB for each temporary
_FLOOR = -1e4  # lowest stored log-probability, for tokens a model excludes


def open_model(model: str, ctx: int, **options: Any) -> Llama:
    """Open a model for windows of `ctx` tokens with the logits of all tokens."""
    trim()  # memory left by a closed model would count against the budget
    n_batch = min(ctx, options.pop("n_batch", N_BATCH))
    return Llama(
        model,
        n_ctx=ctx,
        n_batch=n_batch,
        n_ubatch=min(n_batch, options.pop("n_ubatch", n_batch)),
        logits_all=True,
        **options,
    )


@dataclass(frozen=True)
class Window:
    """A window of a text. A model's beginning-of-text token replaces the first token."""

    tokens: tuple[int, ...]  # n_ctx
    text: int  # index


def n_scored(n_ctx: int, n_prompt: int | None = None) -> int:
    """Return the scored tokens of a window: those with a successor after its prompt.

    Args:
        n_prompt: Prompt length in tokens. Default: half of the window.
    """
    return n_ctx - (n_ctx // 2 if n_prompt is None else n_prompt) - 1


def read_windows(
    llm: Llama, paths: Sequence[str | os.PathLike[str]], n_ctx: int, chunks: int | None = None
) -> list[Window]:
    """Cut files into consecutive windows without the remainder, as llama-perplexity
    does.

    Args:
        chunks: Most windows of each file.

    Raises:
        OptionError: A file cannot be read, is not UTF-8, or is shorter than a window.
    """
    if n_ctx < 4:
        raise OptionError(f"windows: expected at least 4 tokens, got {n_ctx}")
    add_bos, bos = llm.adds_bos(), llm.token_bos()
    windows = []
    for index, path in enumerate(paths):
        text = read_text(path).removesuffix("\n")
        tokens = llm.tokenize(text.encode(), add_bos=True, special=False)
        n = len(tokens) // n_ctx
        if n == 0:
            message = f"{path}: expected at least a window of {n_ctx} tokens, got {len(tokens)}"
            raise OptionError(message, hint={"ctx": ...})
        for start in range(0, min(n, chunks or n) * n_ctx, n_ctx):
            window = tokens[start : start + n_ctx]
            windows.append(Window((bos, *window[1:]) if add_bos else tuple(window), index))
    return windows


class Reference(Closing):
    """The lossless model's predictions of the scored tokens, used with `with`.

    A temporary file holds float16 log-probabilities relative to the likeliest token,
    which are normalized again when read: KL is exact to about 1e-6.

    Attributes:
        nll: [n_windows, n_scored] float64.
        top: [n_windows, n_scored] int32.
    """

    def __init__(self, n_windows: int, n_tokens: int, n_vocab: int):
        """Create the file. Raise `OptionError` if TMPDIR has too little free space."""
        self.nll = np.full((n_windows, n_tokens), np.nan)
        self.top = np.zeros((n_windows, n_tokens), np.int32)
        self._shape = (n_windows, n_tokens, n_vocab)
        needed, folder = 2 * n_windows * n_tokens * n_vocab, tempfile.gettempdir()
        free = shutil.disk_usage(folder).free
        if needed > free:
            message = f"{format_size(free)} free, {format_size(needed)} needed for predictions"
            raise OptionError(
                f"{folder}: {message}: set TMPDIR, or evaluate fewer windows", hint={"chunks": ...}
            )
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)

    @classmethod
    def record(
        cls,
        llm: Llama,
        windows: Sequence[Window],
        mode: str = "prefill",
        progress: Callable[[int], None] | None = None,
        n_prompt: int | None = None,
        until: float = math.inf,
        least: int = 1,
    ) -> Reference:
        """Record the lossless model's predictions, see `evaluate`.

        Args:
            until: Deadline of `time.monotonic` for starting a window.
            least: Windows to read in any case.
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
        logp, rows = log_probs(logits), slice(row, row + len(logits))
        self.nll[window, rows] = -logp[np.arange(len(targets)), targets]
        self.top[window, rows] = logits.argmax(axis=1)
        logp -= logp.max(axis=1, keepdims=True)
        os.pwrite(
            self._file.fileno(),
            np.maximum(logp, _FLOOR).astype("<f2").tobytes(),
            self._offset(window, row),
        )

    def read(self, window: int, row: int, n: int) -> np.ndarray:
        """Return log-probabilities of n scored tokens, [n, n_vocab] float32."""
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
    """Score the tokens after the prompt of each window.

    Args:
        llm: Model from `open_model`.
        reference: The lossless model's predictions in the same mode, for at least these
            windows.
        mode: "prefill" computes batches, as llama-perplexity does. "decode" computes
            scored tokens one by one. "simulated" computes them in batches with the
            decisions of a deterministic `Llama` with `Precision.resident`: the same
            results in less time.
        progress: Callback with the number of tokens computed.
        n_prompt: Prompt length in tokens. Default: half of a window, as in
            llama-perplexity.

    Raises:
        OptionError: The windows are longer than the context, or the mode is unknown.
        MoeoffError: Computing fails.
    """
    shape = (len(windows), n_scored(len(windows[0].tokens), n_prompt))
    nll, kl, same = np.empty(shape), np.empty(shape), np.empty(shape, bool)

    def score(window: int, row: int, logits: np.ndarray, targets: np.ndarray) -> None:
        logp, rows = log_probs(logits), slice(row, row + len(logits))
        nll[window, rows] = -logp[np.arange(len(targets)), targets]
        if reference is not None:
            kl[window, rows] = divergence(reference.read(window, row, len(logits)), logp)
            same[window, rows] = logits.argmax(axis=1) == reference.top[window, rows]

    before = llm.stats().bytes_read
    llm.call(_run, llm, windows, mode, progress, score, n_prompt)
    bytes_read = llm.stats().bytes_read - before
    return (
        Scores(nll, bytes_read=bytes_read)
        if reference is None
        else Scores(nll, reference.nll[: len(windows)], kl, same, bytes_read)
    )


def _run(
    llm: Llama,
    windows: Sequence[Window],
    mode: str,
    progress: Callable[[int], None] | None,
    sink: Callable[[int, int, np.ndarray, np.ndarray], None],
    n_prompt: int | None = None,
    until: float = math.inf,
    least: int = 1,
) -> int:
    """Return the number of computed windows.

    Args:
        sink: Callback with window, row, logits [n, n_vocab] and next tokens [n].
    """
    n_ctx = len(windows[0].tokens)
    if mode not in EVAL_MODES:
        raise OptionError(f"mode: expected one of {', '.join(EVAL_MODES)}, got {mode!r}")
    if n_ctx > llm.n_ctx():
        raise OptionError(f"windows of {n_ctx} tokens exceed the context of {llm.n_ctx()}")
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
            with (
                llm.batches_as(decode=True)
                if mode == "simulated" and start >= first
                else contextlib.nullcontext()
            ):
                llm.decode_batch(tokens[start:stop].tolist(), start, first)
            scored = (max(start, first), min(stop, last))
            if scored[0] < scored[1]:
                logits = llm.batch_logits(scored[1] - scored[0])
                if np.isnan(logits).any():
                    raise ModelError(
                        f"{llm.model_path}: computes NaN: damaged weights, or too large for their"
                        " type"
                    )
                for row in range(scored[0], scored[1], step):
                    end = min(row + step, scored[1])
                    sink(
                        index,
                        row - first,
                        logits[row - scored[0] : end - scored[0]],
                        tokens[row + 1 : end + 1],
                    )
            n += stop - start
            if progress:
                progress(n)
    llm.clear_context()
    return len(windows)


def _batches(n_ctx: int, n_prompt: int, n_batch: int, mode: str) -> list[tuple[int, int]]:
    whole = n_ctx if mode == "prefill" else n_prompt
    batches = [(start, min(start + n_batch, whole)) for start in range(0, whole, n_batch)]
    step = n_batch if mode == "simulated" else 1
    # the last token has no successor to score
    return batches + [
        (start, min(start + step, n_ctx - 1)) for start in range(whole, n_ctx - 1, step)
    ]


@dataclass(frozen=True)
class Evaluation:
    """The result of `evaluate_model`.

    Attributes:
        n_tokens: Number of computed tokens.
        bytes_read: Bytes of experts read.
    """

    quality: QualityMetrics
    texts: tuple[QualityMetrics, ...]
    precision: Precision
    stats: Stats
    n_tokens: int
    seconds: float
    bytes_read: int


_CONTEXT = ("attention", "type_k", "type_v")  # f16 in a lossless model
# options not passed to the lossless model
_LOSSY = {
    "tier",
    "precision",
    "max_loss",
    "deterministic",
    "stride",
    *table_of(Precision),
    *_CONTEXT,
}


def evaluate_model(
    model: str,
    text: Sequence[str],
    *,
    ctx: int = 512,
    chunks: int | None = None,
    mode: str = "prefill",
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> Evaluation:
    """Measure perplexity, and for a lossy model its distance from the lossless one.

    Args:
        ctx: Window length in tokens. The second half is scored.
        chunks: Most windows of each text.
        mode: Mode of `moeoff.measure.perplexity.evaluate`. "simulated" needs
            `deterministic`.
        progress: Callback with the stage, tokens done and the total.
        **options: Options of `moeoff.Llama`.

    Raises:
        MoeoffError: The model, a text, the budget or an option is invalid.
    """
    if mode == "simulated" and not options.get("deterministic"):
        raise OptionError(
            "mode simulated needs `deterministic`: other runs decide by what is in memory"
        )
    ModelIndex.read(model).require_text()
    lossless = {name: value for name, value in options.items() if name not in _LOSSY} | {
        "strategy": "lru",
        "experts": False,
        "verify_reads": False,
    }

    def tokens(stage: str, windows: Sequence[Window]) -> Callable[[int], None] | None:
        return progress and functools.partial(
            lambda total, n: progress(stage, n, total), len(windows) * ctx
        )

    def measured(
        llm: Llama, reference: Reference | None
    ) -> tuple[list[Window], Scores, float, Stats, Precision]:
        windows = read_windows(llm, text, ctx, chunks)
        started = time.perf_counter()
        scores = evaluate(
            llm, windows, reference, mode=mode, progress=tokens("evaluating", windows)
        )
        return (
            windows,
            scores,
            time.perf_counter() - started,
            llm.stats(),
            llm.engine.quality.precision,
        )

    # Opened first: invalid options fail early, and the strategy's precision is known.
    with open_model(model, ctx, **options) as llm:
        quality, config = llm.engine.quality, llm.engine.config
        lossy = (
            quality.selected is not None
            or not quality.precision.lossless
            or quality.source.tier != ORIGINAL
        )
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
    return Evaluation(
        scores.quality(),
        tuple(by_text),
        precision,
        stats,
        len(windows) * ctx,
        seconds,
        scores.bytes_read,
    )
