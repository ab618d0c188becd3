"""Where a GGUF's experts are: file, offset and size of every tensor, and which of them hold routed experts.

Reads headers only, through ggml's own GGUF parser, so that it accepts exactly what llama.cpp accepts. Knows nothing of
memory or of running models.
"""

from __future__ import annotations

import ctypes
import os
import struct
from ctypes import POINTER, Structure, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from dataclasses import dataclass, field

from ..binding import lib
from ..errors import ModelError
from .split_name import SplitName
from .tensor_name import is_expert


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
# int64_t gguf_get_n_kv(const struct gguf_context * ctx);
_n_kv = _function("gguf_get_n_kv", c_int64, c_void_p)
# const char * gguf_get_key(const struct gguf_context * ctx, int64_t key_id);
_key = _function("gguf_get_key", c_char_p, c_void_p, c_int64)
# const void * gguf_get_val_data(const struct gguf_context * ctx, int64_t key_id);  -- of scalars that are no strings
_val_data = _function("gguf_get_val_data", c_void_p, c_void_p, c_int64)
# enum gguf_type gguf_get_arr_type(const struct gguf_context * ctx, int64_t key_id);
_arr_type = _function("gguf_get_arr_type", c_int, c_void_p, c_int64)
# size_t gguf_get_arr_n(const struct gguf_context * ctx, int64_t key_id);
_arr_n = _function("gguf_get_arr_n", c_size_t, c_void_p, c_int64)
# const void * gguf_get_arr_data(const struct gguf_context * ctx, int64_t key_id);  -- of arrays that hold no strings
_arr_data = _function("gguf_get_arr_data", c_void_p, c_void_p, c_int64)
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
# const int64_t * gguf_get_tensor_ne(const struct gguf_context * ctx, int64_t tensor_id);
_tensor_ne = _function("gguf_get_tensor_ne", POINTER(c_int64), c_void_p, c_int64)

# enum gguf_type
_STRING, _ARRAY = 8, 9
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_LONGEST_ARRAY = 4096  # one value for each layer fits; a vocabulary does not


@dataclass(frozen=True)
class TensorSpan:
    """A tensor's bytes: `files[file][offset : offset + nbytes]`, of ggml type number `type`; shape: row length first."""

    name: str
    file: int
    offset: int
    nbytes: int
    type: int
    shape: tuple[int, int, int, int]


@dataclass(frozen=True)
class FileState:
    """What tells one content of a file from another without reading it."""

    device: int
    inode: int
    size: int
    mtime_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


@dataclass(frozen=True)
class Layout:
    """The tensors of a model, over all files of a split one.

    Attributes:
        files: paths, the one given first if the model is not split.
        architecture: `general.architecture`.
        n_layer, n_expert, n_expert_used, n_ctx_train: of the model; 0 where the file does not say.
        experts: spans of the routed experts' tensors by name.
        dense: spans of everything else.
        hparams: the architecture's numbers and flags by their keys without its name, as "attention.head_count".
        states: of each file when it was read.
    """

    files: tuple[str, ...]
    architecture: str
    n_layer: int
    n_expert: int
    n_expert_used: int
    n_ctx_train: int
    experts: dict[str, TensorSpan]
    dense: dict[str, TensorSpan] = field(repr=False)
    hparams: dict[str, object] = field(repr=False)
    states: tuple[FileState, ...] = field(repr=False)

    @property
    def dense_bytes(self) -> int:
        return sum(span.nbytes for span in self.dense.values())

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
        first = _read_file(path, 0)
        parts, files = [first], [path]
        if first.n_split > 1:
            files = _split_files(path, first.n_split)
            parts += [_read_file(part, index) for index, part in enumerate(files[1:], start=1)]
        spans = [span for part in parts for span in part.spans]
        return cls(
            files=tuple(files),
            architecture=first.architecture,
            n_layer=first.number("block_count"),
            n_expert=first.number("expert_count"),
            n_expert_used=first.number("expert_used_count"),
            n_ctx_train=first.number("context_length"),
            experts={span.name: span for span in spans if is_expert(span.name)},
            dense={span.name: span for span in spans if not is_expert(span.name)},
            hparams=first.hparams,
            states=tuple(part.state for part in parts),
        )

    def require_experts(self) -> None:
        """Raises `ModelError` if there is nothing to offload."""
        if self.architecture == "moeoff-experts":
            raise ModelError(f"{self.files[0]}: a companion, not a model: give the model that it was made of")
        if not self.experts:
            raise ModelError(f"{self.files[0]}: a {self.architecture or 'dense'} model without routed experts: nothing to offload, run it with llama.cpp")

    def check_unchanged(self) -> None:
        """Raises `ModelError` if a file was written to since it was read.

        A file that was replaced by another of the same name is no harm to those who still hold the old one open.
        """
        for path, state in zip(self.files, self.states, strict=True):
            try:
                now = FileState.of(os.stat(path))
            except OSError:
                continue  # unlinked or out of reach by name: what is open stays readable
            if now != state and (now.device, now.inode) == (state.device, state.inode):
                raise ModelError(f"{path}: the file was changed while the model was in use: load it again")


@dataclass(frozen=True)
class _Part:
    """One file of a model."""

    architecture: str
    n_split: int
    hparams: dict[str, object]
    spans: list[TensorSpan]
    state: FileState

    def number(self, key: str) -> int:
        """A count that some architectures give for each layer: then the largest. 0 if the file does not say."""
        value = self.hparams.get(key, 0)
        numbers = value if isinstance(value, tuple) else (value,)
        return max((n for n in numbers if type(n) is int and n > 0), default=0)


def _split_files(path: str, count: int) -> list[str]:
    name = SplitName.parse(path)
    if not name or name.count != count:
        raise ModelError(f"{path}: part of a model in {count} files, but not named like NAME-00001-of-{count:05d}.gguf")
    if name.index != 1:
        raise ModelError(f"{path}: part {name.index} of {count}: give the first part, {name.part(1)}")
    return name.parts


def _scalar(header: int, index: int) -> object:
    """A number, flag, string, or tuple of numbers; None for what is none of these, or long."""
    kind = _kv_type(header, index)
    if kind == _STRING:
        return _val_str(header, index).decode("utf-8", "replace")
    if kind in _FORMATS:
        return struct.unpack("=" + _FORMATS[kind], ctypes.string_at(_val_data(header, index), struct.calcsize("=" + _FORMATS[kind])))[0]
    if kind != _ARRAY or _arr_type(header, index) not in _FORMATS:
        return None
    count = _arr_n(header, index)
    if not 0 < count <= _LONGEST_ARRAY:
        return None
    pattern = f"={count}{_FORMATS[_arr_type(header, index)]}"
    return struct.unpack(pattern, ctypes.string_at(_arr_data(header, index), struct.calcsize(pattern)))


def _value(header: int, key: str, default):
    """A scalar of the header, or the default if it is absent or of an unexpected type."""
    index = _find_key(header, key.encode())
    value = _scalar(header, index) if index >= 0 else default
    return value if type(value) is type(default) else default


def _hparams(header: int, architecture: str) -> dict[str, object]:
    prefix = f"{architecture}."
    keys = ((_key(header, i).decode("utf-8", "replace"), i) for i in range(_n_kv(header)))
    found = {key[len(prefix) :]: _scalar(header, i) for key, i in keys if key.startswith(prefix)}
    return {key: value for key, value in found.items() if value is not None}


def _read_file(path: str, index: int) -> _Part:
    try:
        with open(path, "rb") as file:
            magic = file.read(4)
            state = FileState.of(os.fstat(file.fileno()))
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
            TensorSpan(
                name=_tensor_name(header, i).decode("utf-8", "replace"),
                file=index,
                offset=data + _tensor_offset(header, i),
                nbytes=_tensor_size(header, i),
                type=_tensor_type(header, i),
                shape=tuple(_tensor_ne(header, i)[:4]),
            )
            for i in range(_n_tensors(header))
        ]
        architecture = _value(header, "general.architecture", "")
        part = _Part(architecture, _value(header, "split.count", 0), _hparams(header, architecture), spans, state)
    finally:
        _free(header)
    end = max((span.offset + span.nbytes for span in spans), default=0)
    if end > state.size:
        raise ModelError(f"{path}: truncated: its tensors end at byte {end}, the file at {state.size}; download or copy it again")
    return part
