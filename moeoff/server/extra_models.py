"""Memory plans of a server's projector and draft model. Loads nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from ..budget.draft_model import SECTIONS, WANT_SECTIONS, plan_draft, require_nextn, uses_nextn
from ..budget.dry_load import embedding_width
from ..budget.plan import require_header_room
from ..errors import ModelError
from ..gguf.model_index import ModelIndex
from ..options import Config, ServerOptions

# in a process of its own, because llama.cpp crashes if the file lacks a tensor
_PLAN = (
    "import json, sys; from moeoff.server.library import projector_memory;"
    " print(json.dumps(projector_memory(sys.argv[1:])))"
)


def extra_models(
    model_index: ModelIndex, n_ctx: int, config: Config, options: ServerOptions, budget: int
) -> tuple[int, int, str | None]:
    """Plan the memory of a projector and a draft model.

    Returns:
        Bytes of the loaded models and their headers, bytes added at the first image,
        and the type of drafts. The type is None without drafts, or as llama.cpp finds
        it in the model.

    Raises:
        BudgetError: A header does not fit the budget.
        ModelError: A file is missing, damaged, or not for this model.
        OptionError: The model does not support this type of drafts.
    """
    resident = computing = 0
    spec_type, keywords = config.spec_type, config.keywords
    if options.mmproj is not None:
        resident, computing = _projector(
            model_index, options.mmproj, options, bool(keywords.get("flash_attn")), budget
        )
    if config.draft is not None:
        spec_type, memory = plan_draft(
            config.draft, spec_type, budget, n_ctx, keywords, options.parallel or 1
        )
        resident += memory.llama_cpp + memory.extras
    elif uses_nextn(spec_type):
        require_nextn(model_index)
    return resident, computing, spec_type


def _projector(
    model_index: ModelIndex, path: str, options: ServerOptions, flash_attn: bool, budget: int
) -> tuple[int, int]:
    """Return the bytes of a projector's weights and header, and of its compute buffers."""
    header_memory = ModelIndex.read(path).header_memory  # mtmd accepts truncated files
    require_header_room(path, header_memory, budget)
    # llama.cpp would abort at the first image
    if model_index.architecture in WANT_SECTIONS and SECTIONS not in model_index.hparams:
        raise ModelError(
            f"{model_index.files[0]}: converted without {SECTIONS}: convert it again to use {path}"
        )
    argv = [
        "llama-server",
        "-m",
        model_index.files[0],
        "--mmproj",
        path,
        "-fa",
        "on" if flash_attn else "off",
        *options.args,
    ]
    planned = subprocess.run(
        [sys.executable, "-c", _PLAN, *argv],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
    )
    if planned.returncode < 0:
        raise ModelError(f"{path}: the projector lacks a tensor, or is damaged: convert it again")
    if planned.returncode:
        _, _, last = planned.stderr.strip().rpartition("\n")
        raise ModelError(f"{path}: cannot plan the projector's memory: {last}")
    width, weights, computing, why = json.loads(planned.stdout.splitlines()[-1])
    if not width:
        why = " ".join((why.partition("': ")[2] or why).split())
        raise ModelError(
            f"{path}: expected a projector that llama.cpp can load{f' ({why})' if why else ''}"
        )
    if width != (expected := embedding_width(model_index)):
        model = os.path.basename(model_index.files[0])
        raise ModelError(
            f"{path}: expected embeddings of width {expected} for {model}, got {width}"
        )
    return weights + header_memory, computing
