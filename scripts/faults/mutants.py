"""Damaged files from a seed: any bytes, and GGUF headers of which one field says something else."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from moeoff.gguf.file import ModelFile, header_bytes, pack, pack_array, unpack

__all__ = ["MARK", "Field", "Mutant", "fields", "mutate", "mutate_header", "named_mutants"]

NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
EXTREME = [0, 1, 2, 3, 31, 33, 64, 127, 255, 256, 512, 513, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1]
FLOATS = [0.0, -1.0, 1e-45, 1e30, float("nan"), float("inf"), float("-inf")]
TYPES = [*range(42), 255, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]  # ggml's, F64 (28) among them, and none
TEMPLATES = ["{% if", "{{ 1 / 0 }}", "{{ messages[0].nothing.at.all }}", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
             "{{ 'x'.center(10 ** 12) }}", "{{ 10 ** (10 ** 10) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% include '/etc/passwd' %}",
             "{{ raise_exception('no') }}", "\udcff\udcfe{{ messages }}", "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
             "{{" + "[" * 100000 + "]" * 100000 + "}}", "{{ 1 is divisibleby 0 }}",
             "{% set a = namespace() %}{% set a.x = a %}{{ a|tojson }}", "{% set a = [] %}{% set _ = a.append(a) %}{{ a }}"]  # fmt: skip
LATER = [*TEMPLATES[-3:], "{{ 'x' * 99999999999 }}", "{{ 'hello world ' * 3000000 }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"]
TEMPLATES += [f"{{% if messages[-1].content == 'now' %}}{what}{{% endif %}}ok" for what in LATER]  # not in an ordinary conversation


MARK = "a-template-was-here"  # a file in the working folder that a template would make if it could run code
CODE = ["{{ cycler.__init__.__globals__.os.popen('touch %s').read() }}", "{{ lipsum.__globals__['os'].system('touch %s') }}",
        "{%% for c in ().__class__.__base__.__subclasses__() %%}{%% if c.__name__ == 'Popen' %%}{{ c(['touch', '%s']) }}{%% endif %%}{%% endfor %%}",
        "{{ self._TemplateReference__context.environment.compile_expression.__globals__['__builtins__']['open']('%s', 'w') }}"]  # fmt: skip
STRING_BYTES = 8 << 20  # of a huge string: more would count as memory of each child, which begins as a copy of its parent


class Field(NamedTuple):
    """A field of a header: where it is, and of which kind."""

    at: int
    size: int
    kind: str  # count, length, type, value:FORMAT, text, n_dims, dim, ggml_type, offset
    name: str  # of the key or tensor


@dataclass(frozen=True)
class Mutant:
    """What is done to a file: bytes [at, at + n_removed) of its header become `data`, and what follows it becomes `rest`, if that is given."""

    at: int
    n_removed: int
    data: bytes
    what: str
    rest: bytes | None = None

    def apply(self, whole: bytes) -> bytes:
        return whole[: self.at] + self.data + whole[self.at + self.n_removed :]


def fields(header: bytes) -> list[Field]:
    """Every field of a whole GGUF header; of an array's elements the first three."""
    return list(_walk(header))


def _walk(data: bytes) -> Iterator[Field]:
    n_tensors, n_values = struct.unpack_from("<QQ", data, 8)
    yield from (Field(4, 4, "count", "version"), Field(8, 8, "count", "tensors"), Field(16, 8, "count", "values"))
    at = 24

    def string(at: int) -> tuple[str, int]:
        (n,) = struct.unpack_from("<Q", data, at)
        return data[at + 8 : at + 8 + n].decode("utf-8", "replace"), at + 8 + n

    for _ in range(n_values):
        key, end = string(at)
        yield from (Field(at, 8, "length", key), Field(at + 8, end - at - 8, "text", key))
        (code,) = struct.unpack_from("<I", data, end)
        yield Field(end, 4, "type", key)
        at, n = end + 4, 1
        if code == ARRAY:
            code, n = struct.unpack_from("<IQ", data, at)
            yield from (Field(at, 4, "type", key), Field(at + 4, 8, "count", key))
            at += 12
        for i in range(n):
            if code == STRING:
                _, end = string(at)
                if i < 3:
                    yield from (Field(at, 8, "length", key), Field(at + 8, end - at - 8, "text", key))
                at = end
            else:
                form = NUMBERS[code]
                if i < 3:
                    yield Field(at, struct.calcsize(form), f"value:{form}", key)
                at += struct.calcsize(form)
    for _ in range(n_tensors):
        name, end = string(at)
        yield from (Field(at, 8, "length", name), Field(at + 8, end - at - 8, "text", name), Field(end, 4, "n_dims", name))
        (n_dims,) = struct.unpack_from("<I", data, end)
        at = end + 4
        for _ in range(n_dims):
            yield Field(at, 8, "dim", name)
            at += 8
        yield from (Field(at, 4, "ggml_type", name), Field(at + 4, 8, "offset", name))
        at += 12


def named_mutants(path: str) -> Iterator[Mutant]:
    """What has ended processes elsewhere, each by itself: counts of layers, layers for drafts, tensors that overlap, F64, huge strings, templates."""
    with ModelFile(path) as model:
        header, metadata, tensors, alignment = model.header(), model.metadata, list(model.tensors.values()), 32
        data = {tensor.name: model.data(tensor.name).tobytes() for tensor in tensors}
    arch = unpack(metadata["general.architecture"])
    places = {(field.kind, field.name): field for field in fields(header)}
    n_layer, routers = unpack(metadata[f"{arch}.block_count"]), [t.name for t in tensors if t.name.endswith("ffn_gate_inp.weight")]

    def with_values(what: str, **values: bytes) -> Mutant:
        return Mutant(0, len(header), header_bytes(metadata | {key.replace("__", "."): raw for key, raw in values.items()}, tensors, alignment), what)

    def with_type(what: str, names: list[str], number: int, form: str) -> Mutant:
        changed = [replace(t, type=number) if t.name in names else t for t in tensors]
        whole = [np.frombuffer(data[t.name], "<f4").astype(form).tobytes() if t.name in names else data[t.name] for t in tensors]
        return Mutant(0, len(header), header_bytes(metadata, changed, alignment), what, b"".join(part + bytes(-len(part) % alignment) for part in whole))

    for n in (0, 1, n_layer - 1, n_layer + 1, 512, 513, 1 << 31, (1 << 32) - 1):
        yield with_values(f"{n} layers", **{f"{arch}.block_count": pack(n)})
    for n in (1, n_layer - 1, n_layer, n_layer + 1, 1 << 31, (1 << 32) - 1):
        yield with_values(f"{n} layers for drafts", **{f"{arch}.nextn_predict_layers": pack(n)})
    yield with_values("a layer for drafts behind the last", **{f"{arch}.block_count": pack(n_layer + 1), f"{arch}.nextn_predict_layers": pack(1)})
    for name in ("blk.0.ffn_up_exps.weight", "output.weight", "blk.0.attn_norm.weight"):
        field = places["offset", name]
        (offset,) = struct.unpack_from("<Q", header, field.at)
        for other in (0, offset - 32, offset + 32, offset // 2 // 32 * 32):
            yield Mutant(field.at, field.size, struct.pack("<Q", other), f"{name} overlaps another")
    yield with_type("an F64 router", routers[:1], 28, "<f8")
    yield with_type("F64 routers", routers, 28, "<f8")
    yield with_type("F16 routers", routers, 1, "<f2")
    yield with_type("an F64 norm", ["output_norm.weight"], 28, "<f8")
    tokens, huge = unpack(metadata["tokenizer.ggml.tokens"]), "x" * STRING_BYTES
    yield with_values("a huge name", general__name=pack(huge))
    yield with_values("a huge architecture", general__architecture=pack(huge))
    yield with_values("a huge chat template", tokenizer__chat_template=pack(huge))
    yield with_values("a huge token", tokenizer__ggml__tokens=pack_array([*tokens[:-1], huge]))
    yield with_values("a huge merge", tokenizer__ggml__merges=pack_array(["a " + huge]))
    yield with_values("a huge key", **{huge: pack(1)})
    yield Mutant(0, len(header), header_bytes(metadata, [replace(tensors[0], name=huge), *tensors[1:]], alignment), "a huge tensor name")
    for template in (*TEMPLATES, *(code % MARK for code in CODE)):
        raw = template.encode("utf-8", "surrogateescape")
        yield with_values(f"chat template {template[:60]!r}", tokenizer__chat_template=struct.pack("<IQ", STRING, len(raw)) + raw)


def mutate_header(header: bytes, places: list[Field], rng: random.Random) -> Mutant:
    """One field that says something else, of metadata more often than of the many tensors; or any bytes."""
    if rng.random() < 0.1:
        at = rng.randrange(4, len(header))
        data = rng.choice((rng.randbytes(rng.choice((1, 4, 8))), b"\x00" * 8, b"\xff" * 8))[: len(header) - at]
        return Mutant(at, len(data), data, "bytes")
    field = rng.choice(places)
    while field.name.startswith("blk.") and rng.random() < 0.7:
        field = rng.choice(places)
    if field.kind == "text":
        old = header[field.at : field.at + field.size]
        if "chat_template" in field.name and not old.endswith(b"chat_template"):
            new = rng.choice(TEMPLATES).encode("utf-8", "surrogateescape")
        else:
            new = rng.choice(
                (b"", b"\xff\xfe", b"\x00", old[::-1], old + b"x", b"x" * rng.choice((1, 63, 64, 70000)), rng.randbytes(max(len(old), 1)), b"general.alignment")
            )
        if rng.random() < 0.5:  # in its place, else with its length
            return Mutant(field.at, len(new), new, f"text of {field.name!r}") if field.at + len(new) <= len(header) else Mutant(field.at, 0, b"", "nothing")
        return Mutant(field.at - 8, field.size + 8, struct.pack("<Q", len(new)) + new, f"text of {field.name!r}")
    form = {"count": "I" if field.size == 4 else "Q", "length": "Q", "type": "I", "n_dims": "I", "dim": "Q", "ggml_type": "I", "offset": "Q"}.get(
        field.kind
    ) or field.kind[6:]
    if form in "fd":
        data = struct.pack("<" + form, rng.choice(FLOATS) if form == "d" else rng.choice([f for f in FLOATS]))
    elif form == "?":
        data = bytes([rng.choice((0, 1, 2, 255))])
    else:
        value = (
            rng.choice(TYPES)
            if field.kind == "ggml_type"
            else rng.randrange(14)
            if field.kind == "type" and rng.random() < 0.8
            else _near(header, field, form, rng)
        )
        data = struct.pack("<" + form.upper(), value & ((1 << 8 * field.size) - 1))
    return Mutant(field.at, field.size, data, f"{field.kind} of {field.name!r}")


def _near(header: bytes, field: Field, form: str, rng: random.Random) -> int:
    """An extreme number, or one near what is there."""
    old = int.from_bytes(header[field.at : field.at + field.size], "little")
    return rng.choice(EXTREME) if rng.random() < 0.7 else max(old + rng.choice((-32, -1, 1, 2, 32)), 0) if rng.random() < 0.7 else old * 2


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A flipped bit, noise, zeros, an extreme number, bytes cut out or put in, the end cut off; half of it in the first 3000 bytes."""
    at = rng.randrange(min(len(data), 3000)) if rng.random() < 0.5 else rng.randrange(len(data))
    kind = rng.randrange(7)
    if kind == 0:
        return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
    if kind == 1:
        return data[:at] + rng.randbytes(8) + data[at + 8 :]
    if kind == 2:
        return data[:at]
    if kind == 3:
        return data[:at] + data[at + rng.randrange(1, 5000) :]
    if kind == 4:
        return data[:at] + rng.randbytes(rng.randrange(1, 100)) + data[at:]
    if kind == 5:
        value = rng.choice([0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1])
        return data[:at] + struct.pack("<Q", value) + data[at + 8 :]
    end = min(at + rng.randrange(1, 5000), len(data))
    return data[:at] + bytes(end - at) + data[end:]
