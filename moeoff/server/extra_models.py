"""Models that a server loads in addition: a projector for pictures and sound, a draft model. What they take.

Knows llama.cpp's plans of them, and of the budget only whether it holds their headers: nothing is loaded here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

from ..budget.draft_model import SECTIONS, WANT_SECTIONS, DraftModel, draft_keywords, require_nextn, uses_nextn
from ..budget.dry_load import embedding_width
from ..budget.plan import require_header_room
from ..errors import ModelError
from ..gguf.model_index import ModelIndex
from ..options import Config, ServerOptions

# a projector is planned in a process of its own, which ends if the file lacks what llama.cpp computes with
_PLAN = "import json, sys; from moeoff.server.library import projector_memory; print(json.dumps(projector_memory(sys.argv[1:])))"


@dataclass(frozen=True)
class ExtraModels:
    """Memory and options of a projector and a draft model.

    Attributes:
    resident: bytes once all is loaded, and of headers until then.
    computing: bytes that come with the first picture, for good.
    spec_type: how drafts are made; None: not at all, or as llama.cpp finds in the draft model.
    """

    resident: int = 0
    computing: int = 0
    spec_type: str | None = None

    @classmethod
    def of(cls, model_index: ModelIndex, n_ctx: int, config: Config, options: ServerOptions, budget: int) -> ExtraModels:
        """Looks at their files.

        Args:
            model_index: of the model.
            config: with which the model is opened.
            budget: of the process.

        Raises:
            BudgetError: it has no room for one of their headers.
            ModelError: a file is missing, damaged, or not for this model.
            OptionError: the model has not what drafts shall be made with.
        """
        resident = computing = 0
        keywords = config.keywords
        if options.mmproj is not None:
            resident, computing = _projector(model_index, options.mmproj, options, bool(keywords.get("flash_attn")), budget)
        if config.draft is not None:
            draft = DraftModel.read(config.draft, config.spec_type, budget)
            memory = draft.memory(n_ctx, draft_keywords(keywords), options.parallel or 1)
            return cls(resident + memory.llama_cpp + memory.extras, computing, draft.spec_type)
        if uses_nextn(config.spec_type):
            require_nextn(model_index)
        return cls(resident, computing, config.spec_type)


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
