"""A model that makes drafts for another one: of which kind it is, and the memory that it takes, as a whole. Nothing is loaded here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import OptionError
from ..gguf.model_index import ModelIndex
from ..gguf.preflight import preflight
from .dry_load import dry_load_whole
from .plan import MemoryPlan, require_header_room

# llama-server's names of how drafts are made
MODEL_DRAFTS, OWN_LAYERS = "draft-simple", "draft-mtp"
_DRAFTS_OF = {"eagle3": "draft-eagle3"}  # architectures that are nothing but draft models, where llama.cpp does not tell by itself
_TOLD_BY_FILE = ("dflash",)  # and where it does
WANT_SECTIONS, SECTIONS = ("glm4", "glm4moe"), "rope.dimension_sections"  # pictures of theirs have positions in three directions, if the file says how
_SHARED = ("n_batch", "n_ubatch", "n_threads", "n_threads_batch", "flash_attn")


def uses_nextn(spec_type: str | None) -> bool:
    """Next-token layers make drafts, perhaps among others."""
    return OWN_LAYERS in (spec_type or "").split(",")


def require_nextn(model_index: ModelIndex) -> None:
    """Checks that a model has next-token layers that llama.cpp can make drafts with. Raises `OptionError`."""
    if not model_index.n_nextn:
        raise OptionError(f"`spec_type`: {model_index.files[0]} has no next-token layers to make drafts with")
    if model_index.architecture in WANT_SECTIONS and SECTIONS in model_index.hparams:  # it would abort at the first token
        raise OptionError(f"`spec_type`: llama.cpp cannot make drafts with the next-token layers of a {model_index.architecture} model for pictures")


def plan_draft(path: str, spec_type: str | None, budget: int, n_ctx: int, keywords: Mapping[str, Any], n_sequences: int) -> tuple[str | None, MemoryPlan]:
    """Read the headers of a draft model, and plan what it takes. It is computed by the CPU.

    Args:
        spec_type: How drafts are made, as the user says. llama.cpp would make no drafts with an
            ordinary model of which nobody says more.
        budget: Bytes of the process.
        keywords: Arguments of llama_cpp.Llama of the model that it drafts for.

    Returns:
        How drafts are made with it, None if llama.cpp finds that in the file; and what llama.cpp
        allocates for it, with what it takes for the headers while it loads as extras.

    Raises:
        ModelError: The file is missing or damaged.
        BudgetError: There is no room for its headers.
    """
    model_index = ModelIndex.read(path)
    require_header_room(path, model_index.header_memory, budget)
    preflight(model_index)
    if spec_type is None and model_index.architecture not in _TOLD_BY_FILE:
        spec_type = OWN_LAYERS if model_index.n_nextn else _DRAFTS_OF.get(model_index.architecture, MODEL_DRAFTS)
    keywords = {name: keywords[name] for name in _SHARED if name in keywords} | {"op_offload": False}
    planned = dry_load_whole(model_index, n_ctx, keywords, (), n_sequences, uses_nextn(spec_type))
    return spec_type, replace(planned, n_ctx=n_ctx, extras=model_index.header_memory)
