"""Places of a GGUF's tensors: file, offset and size of each, over all files of a split model, and which of them hold routed experts.

Names are llama.cpp's: "blk.LAYER.REST", where REST says whether a tensor holds routed experts (the native side has a parser of its own for
these, moeoff-buffer-type.cpp; a test holds the two together), and STEM-00001-of-00003.gguf for the files of a split model. Knows nothing of
memory or of running models.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np

from ..errors import ModelError
from ..system.files import Closing, open_file
from .file import FileState, ModelFile, read_range, require_unchanged, unpack
from .quantize import I32, is_computed, type_name

_T = TypeVar("_T", str, int)
_DIFFUSION = ("llada-moe", "rnd1")  # those with routed experts
_LONGEST_ARRAY = 4096  # one value for each layer fits; a vocabulary does not
_COPIES, _STRING = 4, 150  # of a value, and bytes for each string, as measured (3.4 of a text, 2.2 of numbers)
_LONGEST_VALUE = 1 << 16  # bytes of a value that is read: what is longer is not about the architecture


MATRICES = ("gate_up", "up", "gate", "down")  # in the order the graph computes them; places are those of enum moeoff_matrix
# for Python's re and for llama.cpp's std::regex: no named groups. arctic's ffn_norm_exps is no expert
EXPERT_PATTERN = r"^blk\.([0-9]+)\.ffn_(gate_up|up|gate|down)_(ch)?exps\.weight$"
EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"  # a model without the second uses the first for both
# tables of which a graph reads the rows that tokens name, and nothing else (GET_ROWS), where the first is not the output matrix, too
_ROW_TABLE = re.compile(r"token_embd\.weight|per_layer_token_embd\.weight|blk\.[0-9]+\.nextn\.embed_tokens\.weight")
_EXPERTS = re.compile(EXPERT_PATTERN)
SINGLE_EXPERT = re.compile(r"^(blk\.[0-9]+\.ffn_(?:gate|up|down))\.([0-9]+)\.weight$")  # of files until April 2024
_BLOCK = re.compile(r"^blk\.([0-9]+)\.(.+)$")


@dataclass(frozen=True, order=True)
class TensorRole:
    """Place of a tensor of routed experts in the model.

    Attributes:
        layer: counted from 0.
        chunk: one of the layer's chunk experts (grovemoe), which have a gate of their own.
        matrix: index into MATRICES.
    """

    layer: int
    chunk: bool
    matrix: int

    @property
    def matrix_name(self) -> str:
        return MATRICES[self.matrix]


def is_expert(name: str) -> bool:
    """True if the tensor holds routed experts."""
    return _EXPERTS.match(name) is not None


def parse_tensor_name(name: str) -> TensorRole:
    """The role of a tensor of routed experts. Raises ModelError for the name of any other tensor."""
    match = _EXPERTS.match(name)
    if not match:
        raise ModelError(f"{name}: not a name that llama.cpp gives to routed experts, as blk.0.ffn_up_exps.weight")
    return TensorRole(int(match[1]), match[3] is not None, MATRICES.index(match[2]))


def parse_block_name(name: str) -> tuple[int, str] | None:
    """Layer and rest of a tensor that belongs to one: (3, "attn_q.weight") of "blk.3.attn_q.weight"."""
    match = _BLOCK.match(name)
    return (int(match[1]), match[2]) if match else None


_SPLIT = re.compile(r"(?P<stem>.+)-(?P<index>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class SplitName:
    """Part `index`, counted from 1, of `count`; the stem is a path or whatever was given, without the numbers."""

    stem: str
    index: int
    count: int

    @classmethod
    def parse(cls, path: str | os.PathLike[str]) -> SplitName | None:
        """None: not named like a part."""
        match = _SPLIT.fullmatch(os.fspath(path))
        return cls(match["stem"], int(match["index"]), int(match["count"])) if match else None

    def part(self, index: int) -> str:
        """The path of another part."""
        return f"{self.stem}-{index:05d}-of-{self.count:05d}.gguf"

    @property
    def parts(self) -> list[str]:
        return [self.part(index) for index in range(1, self.count + 1)]


def model_stem(model: str | os.PathLike[str]) -> str:
    """Stem of the names of a model's other files: its path without ".gguf", and without the number if it is a first part."""
    split = SplitName.parse(model)
    return split.stem if split and split.index == 1 else os.fspath(model).removesuffix(".gguf")


@dataclass(frozen=True)
class TensorSpan:
    """A tensor's bytes: `files[file][offset : offset + nbytes]`, of ggml type number `type`; shape: row length first."""

    name: str
    file: int
    offset: int
    nbytes: int
    type: int
    shape: tuple[int, int, int, int]

    @property
    def slice_bytes(self) -> int:
        """Of one of its matrices: of routed experts, of one expert's."""
        return self.nbytes // max(self.shape[2], 1)


@dataclass(frozen=True)
class ModelIndex:
    """The tensors of a model, over all files of a split one.

    Attributes:
        files: paths, the first part's first.
        architecture: `general.architecture`.
        experts: spans of the routed experts' tensors by name.
        dense: spans of everything else.
        hparams: the architecture's numbers and flags by their keys without its name, as "attention.head_count".
        states: of each file when it was read.
        header_memory: bytes that llama.cpp takes for the headers while it loads, at most: each value several times, and the words of a vocabulary in tables.
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
        """Experts that a token uses in a layer; they need not be as many in each."""
        used = self.hparams.get("expert_used_count")
        return int(used[layer]) if isinstance(used, tuple) and layer < len(used) else self.n_expert_used

    @property
    def experts_per_token(self) -> int:
        """Experts that a token uses, in all layers together."""
        return sum(self.experts_used(parse_tensor_name(spans[0].name).layer) for spans in self.gates)

    @property
    def dense_bytes(self) -> int:
        return sum(span.nbytes for span in self.dense.values())

    @property
    def row_tables(self) -> dict[str, TensorSpan]:
        """Spans of `dense` that stay on disk: a running model reads their rows as tokens name them. A token embedding that is the output matrix, too, is
        none: every token needs it whole."""
        return {name: span for name, span in self.dense.items() if _ROW_TABLE.fullmatch(name) and (name != EMBEDDING or OUTPUT in self.dense)}

    @property
    def key_widths(self) -> set[int]:
        """Numbers in a head's keys, of ordinary layers and of those with a sliding window."""
        n_head = count(self.hparams, "attention.head_count")
        width = count(self.hparams, "attention.key_length") or (count(self.hparams, "embedding_length") // n_head if n_head else 0)
        return {width, count(self.hparams, "attention.key_length_swa") or width}

    @property
    def gates(self) -> list[list[TensorSpan]]:
        """Spans of the experts' tensors of each gate, in the order of layers, each in that of the graph."""
        gates: dict[tuple[int, bool], list[TensorSpan]] = {}
        for span in sorted(self.experts.values(), key=lambda span: parse_tensor_name(span.name)):
            role = parse_tensor_name(span.name)
            gates.setdefault((role.layer, role.chunk), []).append(span)
        return list(gates.values())

    @property
    def expert_bytes(self) -> int:
        return sum(span.nbytes for span in self.experts.values())

    @property
    def identity(self) -> str:
        """Hash of the files' paths, and of their sizes and mtimes when they were read, by which measurements are found again.

        Without ctime, so that chmod, chown and hard links lose no profile, which is compared with the model itself, and no
        list of experts to preload. What would be wrong of another content asks for ctime, too (`state_identity`).
        """
        identity = hashlib.sha256()
        for path, state in zip(self.files, self.states, strict=True):
            identity.update(f"{os.path.realpath(path)}\0{state.size}\0{state.mtime_ns}\0".encode())
        return identity.hexdigest()[:32]

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> ModelIndex:
        """Reads the headers of a GGUF file and of the other parts if it is the first of a split one.

        Raises:
            ModelError: missing, unreadable, not a GGUF file, damaged, truncated, or not the first part of a split model.
        """
        path = os.fspath(path)
        if any("\udc80" <= letter <= "\udcff" for letter in path):  # as Python reads a byte that is none
            raise ModelError(f"{path}: its name is not UTF-8, as llama.cpp needs it: rename the file or its folder")
        first, n_parts = _read_file(path, 0)
        if n_parts < 2:
            return first
        name = SplitName.parse(path)
        if not name or name.count != n_parts:
            raise ModelError(f"{path}: part of a model in {n_parts} files, but not named like NAME-00001-of-{n_parts:05d}.gguf")
        if name.index != 1:
            raise ModelError(f"{path}: part {name.index} of {n_parts}: give the first part, {name.part(1)}")
        parts = [first] + [_read_file(part, index)[0] for index, part in enumerate(name.parts[1:], start=1)]
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
        """Next-token (MTP) layers: the last ones, with which drafts can be made."""
        return count(self.hparams, "nextn_predict_layers") if any(".nextn." in name for name in self.dense) else 0

    def without_nextn(self) -> ModelIndex:
        """The tensors that llama.cpp loads where no drafts are made with next-token layers, which then stay in the file."""
        first = self.n_layer - count(self.hparams, "nextn_predict_layers")
        if first == self.n_layer:
            return self

        def loaded(spans: dict[str, TensorSpan]) -> dict[str, TensorSpan]:
            return {name: span for name, span in spans.items() if (block := parse_block_name(name)) is None or block[0] < first}

        return replace(self, experts=loaded(self.experts), dense=loaded(self.dense))

    def require_experts(self) -> None:
        """Checks that there is something to offload. Raises `ModelError`."""
        if self.architecture == "moeoff-experts":
            raise ModelError(f"{self.files[0]}: a sidecar, not a model: give the model that it was made of")
        if any(SINGLE_EXPERT.match(name) for name in self.dense):
            raise ModelError(f"{self.files[0]}: an old file with a tensor for each expert, which llama.cpp no longer reads: get or convert it anew")
        if not self.experts:
            raise ModelError(f"{self.files[0]}: a {self.architecture or 'dense'} model without routed experts: nothing to offload, run it with llama.cpp")

    def require_text(self) -> None:
        """Checks that there is something to offload, and that the model writes a text token by token. Raises `ModelError`."""
        self.require_experts()
        if self.architecture in _DIFFUSION:
            raise ModelError(
                f"{self.files[0]}: a diffusion model ({self.architecture}), which draws all tokens of an answer at once, in many steps: moeoff writes token by token"
            )

    def check_unchanged(self) -> None:
        """Check that no file was written to since its header was read. Raises as `require_unchanged`."""
        require_unchanged(dict(zip(self.files, self.states, strict=True)))


def count(hparams: Mapping[str, object], key: str) -> int:
    """A count as llama.cpp takes it: unsigned, and of one for each layer the largest; 0 where the file does not say."""
    value = hparams.get(key, 0)
    return max((n & 0xFFFFFFFF for n in (value if isinstance(value, tuple) else (value,)) if type(n) is int), default=0)


def _hparams(file: ModelFile, architecture: str) -> dict[str, object]:
    """The architecture's values: numbers, flags, strings and tuples of numbers, but no long ones."""
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
    """A scalar of the header, or the default if it is absent or of another type."""
    value = unpack(file.metadata[key]) if key in file.metadata else default
    return value if isinstance(value, type(default)) and not isinstance(value, bool) else default


def _read_file(path: str, index: int) -> tuple[ModelIndex, int]:
    """One file of a model, and how many there are."""
    with ModelFile(path, longest=_LONGEST_VALUE) as file:
        spans = []
        for name, tensor in file.tensors.items():
            n0, n1, n2, n3, *_ = (*reversed(tensor.shape), 1, 1, 1)
            spans.append(TensorSpan(name, index, file.offset(name), tensor.n_bytes, tensor.type, (n0, n1, n2, n3)))
        architecture = _value(file, "general.architecture", "")
        part = ModelIndex(
            files=(path,),
            architecture=architecture,
            experts={span.name: span for span in spans if is_expert(span.name)},
            dense={span.name: span for span in spans if not is_expert(span.name)},
            hparams=_hparams(file, architecture),
            states=(file.state,),
            # llama.cpp writes out one array after the other, for its log
            header_memory=_COPIES * (file.data_start + file.written) + _STRING * file.n_strings,
        )
        return part, _value(file, "split.count", 0)


def loaded_whole(path: str | os.PathLike[str]) -> tuple[int, int]:
    """Bytes of the tensors and `header_memory` of a file that llama.cpp loads as a whole, as an adapter.

    Raises:
        ModelError: as `ModelIndex.read`, or a tensor cannot be computed with: llama.cpp looks at shapes alone, and the first batch ends in a null pointer.
    """
    whole, _ = _read_file(os.fspath(path), 0)
    for span in (spans := {**whole.dense, **whole.experts}).values():
        if span.type == I32 or not is_computed(span.type):
            raise ModelError(f"{os.fspath(path)}: {span.name!r} is stored as {type_name(span.type)}, with which llama.cpp cannot compute it: convert it again")
    return sum(span.nbytes for span in spans.values()), whole.header_memory


class ModelBytes(Closing):
    """Ranges of bytes of a model's files, read one by one. A context manager.

    Raises:
        ModelError: a file cannot be opened.
    """

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
        """A range of one of the files.

        Args:
            what: it holds, for people.

        Raises:
            ModelError: it cannot be read, or the file ends before it does.
        """
        return memoryview(read_range(self._fds[file], self._paths[file], offset, nbytes, what))
