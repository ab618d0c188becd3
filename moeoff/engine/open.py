"""Opening a model by the names of the command line."""

from __future__ import annotations

import os

from ..budget.footprint import DEFAULT_CTX
from ..console import loading_bar
from ..errors import OptionError
from ..gguf.layout import Layout


def open_model(kind, model: str, *, experts: str | None = None, no_experts: bool = False, profile: str | None = None, no_profile: bool = False,
               ctx_size: int | None = None, threads: int | None = None, **options):  # fmt: skip
    """A `moeoff.Llama` or a class of its kind, by the names of the command line, with a bar on the terminal.

    Raises:
        MoeoffError: the model, the budget or an option is no good.
    """
    if experts and no_experts:
        raise OptionError("give --experts or --no-experts, not both")
    if profile and no_profile:
        raise OptionError("give --profile or --no-profile, not both")
    layout = Layout.read(model)
    with loading_bar(os.path.basename(model), layout.dense_bytes) as progress:
        return kind(
            model,
            experts=experts or not no_experts,
            profile=profile or not no_profile,
            n_ctx=ctx_size or min(DEFAULT_CTX, layout.n_ctx_train or DEFAULT_CTX),
            n_threads=threads,
            progress=progress,
            **options,
        )
