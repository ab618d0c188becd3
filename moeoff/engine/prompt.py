"""A prompt: the tokens of its text or of a conversation, within the budget, and a file that keeps it computed."""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from .. import __version__
from ..errors import ContextError, ModelError, OptionError, WriteError
from ..experts.sidecar import Hasher
from ..gguf.file import LONGEST_TEMPLATE, FileState, ModelFile
from ..llamacpp import templates
from ..llamacpp.llama import build_identity
from ..system.files import atomic_file, open_file
from ..system.memory import MIB

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
_CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


def chat_template(model_path: str, template: str | None = None) -> str | None:
    """The template that a conversation is written with, the model's own unless there is another. None: it has none.

    Args:
        template: Jinja, or chatml.

    Raises:
        ModelError, OptionError: it cannot be read.
    """
    source, way_out = (f"{model_path}: its chat template", _RAW) if template is None else ("`chat_template`:", "")
    if template is not None and "{" not in template:
        if template.lower() != "chatml":
            raise OptionError(f"`chat_template`: a Jinja template or chatml, not {template!r}; one in a file is given with `chat_template_file`")
        return _CHATML
    if template is None:
        with ModelFile(model_path, longest=LONGEST_TEMPLATE) as file:
            template = str(file.value("tokenizer.chat_template")) if "tokenizer.chat_template" in file.metadata else None
    if not template:
        return None
    try:
        templates.check(template)
    except templates.TemplateError as error:
        raise ModelError(f"{source} cannot be read: {str(error).rstrip('.')}{way_out}") from None
    return template


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


class PromptCache:
    """A file that holds a computed prompt (`--prompt-cache`): llama.cpp writes and reads the context itself, which takes no memory for a copy.

    Args:
        path: it need not be there yet.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)

    def load(self, llm: Llama) -> int:
        """Fills the context, and returns its tokens: a prompt that begins with them goes on behind them. 0: there is no file yet.

        Raises:
            ModelError: the file is damaged, or was computed by another model, in another context, or with other options that change what is computed.
        """
        if not os.path.exists(self.path):
            return 0
        if reason := self._damage(llm) or llm.load_context(self.path, _SEAL.size // 4):
            raise ModelError(f"{self.path}: not a prompt cache of this model and context: {reason}")
        return llm.n_tokens

    def _damage(self, llm: Llama) -> str:
        """Why llama.cpp must not read the file, or nothing: it takes as much memory as a damaged length says, and does not see what else is damaged."""
        try:
            with open_file(self.path) as file:
                place = _seal_place(file.fileno(), llm.n_ctx())
                if place is None:
                    return "it is damaged, or was written by another program"
                _, identity, written = _SEAL.unpack(os.pread(file.fileno(), _SEAL.size, place))
                if _sealed_hash(file.fileno(), place) != written:
                    return "it is damaged"
                return "" if identity == _identity(llm) else "it was computed by another one, or with other options"
        except OSError as error:
            return f"it cannot be read: {error.strerror}"

    def save(self, llm: Llama) -> None:
        """Writes what the context holds, whole or not at all.

        Raises:
            WriteError: it cannot be written.
        """
        with atomic_file(self.path) as file:
            if reason := llm.save_context(file.name, struct.unpack(f"<{_SEAL.size // 4}i", _SEAL.pack(_MARK, _identity(llm), 0))):
                raise WriteError(f"{self.path}: cannot be written: {reason}")
            with open(file.name, "r+b", buffering=0) as written:
                place = _seal_place(written.fileno(), llm.n_ctx())
                if place is None:
                    raise WriteError(f"{self.path}: cannot be written: it is not what was written")
                os.pwrite(written.fileno(), struct.pack("<Q", _sealed_hash(written.fileno(), place)), place + _SEAL.size - 8)


# a file of llama.cpp's, whose last tokens are none: a mark, the identity of what computed it, and the hash of all other bytes. llama.cpp's
# programs go on from the tokens before, as from any file whose last tokens differ from a prompt's
_HEAD = struct.Struct("<4sII")  # magic, version, number of tokens
_MAGIC = b"nsgg"
_SEAL = struct.Struct("<8s16sQ")
_MARK = struct.pack("<2i", -0x6D6F65, -0x6F6666)


def _identity(llm: Llama) -> bytes:
    return state_identity(llm.engine, llm.n_ctx())


def _seal_place(fd: int, n_ctx: int) -> int | None:
    """Where a file's seal is; None: it has none."""
    head = os.pread(fd, _HEAD.size, 0)
    if len(head) < _HEAD.size:
        return None
    magic, _, n = _HEAD.unpack(head)
    place = _HEAD.size + 4 * n - _SEAL.size
    if magic != _MAGIC or not _SEAL.size <= 4 * n <= 4 * n_ctx + _SEAL.size:
        return None
    seal = os.pread(fd, _SEAL.size, place)
    return place if len(seal) == _SEAL.size and seal.startswith(_MARK) else None


def _sealed_hash(fd: int, place: int) -> int:
    """Of an open file without the hash itself."""
    hasher, end = Hasher(), place + _SEAL.size
    for first, last in ((0, end - 8), (end, os.fstat(fd).st_size)):
        while data := os.pread(fd, min(MIB, last - first), first):
            hasher.update(data)
            first += len(data)
    return hasher.value()
