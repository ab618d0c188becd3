"""A prompt: the tokens of its text or of a conversation, within the budget, and what tells whether it means the same once it is computed."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from .. import __version__
from ..errors import ContextError, ModelError
from ..gguf.file import FileState
from ..llamacpp import templates
from ..llamacpp.llama import build_identity

if TYPE_CHECKING:
    from .engine import Engine
    from .llama import Llama

_PIECE = 1 << 15  # characters that are tokenized at once: llama.cpp's tokenizers take dozens of bytes for each
_RAW = ": it can only continue a text, as moeoff run --raw does"
_SLACK = 64  # tokens that a cut may add


def prompt_tokens(llm: Llama, text: str, *, add_bos: bool) -> list[int]:
    """Tokens of a text, special ones by their names.

    Raises:
        ContextError: it is longer than the context; of how many tokens is then told of its pieces, each read for itself.
    """
    pieces = range(0, len(text), _PIECE)
    if len(pieces) > 1:
        n = sum(len(_tokens(llm, text[i : i + _PIECE], False)) for i in pieces)
        if n - _SLACK * len(pieces) >= llm.n_ctx():
            raise ContextError(n, llm.n_ctx())
    return _tokens(llm, text, add_bos)


def _tokens(llm: Llama, text: str, add_bos: bool) -> list[int]:
    return llm.tokenize(text.encode("utf-8", "replace"), add_bos=add_bos, special=True)


# for a model that has none: a transcript, in which the model writes the assistant's lines
_PLAIN = "{{ bos_token }}{% for m in messages %}{{ m.role | capitalize }}:{{ '' if m.content[:1] == ' ' else ' ' }}{{ m.content }}\n\n{% endfor %}Assistant:"
_THOUGHT = "<think>"


class Template:
    """What a conversation looks like to a model.

    Args:
        template: Jinja; None: the model's own.
        thinks: the model may think before it answers.

    Attributes:
        stop: text that ends an answer, of a model without a template; empty: none.
        opens_thought: the last conversation's answer begins inside a thought.

    Raises:
        ModelError: it cannot be read.
    """

    def __init__(self, llm: Llama, template: str | None = None, thinks: bool = True):
        self.thinks, self.opens_thought = thinks, False
        template = template or llm.metadata.get("tokenizer.chat_template")
        self.stop = "" if template else "\n\nUser:"
        self._llm, self._source = llm, template or _PLAIN
        try:
            templates.check(self._source)
        except templates.TemplateError as error:
            raise ModelError(f"{llm.model_path}: its chat template cannot be read: {error}{_RAW}") from None
        special = {"bos_token": llm.token_text(llm.token_bos()), "eos_token": llm.token_text(llm.token_eos())}
        self._variables = {"add_generation_prompt": True, **special}

    def tokens(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of the conversation, up to where the model is to answer. Raises `ModelError` if the template refuses it, `ContextError` if it is far too long."""
        try:
            text = templates.render(self._source, {"messages": list(messages), **self._variables, **({} if self.thinks else {"enable_thinking": False})})
        except templates.TemplateError as error:  # templates raise on purpose: "system role not supported"
            raise ModelError(f"the model's chat template refuses this conversation: {error}") from None
        self.opens_thought = self.thinks and text.rstrip().endswith(_THOUGHT)
        if not self.thinks and text.rstrip().endswith(_THOUGHT):  # a template that knows no other way
            text = f"{text.rstrip()}\n\n</think>\n\n"
        return prompt_tokens(self._llm, text, add_bos=False)


# options of `Config` and of llama_cpp that leave the bits of a state as they are, or whose effect `state_identity` takes from elsewhere
_NO_EFFECT = frozenset("model_path memory max_loss n_ctx n_threads n_threads_batch expert_memory strategy stride profile experts tier verify_reads warm io_threads "
                       "trace context_shift n_keep numa verbose direct_io gate_input replay precision llama_cpp seed chat_format".split())  # fmt: skip


_HALVES = (None, "f16")  # types of the KV cache


def state_identity(engine: Engine, *facts: object) -> bytes:
    """Return 16 bytes that are equal where a computed prompt means the same: a digest of the build and its CPU level, the model, the precision in use, and
    every option that changes a state.

    What is left open is what no option says: the micro-batch where it is chosen by memory and disk, and who shared a batch.

    Args:
        facts: others that change a state, as JSON.
    """
    config, quality, options = engine.config, engine.quality, {}
    for name, value in (*((f.name, getattr(config, f.name)) for f in fields(config)), *config.llama_cpp.items()):
        if name not in _NO_EFFECT:
            options[name] = repr(value)
    sidecar = quality.source.sidecar if quality.source.repacked or quality.low_source else None
    adapter = file_state(adapter) if (adapter := config.llama_cpp.get("lora_path")) else None
    # with ctime: a file may be overwritten and get its old mtime
    model = [engine.model_index.identity, *(state.ctime_ns for state in engine.model_index.states)]
    precision = [quality.source.tier, repr(quality.precision), sidecar.identity if sidecar else 0]
    # ggml's threads share the positions that a token attends to, if keys and values are halves, and add up in that order
    splits = config.flash_attn and config.type_k in _HALVES and config.type_v in _HALVES
    parts = [__version__, *build_identity(), splits and config.keywords["n_threads"], model, precision, options, adapter, *facts]
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()


def file_state(path: str | os.PathLike[str]) -> list[object]:
    """Return a file's path, size, mtime and ctime; the path alone if it is not there."""
    state = FileState.read(path)
    return [os.fspath(path)] if state is None else [os.path.realpath(path), state.size, state.mtime_ns, state.ctime_ns]
