"""What a server loads beside the model: a projector for pictures and sound, a draft model. Whether they can be loaded, and what they take.

Knows llama.cpp's plans of them and no budget: nothing is loaded here.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..budget.dry_load import dry_load_whole, embedding_width
from ..errors import ModelError, OptionError
from ..gguf.layout import Layout
from .arguments import ServerOptions
from .library import c_arguments, library

_OWN_LAYERS = "draft-mtp"
_DRAFTS_OF = {"eagle3": "draft-eagle3"}  # architectures that are nothing but draft models, where llama.cpp does not tell by itself
_TOLD_BY_FILE = ("dflash",)  # and where it does
_WANT_SECTIONS, _SECTIONS = ("glm4", "glm4moe"), "rope.dimension_sections"  # pictures of theirs have positions in three directions, if the file says how


@dataclass(frozen=True)
class Beside:
    """Attributes:
    resident: bytes once all is loaded.
    computing: bytes that come with the first picture, for good.
    spec_type: how drafts are made; None: not at all, or as llama.cpp finds in the draft model.
    nextn: with the model's own next-token layers.
    """

    resident: int = 0
    computing: int = 0
    spec_type: str | None = None
    nextn: bool = False

    @classmethod
    def of(cls, layout: Layout, n_ctx: int, keywords: Mapping[str, Any], options: ServerOptions) -> Beside:
        """
        Args:
            layout: of the model.
            keywords: of llama_cpp.Llama, with which the model is opened.

        Raises:
            ModelError: a file is missing, damaged, or not for this model.
            OptionError: the model has not what drafts shall be made with.
        """
        resident = computing = 0
        if options.mmproj is not None:
            resident, computing = _projector(layout, options.mmproj, options, bool(keywords.get("flash_attn")))
        spec_type, draft = options.spec_type, None
        if options.draft is not None:
            draft = Layout.read(options.draft)
            spec_type = spec_type or _spec_type(draft)
        nextn = _OWN_LAYERS in (spec_type or "").split(",")
        if draft is not None:
            shared = {name: keywords[name] for name in ("n_batch", "n_ubatch", "n_threads", "n_threads_batch", "flash_attn") if name in keywords}
            resident += dry_load_whole(draft, n_ctx, shared, (), options.parallel, nextn).total
        elif nextn and not layout.n_nextn:
            raise OptionError(f"spec_type: {layout.files[0]} has no next-token layers to make drafts with")
        elif nextn and layout.architecture in _WANT_SECTIONS and _SECTIONS in layout.hparams:  # it would abort at the first token
            raise OptionError(f"spec_type: llama.cpp cannot make drafts with the next-token layers of a {layout.architecture} model for pictures")
        return cls(resident, computing, spec_type, nextn)


def _spec_type(draft: Layout) -> str | None:
    """How drafts are made with a model that nobody said more of. llama.cpp would make none with an ordinary one."""
    if draft.architecture in _TOLD_BY_FILE:
        return None
    return _OWN_LAYERS if draft.n_nextn else _DRAFTS_OF.get(draft.architecture, "draft-simple")


def _projector(layout: Layout, path: str, options: ServerOptions, flash_attn: bool) -> tuple[int, int]:
    """Bytes of its weights, and of what it computes with."""
    Layout.read(path)  # mtmd reads a file that ends too early without a word
    if layout.architecture in _WANT_SECTIONS and _SECTIONS not in layout.hparams:  # llama.cpp would abort at the first picture
        raise ModelError(f"{layout.files[0]}: converted for text alone (no {_SECTIONS}): convert the model again to use it with {path}")
    argv = ["llama-server", "-m", layout.files[0], "--mmproj", path, "-fa", "on" if flash_attn else "off", *options.args]
    bytes_, message = (ctypes.c_uint64 * 2)(), ctypes.create_string_buffer(1024)
    width = library().moeoff_projector_memory(len(argv), c_arguments(argv), bytes_, message, len(message))
    if not width:
        why = message.value.decode("utf-8", "replace")
        why = " ".join((why.partition("': ")[2] or why).split())
        raise ModelError(f"{path}: no projector that llama.cpp can load{f' ({why})' if why else ''}")
    if width != (expected := embedding_width(layout)):
        raise ModelError(
            f"{path}: makes embeddings of {width} numbers, expected {expected} as in {os.path.basename(layout.files[0])}: it belongs to another model"
        )
    return bytes_[0], bytes_[1]
