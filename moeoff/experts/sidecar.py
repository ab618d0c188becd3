"""A model's sidecar (experts in other precisions), and the source of a run's experts.

docs/reference/sidecar.md describes the format. The header contains its own hash, so
that a damaged header is never used.
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
from ..system.memory import MIB

FORMAT_VERSION = 2
ALIGNMENT = 4096  # bytes, of every slice, as direct I/O reads whole pages
ORIGINAL = "original"  # tier of the model's own bytes
AUTO, BITS = "auto", "bits"  # tiers of mixed types: by source type, by plan
_TYPES = {LOWEST: "Q2_K", INT4: "Q4_0"}  # types to suggest
_SEAL = b"moeoff.header_hash"
_NAME = re.compile(r"(?P<tensor>.+)\.(?P<expert>\d+)\.(?P<tier>[^.]+)")
_SAMPLE = 4096  # bytes
MOST_TIERS = 16
MOST_SLICES = 1 << 19  # without a model; the largest models have 70,000 per tier


Data = bytes | bytearray | memoryview | np.ndarray
_PIECE = 4 * MIB  # bytes per read


def hash64(data: Data, seed: int = 0) -> int:
    """Return chained XXH64 of a contiguous buffer: each MiB is seeded with the last."""
    array = np.frombuffer(data, np.uint8)
    return int(native.hash64(array.ctypes.data_as(ctypes.c_void_p), array.nbytes, seed))


class Hasher:
    """An incremental hash64 of pieces of any size."""

    def __init__(self) -> None:
        self._value, self._rest = 0, b""

    def update(self, data: Data) -> None:
        data = memoryview(data).cast("B")  # type: ignore[arg-type]  # ndarray, before 3.12
        if self._rest:
            data = memoryview(self._rest + bytes(data))
        whole = len(data) // MIB * MIB
        self._value = hash64(data[:whole], self._value) if whole else self._value
        self._rest = bytes(data[whole:])

    def value(self) -> int:
        return hash64(self._rest, self._value) if self._rest else self._value


def hash_range(files: ModelBytes, file: int, offset: int, nbytes: int, what: str) -> int:
    """Return hash64 of a range. Raise ModelError as `ModelBytes.read`."""
    hasher = Hasher()
    for start in range(0, nbytes, _PIECE):
        hasher.update(files.read(file, offset + start, min(_PIECE, nbytes - start), what))
    return hasher.value()


def sidecar_path(model: str | os.PathLike[str]) -> str:
    """Return the default path, MODEL.experts.gguf without a first part's number."""
    return model_stem(model) + ".experts.gguf"


def slice_name(tensor: str, expert: int, tier: str) -> str:
    return f"{tensor}.{expert}.{tier}"


def parse_slice_name(name: str) -> tuple[str, int, str] | None:
    """Return tensor, expert and tier of a slice's name, None for other names."""
    match = _NAME.fullmatch(name)
    return (match["tensor"], int(match["expert"]), match["tier"]) if match else None


def source_sample(model_index: ModelIndex) -> int:
    """Return a hash that identifies a model's experts with few reads.

    Covers each expert tensor's name, type and shape, and 4 KiB from the start of two of
    its experts, which differ after training or quantization.

    Raises:
        ModelError: The model cannot be read.
    """
    parts: list[bytes | memoryview] = []
    with ModelBytes(model_index.files) as files:
        for i, span in enumerate(sorted(model_index.experts.values(), key=lambda span: span.name)):
            parts.append(f"{span.name} {span.type} {span.shape};".encode())
            for expert in (i % span.shape[2], (7 * i + 3) % span.shape[2]):
                parts.append(
                    files.read(
                        span.file,
                        span.offset + expert * span.slice_bytes,
                        min(_SAMPLE, span.slice_bytes),
                        span.name,
                    )
                )
    return hash64(b"".join(parts))


def seal(header: bytes) -> bytes:
    """Return a header with its hash, computed with zeros in the place of the hash."""
    key = struct.pack("<Q", len(_SEAL)) + _SEAL
    begin = header.rfind(key) + len(key) + 4  # 4 bytes of type follow the key
    before, after = header[:begin], header[begin + 8 :]
    return before + struct.pack("<Q", hash64(before + bytes(8) + after)) + after


@dataclass(frozen=True)
class Slice:
    """A matrix of one expert in one tier: `nbytes` at `offset`, of ggml type `type`."""

    offset: int
    nbytes: int
    type: int
    shape: tuple[int, int]  # rows, row length
    hash: int


class Sidecar:
    """A sidecar's header.

    Attributes:
        tiers: Names of tiers in the file's order.
        slices: Slices by (tensor name, expert, tier).
        source_name: File name of the model, of its first part if it is split.
        source_hashes: Hashes of the model's own slices by (tensor name, expert).
        identity: Hash of the header, which contains the hashes of all slices.
    """

    def __init__(self, path: str | os.PathLike[str], most: int = MOST_SLICES):
        """Read the header.

        Args:
            most: Maximum number of slices.

        Raises:
            ModelError: The file is missing, damaged, of another format, or no sidecar.
        """
        self.path = os.fspath(path)
        with ModelFile(path, max_tensors=most) as file:
            self.state = file.state
            version = self._get(file, "moeoff.format_version", int)
            if version != FORMAT_VERSION:
                raise self._invalid(f"expected sidecar format {FORMAT_VERSION}, got {version}")
            if seal(header := file.header()) != header:
                raise self._invalid("the sidecar's header is damaged")
            self.tiers: list[str] = self._get(file, "moeoff.sidecar.tiers", list)
            self.source_name: str = self._get(file, "moeoff.source.name", str)
            self.identity: int = self._get(file, _SEAL.decode(), int)
            self._sample: int = self._get(file, "moeoff.source.sample", int)
            hashes = self._get(file, "moeoff.hashes", np.ndarray).tolist()
            source_hashes = self._get(file, "moeoff.source.hashes", np.ndarray).tolist()
            if len(hashes) != len(file.tensors):
                raise self._invalid(f"{len(hashes)} hashes for {len(file.tensors)} slices")
            self.slices: dict[tuple[str, int, str], Slice] = {}
            for (name, tensor), value in zip(file.tensors.items(), hashes):
                key = parse_slice_name(name)
                if key is None or key[2] not in self.tiers or len(tensor.shape) != 2:
                    raise self._invalid(f"{name} is no slice of an expert")
                self.slices[key] = Slice(
                    file.offset(name), tensor.n_bytes, tensor.type, tensor.shape, value
                )
            self.source_hashes = dict(
                zip(dict.fromkeys(key[:2] for key in self.slices), source_hashes)
            )

    def _invalid(self, what: str) -> ModelError:
        return ModelError(f"{self.path}: {what}: convert the model again")

    def _get(self, file: ModelFile, key: str, kind: type) -> Any:
        try:
            value = unpack(file.metadata[key])
        except (struct.error, ValueError, KeyError):  # ValueError: truncated array
            value = None
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ModelError(f"{self.path}: not a sidecar of a model, or damaged: {key} is missing")
        return value

    def check_belongs(self, model_index: ModelIndex) -> None:
        """Check that the sidecar was made of this model, or raise ModelError."""
        if source_sample(model_index) != self._sample:
            why = f"made of another {self.source_name}, or {model_index.files[0]} has changed since"
            raise ModelError(f"{self.path}: {why}: convert it again", hint={"experts": "none"})

    def tier(self, name: str) -> str | None:
        """Return a tier by name in any case, LOWEST or INT4; None if it is absent."""
        lower = [tier for tier in self.tiers if tier != ORIGINAL]
        if name.lower() == LOWEST:
            return min(lower, key=self.bits, default=None)
        if name.lower() == INT4:
            return next((tier for tier in lower if 4 <= self.bits(tier) <= 5), None)
        return next((tier for tier in self.tiers if tier.lower() == name.lower()), None)

    def bits(self, tier: str) -> float:
        """Return the mean bits per weight of a tier."""
        slices = [s for (_, _, name), s in self.slices.items() if name == tier]
        return 8 * sum(s.nbytes for s in slices) / sum(math.prod(s.shape) for s in slices)

    def sources(self, span: TensorSpan, tier: str) -> Iterator[Slice]:
        """Yield a tensor's slices in a tier. Raise ModelError if one does not fit."""
        for expert in range(span.shape[2]):
            s = self.slices.get((span.name, expert, tier))
            if (
                s is None
                or s.shape != (span.shape[1], span.shape[0])
                or s.nbytes != span.shape[1] * row_bytes(s.type, span.shape[0])
            ):
                raise self._invalid(f"no expert {expert} of {span.name} in tier {tier}")
            yield s


class CompositeSidecar(Sidecar):
    """A sidecar whose only tier, "bits", is what `convert --bits` would make of a plan.

    Args:
        default: Tier of other experts, and of chunk experts.
        others: Tiers by (layer, expert).
    """

    def __init__(self, sidecar: Sidecar, default: str, others: Mapping[tuple[int, int], str]):
        self.__dict__.update(sidecar.__dict__)
        self._sidecar, self._default, self._others = sidecar, default, others
        self.tiers = [BITS]

    def sources(self, span: TensorSpan, tier: str) -> Iterator[Slice]:
        where = parse_tensor_name(span.name)
        chosen = [
            self._default if where.chunk else self._others.get((where.layer, e), self._default)
            for e in range(span.shape[2])
        ]
        by_tier = {name: list(self._sidecar.sources(span, name)) for name in set(chosen)}
        return (by_tier[name][expert] for expert, name in enumerate(chosen))


@dataclass(frozen=True)
class ExpertSource:
    """The file that experts are read from.

    Attributes:
        sidecar: Sidecar, None to read the model.
        tier: Tier of the sidecar; if it has no such tier, the model is read.
        verify: True to compare every read with its hash.
    """

    sidecar: Sidecar | None = None
    tier: str = ORIGINAL
    verify: bool = False

    @property
    def repacked(self) -> Sidecar | None:
        """The sidecar, if experts are read from it."""
        return (
            self.sidecar if self.sidecar is not None and self.tier in self.sidecar.tiers else None
        )

    def low(self, tier: str, model_index: ModelIndex) -> ExpertSource:
        """Return the source of low versions; this is the source of high ones.

        Raises:
            OptionError: There is no sidecar, or its tier is missing or already in use.
        """
        if tier == INT4 and self.tier == ORIGINAL and _has_int4(model_index):
            why = "has experts of about four bits already: no lower precision of four bits"
            raise OptionError(f"{model_index.files[0]}: {why}")
        if self.sidecar is None:
            advice = _advice(model_index, None, tier)
            raise OptionError(f"low precision ({tier}) needs a sidecar{advice}")
        name = self.sidecar.tier(tier)
        if name is None or name in (self.tier, ORIGINAL):
            others = (
                ", ".join(t for t in self.sidecar.tiers if t not in (self.tier, ORIGINAL)) or "none"
            )
            why = f"no tier {tier} below {self.tier}; there are: {others}"
            advice = _advice(model_index, self.sidecar, tier)
            raise OptionError(f"{self.sidecar.path}: {why}{advice}")
        return ExpertSource(self.sidecar, name, self.verify)

    @classmethod
    def make(
        cls,
        model_index: ModelIndex,
        experts: Sidecar | str | os.PathLike[str] | bool = "auto",
        tier: str | None = None,
        verify: bool = False,
        low_tier: str | None = None,
    ) -> ExpertSource:
        """Find the sidecar and check that it belongs to the model.

        Args:
            experts: Sidecar, path, "auto" for the default path if it exists, or False.
            tier: Tier of the sidecar. Default: original, from either file; also for
                INT4 if the model has four bits.
            low_tier: Tier of low versions, which error messages mention.

        Raises:
            ModelError: The sidecar is missing, damaged, or of another model.
            OptionError: The sidecar or its tier is required and missing.
        """
        automatic = experts is True or experts == "auto"
        tier = ORIGINAL if tier == INT4 and _has_int4(model_index) else tier
        default = sidecar_path(model_index.files[0])
        chosen = experts if not automatic else default if os.path.exists(default) else None
        if isinstance(chosen, bool) or not chosen:
            if tier not in (None, ORIGINAL) or verify:
                what, tier = (
                    ("`verify_reads`", ORIGINAL)
                    if tier in (None, ORIGINAL)
                    else (f"tier {tier}", tier)
                )
                advice = _advice(model_index, None, tier, low_tier)
                raise OptionError(f"{what} needs a sidecar{advice}")
            return cls()
        sidecar = (
            chosen
            if isinstance(chosen, Sidecar)
            else Sidecar(
                chosen, MOST_TIERS * sum(span.shape[2] for span in model_index.experts.values())
            )
        )
        sidecar.check_belongs(model_index)
        if tier is None and not automatic and ORIGINAL not in sidecar.tiers:
            raise OptionError(
                f"{sidecar.path}: holds lower precision only", hint={"tier": sidecar.tiers[0]}
            )
        name = ORIGINAL if tier is None or tier.lower() == ORIGINAL else sidecar.tier(tier)
        if name is None:
            names = ", ".join(dict.fromkeys([*sidecar.tiers, ORIGINAL]))
            advice = _advice(model_index, sidecar, tier, low_tier)
            raise OptionError(f"{sidecar.path}: no tier {tier}; there are {names}{advice}")
        return cls(sidecar, name, verify)


def _has_int4(model_index: ModelIndex) -> bool:
    """Return True if the model's experts have at most five bits per weight."""
    return 8 * model_index.expert_bytes <= 5 * sum(
        math.prod(span.shape) for span in model_index.experts.values()
    )


def _advice(model_index: ModelIndex, sidecar: Sidecar | None, *asked: str | None) -> str:
    """Return advice on commands that add the tiers, empty if no command can."""
    model, before = model_index.files[0], [] if sidecar is None else sidecar.tiers
    named = [_TYPES.get(tier, tier) for tier in (*before, *asked) if tier is not None]
    tiers = list(dict.fromkeys(named))
    if set(tiers) <= set(before) or not all(map(_is_convertible, tiers)):
        return ""
    convert, others = ["moeoff", "convert", model], ["--force"] if sidecar is not None else []
    if types := [tier for tier in tiers if tier != BITS]:
        others = ["--tiers", ",".join(types), *others]
    if BITS not in tiers:
        return f"; {shlex.join([*convert, *others])} makes one"
    plan = model.removesuffix(".gguf") + ".bits.json"
    return (
        f"; {shlex.join(['moeoff', 'calibrate', '-m', model, '--bits-plan'])}, and then"
        f" {shlex.join([*convert, '--bits', plan, *others])} make one"
    )


def _is_convertible(tier: str) -> bool:
    with contextlib.suppress(ModelError):
        return tier in (ORIGINAL, AUTO, BITS) or type_from_name(tier) >= 0
    return False


def relative_bytes(model_index: ModelIndex, sidecar: Sidecar, tier: str) -> float:
    """Return the experts' bytes in a tier relative to their bytes in the model."""
    name = sidecar.tier(tier) or tier
    return (
        sum(s.nbytes for span in model_index.experts.values() for s in sidecar.sources(span, name))
        / model_index.expert_bytes
    )


def low_cost(model_index: ModelIndex) -> float | None:
    """Return `relative_bytes` of the default sidecar's lowest tier, if any."""
    sidecar = ExpertSource.make(model_index).sidecar
    lowest = sidecar.tier(LOWEST) if sidecar else None
    return relative_bytes(model_index, sidecar, lowest) if sidecar and lowest else None
