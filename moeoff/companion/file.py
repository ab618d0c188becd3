"""A companion: the file beside a model in which every expert lies by itself, in one or more precisions.

Knows the file's format (docs/reference/companion.md) and which model it was made of; knows nothing of how it was made. The header
carries its own hash, so that what is read from it is what was written, or nothing.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import ModelError, Remedy
from ..gguf.file import ModelFile, unpack
from ..gguf.layout import Layout, TensorSpan
from ..gguf.model_bytes import ModelBytes
from ..gguf.quantize import row_bytes
from ..gguf.split_name import model_stem
from .hashing import hash64

__all__ = [
    "ALIGNMENT",
    "FORMAT_VERSION",
    "KEEP",
    "Companion",
    "Slice",
    "companion_path",
    "parse_slice_name",
    "seal",
    "slice_name",
    "source_sample",
]

FORMAT_VERSION = 1
ALIGNMENT = 4096  # of every slice: a direct read takes whole pages
KEEP = "keep"  # the tier that holds the source's own bytes
_SEAL = b"moeoff.header_hash"
_NAME = re.compile(r"(?P<tensor>.+)\.(?P<expert>\d+)\.(?P<tier>[^.]+)")
_SAMPLE = 4096


def companion_path(model: str | os.PathLike[str]) -> str:
    """Where a model's companion is looked for, and made by default: MODEL.experts.gguf, without the number of a first part."""
    return model_stem(model) + ".experts.gguf"


def slice_name(tensor: str, expert: int, tier: str) -> str:
    """The name of a slice in the companion."""
    return f"{tensor}.{expert}.{tier}"


def parse_slice_name(name: str) -> tuple[str, int, str] | None:
    """The model's tensor, the expert and the tier of `slice_name`; None for another name."""
    match = _NAME.fullmatch(name)
    return (match["tensor"], int(match["expert"]), match["tier"]) if match else None


def source_sample(layout: Layout) -> int:
    """A hash of what identifies a model's experts at the price of a few small reads.

    Takes every expert tensor's name, type and shape, and 4 KiB from the beginning of two experts of each: another model, or
    the same one trained further or quantized anew, differs everywhere.

    Raises:
        ModelError: the model cannot be read.
    """
    parts: list[bytes | memoryview] = []
    with ModelBytes(layout.files) as files:
        for i, span in enumerate(sorted(layout.experts.values(), key=lambda span: span.name)):
            parts.append(f"{span.name} {span.type} {span.shape};".encode())
            n_expert, nbytes = span.shape[2], span.nbytes // span.shape[2]
            for expert in (i % n_expert, (7 * i + 3) % n_expert):
                n = min(_SAMPLE, nbytes)
                parts.append(files.read(span.file, span.offset + expert * nbytes, n, span.name))
    return hash64(b"".join(parts))


def seal(header: bytes) -> bytes:
    """The header with its own hash, taken with zeros in the hash's place. `moeoff.header_hash` must be the last key."""
    at = _seal_offset(header)
    blank = header[:at] + bytes(8) + header[at + 8 :]
    return header[:at] + struct.pack("<Q", hash64(blank)) + header[at + 8 :]


def _seal_offset(header: bytes) -> int:
    at = header.rfind(struct.pack("<Q", len(_SEAL)) + _SEAL)
    return -1 if at < 0 else at + 8 + len(_SEAL) + 4


@dataclass(frozen=True)
class Slice:
    """One matrix of one expert in one tier: `nbytes` at `offset` of the companion, of ggml type `type`."""

    offset: int
    nbytes: int
    type: int
    shape: tuple[int, int]  # rows, row length
    hash: int


class Companion:
    """A companion's header.

    Attributes:
        path: of the file.
        tiers: their names, in the file's order.
        slices: by (name of the model's tensor, expert, tier).
        source_name, source_bytes: of the model: file name (first part), bytes of its routed experts.
        source_hashes: of the model's own slices, by (tensor, expert).
        quantized: how it was made, in words.
        identity: hash of the header, in which all slices' hashes are.
    """

    def __init__(self, path: str | os.PathLike[str]):
        """Reads the header.

        Raises:
            ModelError: missing, not a companion, damaged, or of a later format.
        """
        self.path = os.fspath(path)
        with ModelFile(path) as file:
            version = self._get(file, "moeoff.format_version", int)
            if version != FORMAT_VERSION:
                raise ModelError(f"{self.path}: companion format {version}, this moeoff reads {FORMAT_VERSION}: convert the model again")
            if seal(header := file.header()) != header:
                raise ModelError(f"{self.path}: the companion's header is damaged: convert the model again")
            self.tiers: list[str] = self._get(file, "moeoff.companion.tiers", list)
            self.source_name: str = self._get(file, "moeoff.source.name", str)
            self.source_bytes: int = self._get(file, "moeoff.source.size", int)
            self.quantized: str = self._get(file, "moeoff.quantized", str)
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
        raw = file.metadata.get(key)
        value = None
        if raw is not None:
            try:
                value = unpack(raw)
            except (struct.error, ValueError, KeyError):  # ValueError: too short for its array, or not UTF-8
                value = None
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ModelError(f"{self.path}: not a companion of a model, or damaged: {key} is missing")
        return value

    def check_belongs(self, layout: Layout) -> None:
        """Raises `ModelError` unless the companion was made of this model, as it is now."""
        if source_sample(layout) != self._sample:
            raise ModelError(f"{self.path}: made of another {self.source_name}, or {layout.files[0]} has changed since", Remedy.CONVERT_AGAIN)

    def tier(self, name: str) -> str | None:
        """A tier by its name in any case; None: there is no such."""
        return next((tier for tier in self.tiers if tier.lower() == name.lower()), None)

    def sources(self, span: TensorSpan, tier: str) -> Iterator[Slice]:
        """The slices of one of the model's tensors in a tier, by expert.

        Raises:
            ModelError: one is missing or has another shape.
        """
        for expert in range(span.shape[2]):
            found = self.slices.get((span.name, expert, tier))
            if found is None or found.shape != (span.shape[1], span.shape[0]) or found.nbytes != span.shape[1] * row_bytes(found.type, span.shape[0]):
                raise ModelError(f"{self.path}: no expert {expert} of {span.name} in tier {tier}: convert the model again")
            yield found
