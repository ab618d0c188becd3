"""Opening a model for a person: with a context of a usual size, a bar while it loads, and a line about settings that were found."""

from __future__ import annotations

import os
from typing import Any, TypeVar

from ..budget.footprint import DEFAULT_CTX
from ..console import loading_bar, remark
from ..gguf.layout import Layout
from .config import Config
from .llama import Llama

L = TypeVar("L", bound=Llama)


def open_model(kind: type[L], model: str, *, n_ctx: int | None = None, **options: Any) -> L:
    """A `moeoff.Llama` or a class of its kind, with a bar on the terminal while it loads.

    Args:
        n_ctx: tokens; by default as many as the model was trained with, at most `DEFAULT_CTX`.
        **options: what else `Config.make` takes.

    Raises:
        MoeoffError: the model, the budget or an option is no good.
    """
    layout = Layout.read(model)
    config = Config.make(model, n_ctx=n_ctx or min(DEFAULT_CTX, layout.n_ctx_train or DEFAULT_CTX), **options)
    with loading_bar(os.path.basename(model), layout.dense_bytes) as progress:
        llm = kind(config, progress=progress)
    if llm.settings_summary:
        remark(llm.settings_summary)
    return llm
