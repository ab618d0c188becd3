"""Tiers of a sidecar: the ggml type of each expert."""

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

# types of tier "auto"; others stay
_LOWER_TYPES = {
    **dict.fromkeys("F32 F16 BF16".split(), "Q4_K"),
    **dict.fromkeys("Q8_0".split(), "Q4_0"),
    **dict.fromkeys("Q6_K Q5_K Q5_0 Q5_1".split(), "Q3_K"),
    **dict.fromkeys("Q4_K Q4_0 Q4_1 IQ4_NL IQ4_XS MXFP4 NVFP4 Q3_K IQ3_S IQ3_XXS".split(), "Q2_K"),
}
# types whose blocks fit every model's rows, of equal sizes the more accurate one first
_SHORT_BLOCKS = ("Q2_0", "IQ4_NL", "Q4_0", "Q5_0", "Q5_1", "Q8_0", "F16")


def bits_per_weight(type: int) -> float:
    """Return the bits per weight of a type; blocks of every type divide 256."""
    return row_bytes(type, 256) * 8 / 256


def nearest(type: int, n_cols: int) -> int:
    """Return the type, or the nearest in bits whose blocks fit rows of n_cols."""
    if fits(type, n_cols):
        return type
    able = [t for t in map(type_from_name, _SHORT_BLOCKS) if fits(t, n_cols)]
    return min(able, key=lambda t: abs(math.log(bits_per_weight(t) / bits_per_weight(type))))


def lower_type(type: int) -> int:
    """Return the type of tier "auto" for experts of this type."""
    name = _LOWER_TYPES.get(type_name(type))
    return type_from_name(name) if name else type


@dataclass(frozen=True)
class Tier:
    """A tier to make.

    Attributes:
        name: "original", "auto", "bits", or a type's name.
        plan: Types of "bits" by (layer or None, expert or None); None: the source's.
    """

    name: str
    plan: dict[tuple[int | None, int | None], int | None] = field(default_factory=dict)

    @classmethod
    def parse(cls, names: str) -> list[Tier]:
        """Parse tiers such as "original,Q2_K", or raise OptionError."""
        tiers = []
        for name in map(str.strip, names.split(",")):
            if name.lower() in (ORIGINAL, AUTO):
                name = name.lower()
            else:
                try:
                    name = type_name(type_from_name(name))
                except ModelError as error:
                    raise OptionError(
                        f"no tier {name!r}: give original, auto, or a ggml type ({error})"
                    ) from None
            tiers.append(cls(name))
        if len({tier.name for tier in tiers}) != len(tiers):
            raise OptionError(f"a tier is given twice: {','.join(tier.name for tier in tiers)}")
        return tiers

    def requested(self, span: TensorSpan, expert: int) -> int:
        """Return the requested type, even if its blocks do not fit the rows."""
        if self.name == ORIGINAL:
            return span.type
        if self.name == AUTO:
            return lower_type(span.type)
        if self.name != BITS:
            return type_from_name(self.name)
        where = parse_tensor_name(span.name)
        keys = (
            [(where.layer, None), (None, None)]
            if where.chunk
            else [(where.layer, expert), (where.layer, None), (None, None)]
        )
        type = next((self.plan[key] for key in keys if key in self.plan), None)
        return span.type if type is None else type

    def type(self, span: TensorSpan, expert: int) -> int:
        """Return an expert's type; experts of the source's type are copied."""
        type = nearest(self.requested(span, expert), span.shape[0])
        # "auto" only makes experts smaller
        return (
            span.type
            if self.name == AUTO and bits_per_weight(type) >= bits_per_weight(span.type)
            else type
        )


def read_plan(path: str | os.PathLike[str], experts: dict[str, TensorSpan]) -> Tier:
    """Read a plan: {"default": TYPE, "layers": {LAYER: TYPE or {EXPERT: TYPE}}}.

    TYPE is a ggml type or "original", the default. A layer's EXPERT may be "default",
    the type of its other experts and of its chunk experts (grovemoe).

    Returns:
        The tier "bits".

    Raises:
        OptionError: The plan is unreadable, malformed, or for another model.
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
    if (
        not isinstance(data, dict)
        or not isinstance(data.get("layers", {}), dict)
        or set(data) - {"default", "layers"}
    ):
        fail('expected {"default": TYPE, "layers": {LAYER: TYPE or {EXPERT: TYPE}}}')
    counts = {
        str(role.layer): span.shape[2]
        for span in experts.values()
        if not (role := parse_tensor_name(span.name)).chunk
    }
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
