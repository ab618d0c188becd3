"""The quality of a model on texts, as it would run with given options; what is lossy is compared with the lossless model."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..budget.precision import LOSSLESS, Precision
from ..budget.statistics import Quality
from ..companion.file import KEEP
from ..engine.stats import Stats
from ..errors import OptionError
from .perplexity import Reference, Window, evaluate, interruptible, open_model, read_windows

__all__ = ["Evaluation", "evaluate_model"]


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate_model` measured.

    Attributes:
        quality: over all texts.
        texts: of each text.
        precision: that was used.
        stats: of the run.
        n_tokens: computed, not all of them scored.
        seconds: that took.
        bytes_read: of experts.
    """

    quality: Quality
    texts: tuple[Quality, ...]
    precision: Precision
    stats: Stats
    n_tokens: int
    seconds: float
    bytes_read: int


def evaluate_model(model: str, text: Sequence[str], *, ctx: int = 512, chunks: int | None = None, mode: str = "prefill", tier: str | None = None,
                   precision: Precision = LOSSLESS, max_loss: str | float | None = None, deterministic: bool = False, progress: Callable[[str, int, int], None] | None = None,
                   **options: Any) -> Evaluation:  # fmt: skip
    """Measures perplexity, and with a lower precision the distance from the lossless model on the same windows.

    Args:
        ctx: tokens of a window; its second half is scored.
        chunks: only the first windows of each text.
        mode: "prefill", "decode" or "simulated", see `moeoff.calibrate.perplexity.evaluate`; the last for deterministic runs alone.
        progress: told what is computed, tokens done and tokens there are.
        **options: of `moeoff.Llama`.

    Raises:
        MoeoffError: the model, a text, the budget or an option is no good.
    """
    if mode == "simulated" and not deterministic:
        raise OptionError("mode simulated is for deterministic runs: others decide by what is in memory, token by token")
    lower = {"tier": tier, "max_loss": max_loss, "deterministic": deterministic} | ({} if precision is LOSSLESS else {"precision": precision})

    def tokens(stage: str, windows: Sequence[Window]) -> Callable[[int], None] | None:
        return progress and functools.partial(lambda total, done: progress(stage, done, total), len(windows) * ctx)

    with contextlib.ExitStack() as stack:
        reference = None
        if max_loss is not None or not precision.lossless or (tier is not None and tier.lower() != KEEP):
            with open_model(model, ctx, **lower, **options):
                pass  # what is wrong with the options comes before minutes of computing
            with open_model(model, ctx, **(options | {"experts": False, "verify_reads": False})) as llm, interruptible(llm) as call:
                windows = read_windows(llm, text, ctx, chunks)
                reference = stack.enter_context(call(Reference.record, llm, windows, mode, tokens("lossless", windows)))
        with open_model(model, ctx, **lower, **options) as llm, interruptible(llm) as call:
            windows = read_windows(llm, text, ctx, chunks)
            started = time.perf_counter()
            scores = call(evaluate, llm, windows, reference, mode=mode, progress=tokens("evaluating", windows))
            seconds = time.perf_counter() - started
            stats, precision = llm.stats(), llm.precision
    by_text = [scores.quality(_windows_of(windows, i)) for i in range(len(text))]
    return Evaluation(scores.quality(), tuple(by_text), precision, stats, len(windows) * ctx, seconds, scores.bytes_read)


def _windows_of(windows: Sequence[Window], text: int) -> slice:
    inside = [i for i, window in enumerate(windows) if window.text == text]
    return slice(inside[0], inside[-1] + 1)
