"""Where a GGUF's experts are: file, offset and size of every tensor, and which of them hold routed experts.

Reads headers only, through ggml's own GGUF parser, so that it accepts exactly what llama.cpp accepts. Knows nothing of
memory or of running models.
"""

from __future__ import annotations

import ctypes
import os
import re
from ctypes import POINTER, Structure, c_bool, c_char_p, c_int, c_int64, c_size_t, c_uint16, c_uint32, c_void_p
from dataclasses import dataclass

from .errors import ModelError
from .hooks import lib

EXPERT_PATTERN = r"ffn_(gate|up|down|gate_up)_(ch)?exps\.weight$"
_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf$")


class _InitParams(Structure):
    """struct gguf_init_params { bool no_alloc; struct ggml_context ** ctx; };"""

    _fields_ = [("no_alloc", c_bool), ("ctx", c_void_p)]


def _function(name: str, result, *arguments):
    function = getattr(lib, name)
    function.restype = result
    function.argtypes = arguments
    return function


# struct gguf_context * gguf_init_from_file(const char * fname, struct gguf_init_params params);
_init_from_file = _function("gguf_init_from_file", c_void_p, c_char_p, _InitParams)
# void gguf_free(struct gguf_context * ctx);
_free = _function("gguf_free", None, c_void_p)
# size_t gguf_get_data_offset(const struct gguf_context * ctx);
_data_offset = _function("gguf_get_data_offset", c_size_t, c_void_p)
# int64_t gguf_find_key(const struct gguf_context * ctx, const char * key);
_find_key = _function("gguf_find_key", c_int64, c_void_p, c_char_p)
# enum gguf_type gguf_get_kv_type(const struct gguf_context * ctx, int64_t key_id);
_kv_type = _function("gguf_get_kv_type", c_int, c_void_p, c_int64)
# uint16_t gguf_get_val_u16(const struct gguf_context * ctx, int64_t key_id);
_val_u16 = _function("gguf_get_val_u16", c_uint16, c_void_p, c_int64)
# uint32_t gguf_get_val_u32(const struct gguf_context * ctx, int64_t key_id);
_val_u32 = _function("gguf_get_val_u32", c_uint32, c_void_p, c_int64)
# const char * gguf_get_val_str(const struct gguf_context * ctx, int64_t key_id);
_val_str = _function("gguf_get_val_str", c_char_p, c_void_p, c_int64)
# int64_t gguf_get_n_tensors(const struct gguf_context * ctx);
_n_tensors = _function("gguf_get_n_tensors", c_int64, c_void_p)
# const char * gguf_get_tensor_name(const struct gguf_context * ctx, int64_t tensor_id);
_tensor_name = _function("gguf_get_tensor_name", c_char_p, c_void_p, c_int64)
# size_t gguf_get_tensor_offset(const struct gguf_context * ctx, int64_t tensor_id);
_tensor_offset = _function("gguf_get_tensor_offset", c_size_t, c_void_p, c_int64)
# enum ggml_type gguf_get_tensor_type(const struct gguf_context * ctx, int64_t tensor_id);
_tensor_type = _function("gguf_get_tensor_type", c_int, c_void_p, c_int64)
# size_t gguf_get_tensor_size(const struct gguf_context * ctx, int64_t tensor_id);
_tensor_size = _function("gguf_get_tensor_size", c_size_t, c_void_p, c_int64)

# enum gguf_type
_READERS = {2: _val_u16, 4: _val_u32, 8: lambda header, key: _val_str(header, key).decode("utf-8", "replace")}


@dataclass(frozen=True)
class Span:
    """A tensor's bytes: `files[file][offset : offset + nbytes]`, of ggml type number `type`."""

    name: str
    file: int
    offset: int
    nbytes: int
    type: int


@dataclass(frozen=True)
class Layout:
    """The tensors of a model, over all files of a split one.

    Attributes:
        files: paths, the one given first if the model is not split.
        architecture: `general.architecture`.
        n_expert, n_expert_used, n_ctx_train: of the model; 0 where the file does not say.
        experts: spans of the routed experts' tensors by name.
        dense_bytes: everything else.
    """

    files: tuple[str, ...]
    architecture: str
    n_expert: int
    n_expert_used: int
    n_ctx_train: int
    experts: dict[str, Span]
    dense_bytes: int

    @property
    def expert_bytes(self) -> int:
        return sum(span.nbytes for span in self.experts.values())

    @classmethod
    def read(cls, path: str | os.PathLike) -> Layout:
        """Reads the headers of a GGUF file and of the other parts if it is the first of a split one.

        Raises:
            ModelError: missing, unreadable, not a GGUF file, damaged, truncated, or not the first part of a split model.
        """
        path = os.fspath(path)
        header, spans = _read_file(path, 0)
        n_split = header["split.count"]
        files = [path]
        if n_split > 1:
            files = _split_files(path, n_split)
            for index, part in enumerate(files[1:], start=1):
                spans += _read_file(part, index)[1]
        expert = re.compile(EXPERT_PATTERN)
        experts = {span.name: span for span in spans if expert.search(span.name)}
        dense = sum(span.nbytes for span in spans if span.name not in experts)
        return cls(
            files=tuple(files),
            architecture=header["general.architecture"],
            n_expert=header["expert_count"],
            n_expert_used=header["expert_used_count"],
            n_ctx_train=header["context_length"],
            experts=experts,
            dense_bytes=dense,
        )


def _split_files(path: str, count: int) -> list[str]:
    match = _SPLIT_NAME.match(path)
    if not match or int(match["count"]) != count:
        raise ModelError(f"{path}: part of a model in {count} files, but not named like NAME-00001-of-{count:05d}.gguf")
    if int(match["index"]) != 1:
        raise ModelError(f"{path}: part {int(match['index'])} of {count}: give the first part, {match['stem']}-00001-of-{count:05d}.gguf")
    return [f"{match['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]


def _value(header: int, key: str, default):
    """A scalar of the header, or the default if it is absent or of an unexpected type."""
    index = _find_key(header, key.encode())
    reader = _READERS.get(_kv_type(header, index)) if index >= 0 else None
    value = reader(header, index) if reader else default
    return value if type(value) is type(default) else default


def _read_file(path: str, index: int) -> tuple[dict, list[Span]]:
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from None
    if magic != b"GGUF":
        raise ModelError(f"{path}: not a GGUF file (it begins with {magic!r})")
    header = _init_from_file(os.fsencode(path), _InitParams(no_alloc=True, ctx=None))
    if not header:
        raise ModelError(f"{path}: the GGUF header is damaged or of a version that llama.cpp does not read")
    try:
        data = _data_offset(header)
        spans = [
            Span(
                name=_tensor_name(header, i).decode("utf-8", "replace"),
                file=index,
                offset=data + _tensor_offset(header, i),
                nbytes=_tensor_size(header, i),
                type=_tensor_type(header, i),
            )
            for i in range(_n_tensors(header))
        ]
        architecture = _value(header, "general.architecture", "")
        values = {"general.architecture": architecture, "split.count": _value(header, "split.count", 0)}
        for key in ("expert_count", "expert_used_count", "context_length"):
            values[key] = _value(header, f"{architecture}.{key}", 0)
    finally:
        _free(header)
    end = max((span.offset + span.nbytes for span in spans), default=0)
    if end > size:
        raise ModelError(f"{path}: truncated: its tensors end at byte {end}, the file at {size}; download or copy it again")
    return values, spans
