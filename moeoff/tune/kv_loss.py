"""What a quantized KV cache costs in perplexity, measured as the experts' precision is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..budget.loss_contract import upper_loss
from ..calibrate.perplexity import Reference, evaluate, interruptible, open_model, read_windows
from ..calibrate.precision_search import CTX
from ..gguf.layout import Layout


def kv_loss(model: str, text: Sequence[str], kind: str, tokens: int, *, progress: Callable[[str, int, int], None] | None = None, **options: Any) -> float:
    """The loss that is not exceeded (0.01 is 1 %), with keys and values in this type, on windows of the texts.

    Raises:
        OptionError: too little text.
        MoeoffError: the model is no good.
    """
    ctx = min(CTX, Layout.read(model).n_ctx_train or CTX)
    options = {"flash_attn": True, "profile": False} | options

    def tell(done: int) -> None:
        if progress:
            progress("KV cache", done, n)

    with open_model(model, ctx, **options) as llm, interruptible(llm) as call:
        windows = read_windows(llm, text, ctx, max(tokens // (ctx * len(text)), 1))
        n = 2 * len(windows) * ctx
        reference = call(Reference.record, llm, windows, "prefill", tell)
    with reference, open_model(model, ctx, type_k=kind, type_v=kind, **options) as llm, interruptible(llm) as call:
        scores = call(evaluate, llm, windows, reference, progress=lambda done: tell(n // 2 + done))
        return float(upper_loss(scores.quality().distance.loss, len(windows)))
