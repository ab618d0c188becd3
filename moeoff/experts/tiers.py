"""Tiers of a sidecar: the ggml type of each expert in each. Knows names, types and row lengths, no bytes."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass, field
from typing import NoReturn

from ..errors import ModelError, OptionError
from ..gguf.model_index import TensorSpan, parse_tensor_name
from ..gguf.quantize import fits, row_bytes, type_from_name, type_name
from ..system.files import read_file
from .sidecar import AUTO, BITS, ORIGINAL

_LONGEST_PLAN = 16 << 20  # bytes of JSON

# what tier "auto" makes of each; docs/reference/sidecar.md has the errors this rests on. What is not listed stays as it is
_LOWER_TYPES = {
    **dict.fromkeys(["F32", "F16", "BF16"], "Q4_K"),
    **dict.fromkeys(["Q8_0"], "Q4_0"),
    **dict.fromkeys(["Q6_K", "Q5_K", "Q5_0", "Q5_1"], "Q3_K"),
    **dict.fromkeys(["Q4_K", "Q4_0", "Q4_1", "IQ4_NL", "IQ4_XS", "MXFP4", "NVFP4"], "Q2_K"),
    **dict.fromkeys(["Q3_K", "IQ3_S", "IQ3_XXS"], "Q2_K"),
}
# in blocks short enough for every model's rows; among equals the first has the lower error
_SHORT_BLOCKS = ("Q2_0", "IQ4_NL", "Q4_0", "Q5_0", "Q5_1", "Q8_0", "F16")


def bits_per_weight(type: int) -> float:
    """Bits for each weight of a type; blocks of every type divide 256."""
    return row_bytes(type, 256) * 8 / 256


def nearest(type: int, n_cols: int) -> int:
    """The type, or if it cannot hold rows of n_cols the one nearest to it in bits per weight that can."""
    if fits(type, n_cols):
        return type
    able = [t for t in map(type_from_name, _SHORT_BLOCKS) if fits(t, n_cols)]
    return min(able, key=lambda t: abs(math.log(bits_per_weight(t) / bits_per_weight(type))))


def lower_type(type: int) -> int:
    """The type that experts of this type get in tier "auto"; the type itself if there is none below."""
    name = _LOWER_TYPES.get(type_name(type))
    return type_from_name(name) if name else type


@dataclass(frozen=True)
class Tier:
    """A tier to make.

    Attributes:
        name: "original", "auto", "bits", or a type's name.
        plan: of "bits": types by (layer, expert), (layer, None) and (None, None); None stands for the source's type.
    """

    name: str
    plan: dict[tuple[int | None, int | None], int | None] = field(default_factory=dict)

    @classmethod
    def parse(cls, names: str) -> list[Tier]:
        """Tiers from "original,Q2_K". Raises OptionError for an unknown or repeated one."""
        tiers = []
        for name in map(str.strip, names.split(",")):
            if name.lower() in (ORIGINAL, AUTO):
                name = name.lower()
            else:
                try:
                    name = type_name(type_from_name(name))
                except ModelError as error:
                    raise OptionError(f"no tier {name!r}: give original, auto, or a ggml type ({error})") from None
            tiers.append(cls(name))
        if len({tier.name for tier in tiers}) != len(tiers):
            raise OptionError(f"a tier is given twice: {','.join(tier.name for tier in tiers)}")
        return tiers

    def requested(self, span: TensorSpan, expert: int) -> int:
        """The type asked for, whether its rows fit or not."""
        if self.name == ORIGINAL:
            return span.type
        if self.name == AUTO:
            return lower_type(span.type)
        if self.name != BITS:
            return type_from_name(self.name)
        where = parse_tensor_name(span.name)
        keys = [(where.layer, None), (None, None)] if where.chunk else [(where.layer, expert), (where.layer, None), (None, None)]
        type = next((self.plan[key] for key in keys if key in self.plan), None)
        return span.type if type is None else type

    def type(self, span: TensorSpan, expert: int) -> int:
        """The type that the expert gets; where it is the source's the bytes are copied."""
        type = nearest(self.requested(span, expert), span.shape[0])
        # in tier "auto" nobody asked for the type by name: one that is no smaller is not made
        return span.type if self.name == AUTO and bits_per_weight(type) >= bits_per_weight(span.type) else type


def read_plan(path: str | os.PathLike[str], experts: dict[str, TensorSpan]) -> Tier:
    """The tier "bits" of a plan: {"default": TYPE, "layers": {LAYER: TYPE or {"default": TYPE, EXPERT: TYPE, ...}, ...}}.

    TYPE is a ggml type or "original", which is also what an expert gets that the plan leaves out. Chunk experts (of grovemoe) take
    their layer's default.

    Raises:
        OptionError: unreadable, not of this form, or of layers and experts that the model does not have.
    """

    def fail(what: str) -> NoReturn:
        raise OptionError(f"{os.fspath(path)}: {what}")

    def type_of(value: object, where: str) -> int | None:
        if not isinstance(value, str):
            fail(f"{where}: expected the name of a type, found {value!r}")
        if value.lower() == ORIGINAL:
            return None
        try:
            return type_from_name(value)
        except ModelError as error:
            fail(f"{where}: {error}")

    try:
        data = json.loads(read_file(path, _LONGEST_PLAN))
    except OSError as error:
        fail(f"cannot be read: {error.strerror}")
    except (ValueError, RecursionError) as error:
        fail(f"not JSON: {error}")
    if not isinstance(data, dict) or not isinstance(data.get("layers", {}), dict) or set(data) - {"default", "layers"}:
        fail('expected {"default": TYPE, "layers": {LAYER: TYPE or {EXPERT: TYPE}}}')
    counts = {str(role.layer): span.shape[2] for span in experts.values() if not (role := parse_tensor_name(span.name)).chunk}
    plan: dict[tuple[int | None, int | None], int | None] = {}
    if "default" in data:
        plan[None, None] = type_of(data["default"], "default")
    for layer, value in data.get("layers", {}).items():
        if layer not in counts:
            fail(f"layer {layer!r} has no routed experts in this model")
        for expert, name in (value if isinstance(value, dict) else {"default": value}).items():
            where = f"layer {layer}, expert {expert}"
            if expert == "default":
                plan[int(layer), None] = type_of(name, where)
            elif expert in map(str, range(counts[layer])):
                plan[int(layer), int(expert)] = type_of(name, where)
            else:
                fail(f"{where}: the layer has experts 0 to {counts[layer] - 1}")
    return Tier(BITS, plan)
