"""A sidecar: a second file of a model, in which every expert lies by itself, in one or more precisions; and where a run reads its experts from.

Knows the file's format (docs/reference/sidecar.md) and which model it was made of; knows nothing of how it was made. The header
carries its own hash, so that what is read from it is what was written, or nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import shlex
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ModelError, OptionError
from ..gguf.file import ModelFile, unpack
from ..gguf.model_index import ModelBytes, ModelIndex, TensorSpan, model_stem, parse_tensor_name
from ..gguf.quantize import row_bytes, type_from_name
from ..llamacpp import native
from ..precision import INT4, LOWEST

FORMAT_VERSION = 2
ALIGNMENT = 4096  # of every slice: a direct read takes whole pages
ORIGINAL = "original"  # the tier that holds the source's own bytes
AUTO, BITS = "auto", "bits"  # tiers without one type: by the source's type, and by a plan
_MADE_FOR = {LOWEST: "Q2_K", INT4: "Q4_0"}  # where a sidecar has none
_SEAL = b"moeoff.header_hash"
_NAME = re.compile(r"(?P<tensor>.+)\.(?P<expert>\d+)\.(?P<tier>[^.]+)")
_SAMPLE = 4096
MOST_TIERS = 16
MOST_SLICES = 1 << 19  # of a sidecar whose model is not known: the largest models have 70,000 in each tier


Data = bytes | bytearray | memoryview | np.ndarray

MIB = 1 << 20  # hash64 may be continued at multiples of this
_PIECE = 4 * MIB  # read at once


def hash64(data: Data, seed: int = 0) -> int:
    """XXH64 of each MiB of a contiguous buffer in turn, seeded with the one before."""
    array = np.frombuffer(data, np.uint8)
    return int(native.hash64(array.ctypes.data_as(ctypes.c_void_p), array.nbytes, seed))


class Hasher:
    """hash64 of bytes that come in pieces of any size."""

    def __init__(self) -> None:
        self._value, self._rest = 0, b""

    def update(self, data: Data) -> None:
        data = memoryview(data).cast("B")  # type: ignore[arg-type]  # numpy's arrays are buffers before 3.12, too
        if self._rest:
            data = memoryview(self._rest + bytes(data))
        whole = len(data) // MIB * MIB
        self._value = hash64(data[:whole], self._value) if whole else self._value
        self._rest = bytes(data[whole:])

    def value(self) -> int:
        return hash64(self._rest, self._value) if self._rest else self._value


def hash_range(files: ModelBytes, file: int, offset: int, nbytes: int, what: str) -> int:
    """hash64 of a range of one of the files. Raises `ModelError` as `ModelBytes.read`."""
    hasher = Hasher()
    for start in range(0, nbytes, _PIECE):
        hasher.update(files.read(file, offset + start, min(_PIECE, nbytes - start), what))
    return hasher.value()


def sidecar_path(model: str | os.PathLike[str]) -> str:
    """Default path of a model's sidecar: MODEL.experts.gguf, without the number of a first part."""
    return model_stem(model) + ".experts.gguf"


def slice_name(tensor: str, expert: int, tier: str) -> str:
    """The name of a slice in the sidecar."""
    return f"{tensor}.{expert}.{tier}"


def parse_slice_name(name: str) -> tuple[str, int, str] | None:
    """The model's tensor, the expert and the tier of `slice_name`; None for another name."""
    match = _NAME.fullmatch(name)
    return (match["tensor"], int(match["expert"]), match["tier"]) if match else None


def source_sample(model_index: ModelIndex) -> int:
    """A hash of what identifies a model's experts at the price of a few small reads.

    Takes every expert tensor's name, type and shape, and 4 KiB from the beginning of two experts of each: another model, or
    the same one trained further or quantized anew, differs everywhere.

    Raises:
        ModelError: the model cannot be read.
    """
    parts: list[bytes | memoryview] = []
    with ModelBytes(model_index.files) as files:
        for i, span in enumerate(sorted(model_index.experts.values(), key=lambda span: span.name)):
            parts.append(f"{span.name} {span.type} {span.shape};".encode())
            for expert in (i % span.shape[2], (7 * i + 3) % span.shape[2]):
                parts.append(files.read(span.file, span.offset + expert * span.slice_bytes, min(_SAMPLE, span.slice_bytes), span.name))
    return hash64(b"".join(parts))


def seal(header: bytes) -> bytes:
    """The header with its own hash, taken with zeros in the hash's place. `moeoff.header_hash` must be the last key."""
    key = struct.pack("<Q", len(_SEAL)) + _SEAL
    before, after = header[: header.rfind(key) + len(key) + 4], header[header.rfind(key) + len(key) + 12 :]  # 4: the value's type
    return before + struct.pack("<Q", hash64(before + bytes(8) + after)) + after


@dataclass(frozen=True)
class Slice:
    """One matrix of one expert in one tier: `nbytes` at `offset` of the sidecar, of ggml type `type`."""

    offset: int
    nbytes: int
    type: int
    shape: tuple[int, int]  # rows, row length
    hash: int


class Sidecar:
    """A sidecar's header.

    Attributes:
        path: of the file.
        state: of the file when its header was read.
        tiers: their names, in the file's order.
        slices: by (name of the model's tensor, expert, tier).
        source_name: the model's file name, of a split one the first part's.
        source_hashes: of the model's own slices, by (tensor, expert).
        identity: hash of the header, in which all slices' hashes are.
    """

    def __init__(self, path: str | os.PathLike[str], most: int = MOST_SLICES):
        """Reads the header.

        Args:
            most: slices that it may have.

        Raises:
            ModelError: missing, not a sidecar, damaged, or of a later format.
        """
        self.path = os.fspath(path)
        with ModelFile(path, max_tensors=most) as file:
            self.state = file.state
            version = self._get(file, "moeoff.format_version", int)
            if version != FORMAT_VERSION:
                raise ModelError(f"{self.path}: sidecar format {version}, this moeoff reads {FORMAT_VERSION}: convert the model again")
            if seal(header := file.header()) != header:
                raise ModelError(f"{self.path}: the sidecar's header is damaged: convert the model again")
            self.tiers: list[str] = self._get(file, "moeoff.sidecar.tiers", list)
            self.source_name: str = self._get(file, "moeoff.source.name", str)
            self.identity: int = self._get(file, _SEAL.decode(), int)
            self._sample: int = self._get(file, "moeoff.source.sample", int)
            hashes = self._get(file, "moeoff.hashes", np.ndarray).tolist()
            source_hashes = self._get(file, "moeoff.source.hashes", np.ndarray).tolist()
            if len(hashes) != len(file.tensors):
                raise ModelError(f"{self.path}: {len(hashes)} hashes for {len(file.tensors)} slices: convert the model again")
            self.slices: dict[tuple[str, int, str], Slice] = {}
            for (name, tensor), value in zip(file.tensors.items(), hashes):
                key = parse_slice_name(name)
                if key is None or key[2] not in self.tiers or len(tensor.shape) != 2:
                    raise ModelError(f"{self.path}: {name} is no slice of an expert: convert the model again")
                self.slices[key] = Slice(file.offset(name), tensor.n_bytes, tensor.type, tensor.shape, value)
            self.source_hashes = dict(zip(dict.fromkeys(key[:2] for key in self.slices), source_hashes))

    def _get(self, file: ModelFile, key: str, kind: type) -> Any:
        try:
            value = unpack(file.metadata[key])
        except (struct.error, ValueError, KeyError):  # ValueError: too short for its array, or not UTF-8
            value = None
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ModelError(f"{self.path}: not a sidecar of a model, or damaged: {key} is missing")
        return value

    def check_belongs(self, model_index: ModelIndex) -> None:
        """Checks that the sidecar was made of this model, as it is now. Raises `ModelError`."""
        if source_sample(model_index) != self._sample:
            raise ModelError(
                f"{self.path}: made of another {self.source_name}, or {model_index.files[0]} has changed since: convert it again, or go without",
                hint={"experts": "none"},
            )

    def tier(self, name: str) -> str | None:
        """A tier by its name in any case, or the one that is `LOWEST` or `INT4`; None: it has no such."""
        lower = [tier for tier in self.tiers if tier != ORIGINAL]
        if name.lower() == LOWEST:
            return min(lower, key=self.bits, default=None)
        if name.lower() == INT4:
            return next((tier for tier in lower if 4 <= self.bits(tier) <= 5), None)
        return next((tier for tier in self.tiers if tier.lower() == name.lower()), None)

    def bits(self, tier: str) -> float:
        """Bits of a weight in a tier, the mean over all experts."""
        slices = [s for (_, _, name), s in self.slices.items() if name == tier]
        return 8 * sum(s.nbytes for s in slices) / sum(math.prod(s.shape) for s in slices)

    def sources(self, span: TensorSpan, tier: str) -> Iterator[Slice]:
        """The slices of one of the model's tensors in a tier, by expert.

        Raises:
            ModelError: one is missing or has another shape.
        """
        for expert in range(span.shape[2]):
            s = self.slices.get((span.name, expert, tier))
            if s is None or s.shape != (span.shape[1], span.shape[0]) or s.nbytes != span.shape[1] * row_bytes(s.type, span.shape[0]):
                raise ModelError(f"{self.path}: no expert {expert} of {span.name} in tier {tier}: convert the model again")
            yield s


class CompositeSidecar(Sidecar):
    """A sidecar with one tier, "bits": what `convert --bits` would make of a plan.

    Args:
        sidecar: has the tiers.
        default: tier of experts that are not mentioned, and of chunk experts.
        others: tiers by (layer, expert).
    """

    def __init__(self, sidecar: Sidecar, default: str, others: Mapping[tuple[int, int], str]):
        self.__dict__.update(sidecar.__dict__)
        self._sidecar, self._default, self._others = sidecar, default, others
        self.tiers = [BITS]

    def sources(self, span: TensorSpan, tier: str) -> Iterator[Slice]:
        where = parse_tensor_name(span.name)
        chosen = [self._default if where.chunk else self._others.get((where.layer, e), self._default) for e in range(span.shape[2])]
        by_tier = {name: list(self._sidecar.sources(span, name)) for name in set(chosen)}
        return (by_tier[name][expert] for expert, name in enumerate(chosen))


@dataclass(frozen=True)
class ExpertSource:
    """The file a model's experts are read from: the sidecar's `tier`, or the model itself if sidecar is None or has no such tier.

    verify: every read is compared with its hash."""

    sidecar: Sidecar | None = None
    tier: str = ORIGINAL
    verify: bool = False

    @property
    def repacked(self) -> Sidecar | None:
        """The sidecar, if it holds them."""
        return self.sidecar if self.sidecar is not None and self.tier in self.sidecar.tiers else None

    def low(self, tier: str, model_index: ModelIndex) -> ExpertSource:
        """The source of the low versions, if this is that of the high ones.

        Raises:
            OptionError: there is no sidecar, or it has no such tier, or the high versions are read from it.
        """
        if tier == INT4 and self.tier == ORIGINAL and _has_int4(model_index):
            raise OptionError(f"{model_index.files[0]}: has experts of about four bits already: no lower precision of four bits")
        if self.sidecar is None:
            raise OptionError(f"low precision ({tier}) needs a sidecar{_made_by(model_index, None, tier)}")
        name = self.sidecar.tier(tier)
        if name is None or name in (self.tier, ORIGINAL):
            others = ", ".join(t for t in self.sidecar.tiers if t not in (self.tier, ORIGINAL)) or "none"
            raise OptionError(f"{self.sidecar.path}: no tier {tier} below {self.tier}; there are: {others}{_made_by(model_index, self.sidecar, tier)}")
        return ExpertSource(self.sidecar, name, self.verify)

    @classmethod
    def make(
        cls, model_index: ModelIndex, experts: Sidecar | str | os.PathLike[str] | bool = "auto", tier: str | None = None, verify: bool = False,
        low_tier: str | None = None,
    ) -> ExpertSource:  # fmt: skip
        """Finds the sidecar and checks that it is this model's.

        Args:
            experts: it, or its path; "auto" for the one at its default path, if there is one; False for none.
            tier: one of the sidecar's. By default "original", the model's own precision, from whichever file has it; so is `INT4` of a model in four bits.
            low_tier: of low versions that will be asked for, which an error names, too.

        Raises:
            ModelError: the sidecar is missing, damaged, or of another model.
            OptionError: it has no such tier; or something is asked that needs a sidecar, and there is none.
        """
        automatic = experts is True or experts == "auto"
        tier = ORIGINAL if tier == INT4 and _has_int4(model_index) else tier
        default = sidecar_path(model_index.files[0])
        chosen = experts if not automatic else default if os.path.exists(default) else None
        if isinstance(chosen, bool) or not chosen:
            if tier not in (None, ORIGINAL) or verify:
                what, tier = ("`verify_reads`", ORIGINAL) if tier in (None, ORIGINAL) else (f"tier {tier}", tier)
                raise OptionError(f"{what} needs a sidecar{_made_by(model_index, None, tier, low_tier)}")
            return cls()
        sidecar = chosen if isinstance(chosen, Sidecar) else Sidecar(chosen, MOST_TIERS * sum(span.shape[2] for span in model_index.experts.values()))
        sidecar.check_belongs(model_index)
        if tier is None and not automatic and ORIGINAL not in sidecar.tiers:
            raise OptionError(f"{sidecar.path}: holds lower precision only", hint={"tier": sidecar.tiers[0]})
        name = ORIGINAL if tier is None or tier.lower() == ORIGINAL else sidecar.tier(tier)
        if name is None:
            names = ", ".join(dict.fromkeys([*sidecar.tiers, ORIGINAL]))
            raise OptionError(f"{sidecar.path}: no tier {tier}; there are {names}{_made_by(model_index, sidecar, tier, low_tier)}")
        return cls(sidecar, name, verify)


def _has_int4(model_index: ModelIndex) -> bool:
    """True if a model's own experts have about four bits a weight, or fewer."""
    return 8 * model_index.expert_bytes <= 5 * sum(math.prod(span.shape) for span in model_index.experts.values())


def _made_by(model_index: ModelIndex, sidecar: Sidecar | None, *asked: str | None) -> str:
    """The commands that make a sidecar with these tiers, beside those that there are; empty: none does."""
    model, before = model_index.files[0], [] if sidecar is None else sidecar.tiers
    tiers = list(dict.fromkeys(_MADE_FOR.get(tier, tier) for tier in (*before, *asked) if tier is not None))
    if set(tiers) <= set(before) or not all(map(_can_be_made, tiers)):
        return ""
    convert, others = ["moeoff", "convert", model], ["--force"] if sidecar is not None else []
    if types := [tier for tier in tiers if tier != BITS]:
        others = ["--tiers", ",".join(types), *others]
    if BITS not in tiers:
        return f"; {shlex.join([*convert, *others])} makes one"
    plan = model.removesuffix(".gguf") + ".bits.json"
    return f"; {shlex.join(['moeoff', 'calibrate', '-m', model, '--bits-plan'])}, and then {shlex.join([*convert, '--bits', plan, *others])} make one"


def _can_be_made(tier: str) -> bool:
    with contextlib.suppress(ModelError):
        return tier in (ORIGINAL, AUTO, BITS) or type_from_name(tier) >= 0
    return False


def relative_bytes(model_index: ModelIndex, sidecar: Sidecar, tier: str) -> float:
    """Bytes of the experts in a tier, over those of the model's own."""
    name = sidecar.tier(tier) or tier
    return sum(s.nbytes for span in model_index.experts.values() for s in sidecar.sources(span, name)) / model_index.expert_bytes


def low_cost(model_index: ModelIndex) -> float | None:
    """`relative_bytes` of the smallest lower tier of a model's sidecar, at its default path; None without one. Raises `ModelError` as `ExpertSource.make`."""
    sidecar = ExpertSource.make(model_index).sidecar
    lowest = sidecar.tier(LOWEST) if sidecar else None
    return relative_bytes(model_index, sidecar, lowest) if sidecar and lowest else None
