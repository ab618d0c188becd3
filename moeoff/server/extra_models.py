"""Models that a server loads in addition: a projector for pictures and sound, a draft model. What they take.

Knows llama.cpp's plans of them, and of the budget only whether it holds their headers: nothing is loaded here.
"""

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

# a projector is planned in a process of its own, which ends if the file lacks what llama.cpp computes with
_PLAN = "import json, sys; from moeoff.server.library import projector_memory; print(json.dumps(projector_memory(sys.argv[1:])))"


def extra_models(model_index: ModelIndex, n_ctx: int, config: Config, options: ServerOptions, budget: int) -> tuple[int, int, str | None]:
    """Look at the files of a projector and a draft model.

    Args:
        model_index: Index of the model that they are loaded with.
        budget: Bytes of the process.

    Returns:
        Bytes once all is loaded, and of headers until then; bytes that come with the first picture, for
        good; and how drafts are made, None if they are not, or as llama.cpp finds in the draft model.

    Raises:
        BudgetError: There is no room for one of their headers.
        ModelError: A file is missing, damaged, or not for this model.
        OptionError: The model has not what drafts shall be made with.
    """
    resident = computing = 0
    spec_type, keywords = config.spec_type, config.keywords
    if options.mmproj is not None:
        resident, computing = _projector(model_index, options.mmproj, options, bool(keywords.get("flash_attn")), budget)
    if config.draft is not None:
        spec_type, memory = plan_draft(config.draft, spec_type, budget, n_ctx, keywords, options.parallel or 1)
        resident += memory.llama_cpp + memory.extras
    elif uses_nextn(spec_type):
        require_nextn(model_index)
    return resident, computing, spec_type


def _projector(model_index: ModelIndex, path: str, options: ServerOptions, flash_attn: bool, budget: int) -> tuple[int, int]:
    """Bytes of its weights and header, and of what it computes with."""
    header_memory = ModelIndex.read(path).header_memory  # mtmd reads a file that ends too early without a word
    require_header_room(path, header_memory, budget)
    if model_index.architecture in WANT_SECTIONS and SECTIONS not in model_index.hparams:  # llama.cpp would abort at the first picture
        raise ModelError(f"{model_index.files[0]}: converted for text alone (no {SECTIONS}): convert the model again to use it with {path}")
    argv = ["llama-server", "-m", model_index.files[0], "--mmproj", path, "-fa", "on" if flash_attn else "off", *options.args]
    planned = subprocess.run([sys.executable, "-c", _PLAN, *argv], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if planned.returncode < 0:
        raise ModelError(f"{path}: llama.cpp cannot compute with this projector: it lacks a tensor, or is damaged: convert it again")
    if planned.returncode:
        _, _, last = planned.stderr.strip().rpartition("\n")
        raise ModelError(f"{path}: what it needs cannot be planned: {last}")
    width, weights, computing, why = json.loads(planned.stdout.splitlines()[-1])
    if not width:
        why = " ".join((why.partition("': ")[2] or why).split())
        raise ModelError(f"{path}: no projector that llama.cpp can load{f' ({why})' if why else ''}")
    if width != (expected := embedding_width(model_index)):
        raise ModelError(
            f"{path}: makes embeddings of {width} numbers, expected {expected} as in {os.path.basename(model_index.files[0])}: it belongs to another model"
        )
    return weights + header_memory, computing
