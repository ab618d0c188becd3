"""Draft models: how each makes drafts, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import OptionError
from ..gguf.model_index import ModelIndex
from ..gguf.preflight import preflight
from .dry_load import dry_load_whole
from .plan import MemoryPlan, require_header_room

# llama-server's names
MODEL_DRAFTS, OWN_LAYERS = "draft-simple", "draft-mtp"
_METHODS = {"eagle3": "draft-eagle3"}  # architectures of draft models
_DETECTED = ("dflash",)  # llama.cpp finds out itself
# their images have positions in three dimensions if the file has this key
WANT_SECTIONS, SECTIONS = ("glm4", "glm4moe"), "rope.dimension_sections"
_SHARED = ("n_batch", "n_ubatch", "n_threads", "n_threads_batch", "flash_attn")


def uses_nextn(spec_type: str | None) -> bool:
    """Return True if next-token layers make drafts."""
    return OWN_LAYERS in (spec_type or "").split(",")


def require_nextn(model_index: ModelIndex) -> None:
    """Check that next-token layers can make drafts, or raise OptionError."""
    if not model_index.n_nextn:
        raise OptionError(
            f"`spec_type`: {model_index.files[0]} has no next-token layers to make drafts with"
        )
    # llama.cpp would abort at the first token
    if model_index.architecture in WANT_SECTIONS and SECTIONS in model_index.hparams:
        what = f"next-token layers of a {model_index.architecture} model for images"
        raise OptionError(f"`spec_type`: llama.cpp cannot make drafts with the {what}")


def plan_draft(
    path: str,
    spec_type: str | None,
    budget: int,
    n_ctx: int,
    keywords: Mapping[str, Any],
    n_sequences: int,
) -> tuple[str | None, MemoryPlan]:
    """Read a draft model's headers and plan its memory; the CPU computes it.

    Args:
        spec_type: Speculative decoding method of the user, None to take the model's.
        budget: Budget of the process in bytes.
        keywords: llama_cpp.Llama's arguments for the target model.

    Returns:
        The method, None if llama.cpp finds it in the file, and a plan of llama.cpp's
        memory whose extras are the memory for the headers while loading.

    Raises:
        ModelError: The file is missing or damaged.
        BudgetError: The headers exceed the budget.
    """
    model_index = ModelIndex.read(path)
    require_header_room(path, model_index.header_memory, budget)
    preflight(model_index)
    if spec_type is None and model_index.architecture not in _DETECTED:
        method = _METHODS.get(model_index.architecture, MODEL_DRAFTS)
        spec_type = OWN_LAYERS if model_index.n_nextn else method
    keywords = {name: keywords[name] for name in _SHARED if name in keywords} | {
        "op_offload": False
    }
    planned = dry_load_whole(model_index, n_ctx, keywords, (), n_sequences, uses_nextn(spec_type))
    return spec_type, replace(planned, n_ctx=n_ctx, extras=model_index.header_memory)
