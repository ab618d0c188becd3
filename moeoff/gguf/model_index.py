"""Index of a model's tensors: file, offset, size, and which hold routed experts.

Names are llama.cpp's: tensors of layers are "blk.LAYER.REST", files of a split model
are STEM-00001-of-00003.gguf. A test compares moeoff-buffer-type.cpp's parser.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeVar

import numpy as np

from ..errors import ModelError
from ..system.files import Closing, StrPath, open_file
from ..system.memory import slot_bytes
from .file import FileState, ModelFile, read_range, require_unchanged, unpack
from .quantize import I32, is_computed, type_name

_T = TypeVar("_T", str, int)
_DIFFUSION = ("llada-moe", "rnd1")  # architectures with routed experts
_LONGEST_ARRAY = 4096  # elements: fits one value per layer, not a vocabulary
# Memory of llama.cpp per header byte and per string; measured: 3.4 for text, 2.2 for
# numbers
_COPIES, _STRING = 4, 150
_LONGEST_VALUE = 1 << 16  # bytes; no hyperparameter is longer


MATRICES = ("gate_up", "up", "gate", "down")  # order of the graph and of enum moeoff_matrix
# no named groups, because std::regex in llama.cpp reads this too
EXPERT_PATTERN = r"^blk\.([0-9]+)\.ffn_(gate_up|up|gate|down)_(ch)?exps\.weight$"
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"  # tied if there is no output.weight
# tables that graphs read with GET_ROWS only
_ROW_TABLE = re.compile(
    r"token_embd\.weight|per_layer_token_embd\.weight|blk\.[0-9]+\.nextn\.embed_tokens\.weight"
)
_EXPERTS = re.compile(EXPERT_PATTERN)
# one tensor per expert, in files until April 2024
SINGLE_EXPERT = re.compile(r"^(blk\.[0-9]+\.ffn_(?:gate|up|down))\.([0-9]+)\.weight$")
_BLOCK = re.compile(r"^blk\.([0-9]+)\.(.+)$")


@dataclass(frozen=True, order=True)
class TensorRole:
    """Place of a tensor of routed experts in the model.

    Attributes:
        chunk: True for chunk experts (grovemoe), which have a gate of their own.
        matrix: Index into MATRICES.
    """

    layer: int
    chunk: bool
    matrix: int

    @property
    def matrix_name(self) -> str:
        return MATRICES[self.matrix]


def is_expert(name: str) -> bool:
    """Return True if the tensor holds routed experts."""
    return _EXPERTS.match(name) is not None


def parse_tensor_name(name: str) -> TensorRole:
    """Return the role of a tensor of routed experts. Raise ModelError for others."""
    match = _EXPERTS.match(name)
    if not match:
        raise ModelError(f"{name}: expected a name such as blk.0.ffn_up_exps.weight")
    return TensorRole(int(match[1]), match[3] is not None, MATRICES.index(match[2]))


def parse_block_name(name: str) -> tuple[int, str] | None:
    """Split "blk.3.attn_q.weight" into (3, "attn_q.weight"); None for other names."""
    match = _BLOCK.match(name)
    return (int(match[1]), match[2]) if match else None


_SPLIT = re.compile(r"(?P<stem>.+)-(?P<index>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class SplitName:
    """The name of a part, `index` from 1; `stem` is the path without numbers."""

    stem: str
    index: int
    count: int

    @classmethod
    def parse(cls, path: StrPath) -> SplitName | None:
        """Parse a path. Return None if it is not named like a part."""
        match = _SPLIT.fullmatch(os.fspath(path))
        return cls(match["stem"], int(match["index"]), int(match["count"])) if match else None

    def part(self, index: int) -> str:
        return f"{self.stem}-{index:05d}-of-{self.count:05d}.gguf"

    @property
    def parts(self) -> list[str]:
        return [self.part(index) for index in range(1, self.count + 1)]


def model_stem(model: StrPath) -> str:
    """Return the model's path without ".gguf" and the number of a first part."""
    split = SplitName.parse(model)
    return split.stem if split and split.index == 1 else os.fspath(model).removesuffix(".gguf")


@dataclass(frozen=True)
class TensorSpan:
    """A tensor's bytes in one of the model's files.

    Attributes:
        file: Index into `ModelIndex.files`.
        type: ggml type number.
        shape: Sizes, row length first.
    """

    name: str
    file: int
    offset: int
    nbytes: int
    type: int
    shape: tuple[int, int, int, int]

    @property
    def slice_bytes(self) -> int:
        """Size of one matrix, for routed experts that of one expert, in bytes."""
        return self.nbytes // max(self.shape[2], 1)


@dataclass(frozen=True)
class ModelIndex:
    """The tensors of a model in all its files.

    Attributes:
        files: Paths, the first part first.
        experts: Tensors of routed experts by name.
        dense: All other tensors by name.
        hparams: Hyperparameters by key without the architecture
            ("attention.head_count").
        header_memory: Maximum bytes that llama.cpp takes for the headers while loading.
    """

    files: tuple[str, ...]
    architecture: str
    experts: dict[str, TensorSpan]
    dense: dict[str, TensorSpan] = field(repr=False)
    hparams: dict[str, object] = field(repr=False)
    states: tuple[FileState, ...] = field(repr=False)
    header_memory: int = field(repr=False)

    @property
    def n_layer(self) -> int:
        return count(self.hparams, "block_count")

    @property
    def n_expert(self) -> int:
        return count(self.hparams, "expert_count")

    @property
    def n_expert_used(self) -> int:
        return count(self.hparams, "expert_used_count")

    @property
    def n_ctx_train(self) -> int:
        return count(self.hparams, "context_length")

    def experts_used(self, layer: int) -> int:
        """Return the number of experts per token in a layer."""
        used = self.hparams.get("expert_used_count")
        return (
            int(used[layer])
            if isinstance(used, tuple) and layer < len(used)
            else self.n_expert_used
        )

    @property
    def experts_per_token(self) -> int:
        """Number of experts a token uses, summed over all layers."""
        return sum(
            self.experts_used(parse_tensor_name(spans[0].name).layer) for spans in self.gates
        )

    @property
    def dense_bytes(self) -> int:
        return sum(span.nbytes for span in self.dense.values())

    @property
    def row_tables(self) -> dict[str, TensorSpan]:
        """Dense tensors that stay on disk because graphs read single rows of them.

        A token embedding that is also the output matrix is not one of them.
        """
        return {
            name: span
            for name, span in self.dense.items()
            if _ROW_TABLE.fullmatch(name) and (name != EMBEDDING or OUTPUT in self.dense)
        }

    @property
    def key_widths(self) -> set[int]:
        """Elements of a head's key, in ordinary and sliding-window layers."""
        return {self.key_width(), self.key_width("_swa")}

    def key_width(self, suffix: str = "") -> int:
        """Return the elements of a head's key; suffix "_swa" is for sliding windows."""
        n_head = count(self.hparams, "attention.head_count")
        for key in (f"attention.key_length{suffix}", "attention.key_length"):
            if width := count(self.hparams, key):
                return width
        return count(self.hparams, "embedding_length") // n_head if n_head else 0

    @property
    def gates(self) -> list[list[TensorSpan]]:
        """Expert tensors of each gate, in the order of the graph."""
        roles = {name: parse_tensor_name(name) for name in self.experts}
        spans = sorted(self.experts.values(), key=lambda span: roles[span.name])
        gates = groupby(spans, lambda span: (roles[span.name].layer, roles[span.name].chunk))
        return [list(gate) for _, gate in gates]

    @property
    def gate_slots(self) -> list[tuple[int, int]]:
        """Arena bytes of an expert, and number of experts, of each gate."""
        gates = self.gates
        slots = [slot_bytes(*(span.slice_bytes for span in gate)) for gate in gates]
        return [(nbytes, gate[0].shape[2]) for nbytes, gate in zip(slots, gates)]

    @property
    def expert_bytes(self) -> int:
        return sum(span.nbytes for span in self.experts.values())

    @property
    def identity(self) -> str:
        """Hash of the files' paths, sizes and mtimes, by which measurements are found.

        ctime is left out so that chmod, chown and hard links do not invalidate profiles
        and the files of warm starts. `state_identity` includes ctime.
        """
        identity = hashlib.sha256()
        for path, state in zip(self.files, self.states, strict=True):
            identity.update(f"{os.path.realpath(path)}\0{state.size}\0{state.mtime_ns}\0".encode())
        return identity.hexdigest()[:32]

    @classmethod
    def read(cls, path: StrPath) -> ModelIndex:
        """Read the headers of a model, of all files if it is split.

        Raises:
            ModelError: A file is missing, unreadable or damaged, or `path` is not the
                first part of a split model.
        """
        path = os.fspath(path)
        if any("\udc80" <= letter <= "\udcff" for letter in path):  # surrogateescape
            raise ModelError(f"{path}: expected a path in UTF-8; rename the file or its folder")
        first, n_parts = _read_file(path, 0)
        if n_parts < 2:
            return first
        name = SplitName.parse(path)
        if not name or name.count != n_parts:
            raise ModelError(
                f"{path}: part of a model in {n_parts} files, but not named like"
                f" NAME-00001-of-{n_parts:05d}.gguf"
            )
        if name.index != 1:
            raise ModelError(
                f"{path}: part {name.index} of {n_parts}: give the first part, {name.part(1)}"
            )
        parts = [first] + [
            _read_file(part, index)[0] for index, part in enumerate(name.parts[1:], start=1)
        ]
        return replace(
            first,
            files=tuple(name.parts),
            experts={name: span for part in parts for name, span in part.experts.items()},
            dense={name: span for part in parts for name, span in part.dense.items()},
            states=tuple(state for part in parts for state in part.states),
            header_memory=sum(part.header_memory for part in parts),
        )

    @property
    def n_nextn(self) -> int:
        """Number of next-token (MTP) layers, the last layers, which can make drafts."""
        return (
            count(self.hparams, "nextn_predict_layers")
            if any(".nextn." in name for name in self.dense)
            else 0
        )

    def without_nextn(self) -> ModelIndex:
        """Return the index without next-token layers, llama.cpp's default."""
        first = self.n_layer - count(self.hparams, "nextn_predict_layers")
        if first == self.n_layer:
            return self

        def loaded(spans: dict[str, TensorSpan]) -> dict[str, TensorSpan]:
            return {
                name: span
                for name, span in spans.items()
                if (block := parse_block_name(name)) is None or block[0] < first
            }

        return replace(self, experts=loaded(self.experts), dense=loaded(self.dense))

    def require_experts(self) -> None:
        """Raise ModelError if the model has no routed experts."""
        if self.architecture == "moeoff-experts":
            raise ModelError(
                f"{self.files[0]}: a sidecar, not a model: give the model that it was made of"
            )
        if any(SINGLE_EXPERT.match(name) for name in self.dense):
            raise ModelError(
                f"{self.files[0]}: an old file with a tensor for each expert, which llama.cpp no"
                " longer reads: get or convert it anew"
            )
        if not self.experts:
            raise ModelError(
                f"{self.files[0]}: a {self.architecture or 'dense'} model without routed experts:"
                " nothing to offload, run it with llama.cpp"
            )

    def require_text(self) -> None:
        """Raise ModelError for models without routed experts and diffusion models."""
        self.require_experts()
        if self.architecture in _DIFFUSION:
            kind = f"a diffusion model ({self.architecture})"
            raise ModelError(f"{self.files[0]}: {kind}, which moeoff cannot run")

    def check_unchanged(self) -> None:
        """Raise ModelError if a file was written to since its header was read."""
        require_unchanged(dict(zip(self.files, self.states, strict=True)))


def count(hparams: Mapping[str, object], key: str) -> int:
    """Return an unsigned hyperparameter, the maximum over layers, 0 if absent."""
    value = hparams.get(key, 0)
    return max(
        (
            n & 0xFFFFFFFF
            for n in (value if isinstance(value, tuple) else (value,))
            if type(n) is int
        ),
        default=0,
    )


def _hparams(file: ModelFile, architecture: str) -> dict[str, object]:
    """Return the architecture's values except strings' arrays and long arrays."""
    hparams: dict[str, object] = {}
    prefix = f"{architecture}."
    for key, raw in file.metadata.items():
        if key.startswith(prefix):
            value = unpack(raw)
            if isinstance(value, np.ndarray) and 0 < value.size <= _LONGEST_ARRAY:
                hparams[key[len(prefix) :]] = tuple(value.tolist())
            elif not isinstance(value, (np.ndarray, list)):
                hparams[key[len(prefix) :]] = value
    return hparams


def _value(file: ModelFile, key: str, default: _T) -> _T:
    """Return a scalar, or the default if it is absent or of another type."""
    value = unpack(file.metadata[key]) if key in file.metadata else default
    return value if isinstance(value, type(default)) and not isinstance(value, bool) else default


def _read_file(path: str, index: int) -> tuple[ModelIndex, int]:
    """Read one file of a model. Return its tensors and the number of files."""
    with ModelFile(path, longest=_LONGEST_VALUE) as file:
        return _part(file, path, index), _value(file, "split.count", 0)


def _part(file: ModelFile, path: str, index: int) -> ModelIndex:
    spans = []
    for name, tensor in file.tensors.items():
        n0, n1, n2, n3, *_ = (*reversed(tensor.shape), 1, 1, 1)
        spans.append(
            TensorSpan(
                name, index, file.offset(name), tensor.n_bytes, tensor.type, (n0, n1, n2, n3)
            )
        )
    architecture = _value(file, "general.architecture", "")
    return ModelIndex(
        files=(path,),
        architecture=architecture,
        experts={span.name: span for span in spans if is_expert(span.name)},
        dense={span.name: span for span in spans if not is_expert(span.name)},
        hparams=_hparams(file, architecture),
        states=(file.state,),
        # llama.cpp formats each array for its log, one after the other
        header_memory=_COPIES * (file.data_start + file.written) + _STRING * file.n_strings,
    )


# GGUF types of values that llama.cpp reads without a check
_ADAPTER_TYPES = {"adapter.lora.alpha": (6, "float32")} | dict.fromkeys(
    ("general.type", "general.architecture", "adapter.type"), (8, "string")
)


def loaded_whole(path: StrPath) -> tuple[int, int]:
    """Return tensor bytes and `header_memory` of a file that is loaded whole (LoRA).

    Raises:
        ModelError: The file is invalid, or a value or tensor has a type that crashes
            llama.cpp.
    """
    with ModelFile(path, longest=_LONGEST_VALUE) as file:
        for key, (code, kind) in _ADAPTER_TYPES.items():
            if key in file.metadata and file.metadata[key][:4] != struct.pack("<I", code):
                raise ModelError(f"{os.fspath(path)}: {key!r} is no {kind}; convert it again")
        whole = _part(file, os.fspath(path), 0)
    spans = [*whole.dense.values(), *whole.experts.values()]
    for span in spans:
        if span.type == I32 or not is_computed(span.type):
            raise type_error(path, span)
    return sum(span.nbytes for span in spans), whole.header_memory


def type_error(path: StrPath, span: TensorSpan) -> ModelError:
    """Return the error for a tensor whose type llama.cpp cannot compute with."""
    what = f"{span.name!r} is stored as {type_name(span.type)}"
    return ModelError(f"{os.fspath(path)}: llama.cpp cannot compute: {what}; convert it again")


class ModelBytes(Closing):
    """A reader of byte ranges of a model's files, a context manager."""

    def __init__(self, paths: Sequence[str]):
        self._paths, self._fds = list(paths), list[int]()
        try:
            for path in self._paths:
                with open_file(path) as file:
                    self._fds.append(os.dup(file.fileno()))
        except OSError as error:
            self.close()
            raise ModelError(f"{error.filename}: cannot be read: {error.strerror}") from None

    def __len__(self) -> int:
        return len(self._fds)

    def close(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def read(self, file: int, offset: int, nbytes: int, what: str) -> memoryview:
        """Read a range of one of the files as `read_range` does."""
        return memoryview(read_range(self._fds[file], self._paths[file], offset, nbytes, what))
