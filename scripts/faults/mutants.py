"""Mutations of a file: of a header's fields, numbers, vocabulary and sizes; of any
bytes; of an archive's arrays, a value in JSON, a grammar's or a text's words.

Every mutator takes the intact content and a `random.Random`, and returns the damaged
content, the same for the same seed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import struct
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from common import PROMPT
from moeoff.gguf.file import ARRAY, FORMATS, MAGIC, STRING, ModelFile, unpack
from moeoff.gguf.writer import header_bytes

EXTREME = [
    0,
    1,
    2,
    3,
    31,
    33,
    64,
    127,
    255,
    256,
    512,
    513,
    1 << 16,
    (1 << 31) - 1,
    1 << 31,
    (1 << 32) - 1,
    1 << 32,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
]
FLOATS = [0.0, -1.0, 1e-45, 1e30, float("nan"), float("inf"), float("-inf")]
# ggml's, F64 (28) among them, and none
TYPES = [*range(42), 255, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
TEMPLATES = ["{% if", "{{ 1 / 0 }}", "{{ messages[0].nothing.at.all }}", "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
             "{{ 'x'.center(10 ** 12) }}", "{{ 10 ** (10 ** 10) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}", "{% include '/etc/passwd' %}",
             "{{ raise_exception('no') }}", "\udcff\udcfe{{ messages }}", "{{" + "(" * 5000 + "1" + ")" * 5000 + "}}",
             "{{" + "[" * 100000 + "]" * 100000 + "}}", "{{ 1 is divisibleby 0 }}",
             "{% set a = namespace() %}{% set a.x = a %}{{ a|tojson }}", "{% set a = [] %}{% set _ = a.append(a) %}{{ a }}"]  # fmt: skip
LATER = [
    *TEMPLATES[-3:],
    "{{ 'x' * 99999999999 }}",
    "{{ 'hello world ' * 3000000 }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
]
# not in an ordinary conversation
TEMPLATES += [f"{{% if messages[-1].content == 'now' %}}{what}{{% endif %}}ok" for what in LATER]


# a file in the working folder that a template would make if it could run code
MARK = "a-template-was-here"
CODE = ["{{ cycler.__init__.__globals__.os.popen('touch %s').read() }}", "{{ lipsum.__globals__['os'].system('touch %s') }}",
        "{%% for c in ().__class__.__base__.__subclasses__() %%}{%% if c.__name__ == 'Popen' %%}{{ c(['touch', '%s']) }}{%% endif %%}{%% endfor %%}",
        "{{ self._TemplateReference__context.environment.compile_expression.__globals__['__builtins__']['open']('%s', 'w') }}"]  # fmt: skip
# of a huge string: more would count as memory of each child, which begins as a copy of
# its parent
STRING_BYTES = 8 << 20


class Field(NamedTuple):
    """A field of a header: where it is, and of which kind."""

    at: int
    size: int
    kind: str  # count, length, type, value:FORMAT, text, n_dims, dim, ggml_type, offset
    name: str  # of the key or tensor


@dataclass(frozen=True)
class Mutant:
    """A change of a file: bytes [at, at + n_removed) of its header become `data`,
    `hole` zeros that take no space on the disk, and `tail`. The bytes after the header
    become `rest`, if that is given.
    """

    at: int
    n_removed: int
    data: bytes
    what: str
    rest: bytes | None = None
    hole: int = 0
    tail: bytes = b""

    def apply(self, header: bytes) -> bytes:
        """Return the changed header. The mutant must have no hole."""
        return header[: self.at] + self.data + self.tail + header[self.at + self.n_removed :]

    def write(self, path: Path, header: bytes, rest: bytes) -> None:
        with open(path, "wb") as file:
            file.write(header[: self.at] + self.data)
            file.seek(self.hole, os.SEEK_CUR)
            file.write(self.tail + header[self.at + self.n_removed :])
            file.write(rest if self.rest is None else self.rest)


def fields(header: bytes) -> list[Field]:
    """Every field of a whole GGUF header; of an array's elements the first three."""
    return list(_walk(header))


def _walk(data: bytes) -> Iterator[Field]:
    n_tensors, n_values = struct.unpack_from("<QQ", data, 8)
    yield from (
        Field(4, 4, "count", "version"),
        Field(8, 8, "count", "tensors"),
        Field(16, 8, "count", "values"),
    )
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
                    yield from (
                        Field(at, 8, "length", key),
                        Field(at + 8, end - at - 8, "text", key),
                    )
                at = end
            else:
                form = FORMATS[code]
                if i < 3:
                    yield Field(at, struct.calcsize(form), f"value:{form}", key)
                at += struct.calcsize(form)
    for _ in range(n_tensors):
        name, end = string(at)
        yield from (
            Field(at, 8, "length", name),
            Field(at + 8, end - at - 8, "text", name),
            Field(end, 4, "n_dims", name),
        )
        (n_dims,) = struct.unpack_from("<I", data, end)
        at = end + 4
        for _ in range(n_dims):
            yield Field(at, 8, "dim", name)
            at += 8
        yield from (Field(at, 4, "ggml_type", name), Field(at + 4, 8, "offset", name))
        at += 12


_CODES = {
    "u1": 0,
    "i1": 1,
    "u2": 2,
    "i2": 3,
    "u4": 4,
    "i4": 5,
    "f4": 6,
    "b1": 7,
    "u8": 10,
    "i8": 11,
    "f8": 12,
}


def packed(value: Any) -> bytes:
    """A value as a header has it: a bool, an int (as uint32), a float (as float32), a
    string, strings, or an array of numpy's.
    """
    if isinstance(value, np.ndarray):
        return struct.pack("<IIQ", ARRAY, _CODES[value.dtype.str[1:]], len(value)) + value.tobytes()
    if isinstance(value, (list, tuple)):
        return struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(_string, value))
    if isinstance(value, (str, bytes)):
        return struct.pack("<I", STRING) + _string(value)
    return (
        struct.pack("<I?", 7, value)
        if isinstance(value, bool)
        else (
            struct.pack("<If", 6, value)
            if isinstance(value, float)
            else struct.pack("<II", 4, value)
        )
    )


def _string(text: str | bytes) -> bytes:
    raw = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


class Header:
    """A GGUF's header in parts.

    Attributes:
        whole: its bytes.
        places: its fields.
        pairs: of each key the bytes of itself and its value.
        infos: the bytes of its tensors' names, shapes, types and places.
    """

    def __init__(self, whole: bytes):
        self.whole, self.places = whole, fields(whole)
        self._n_tensors, n_values = struct.unpack_from("<QQ", whole, 8)
        starts: dict[str, int] = {}
        for field in self.places:
            if field.kind == "length":
                starts.setdefault(field.name, field.at)
        end = max(
            (field.at + field.size for field in self.places if field.kind == "offset"),
            default=len(whole),
        )
        ends = [*list(starts.values())[1:], end]
        spans = [(name, whole[start:end]) for (name, start), end in zip(starts.items(), ends)]
        self.pairs, self.infos = (
            dict(spans[:n_values]),
            b"".join(raw for _, raw in spans[n_values:]),
        )

    def value(self, key: str) -> Any:
        return unpack(self.pairs[key][8 + len(key.encode()) :])

    def mutant(
        self, what: str, changes: Mapping[str, bytes | None], first: bytes = b"", hole: int = 0
    ) -> Mutant:
        """With these values instead, and without those that are None.

        Args:
            first: a pair that comes before the others, and ends with a hole.
        """
        pairs = self.pairs | {
            key: None if value is None else _string(key) + value for key, value in changes.items()
        }
        left = [pair for pair in pairs.values() if pair is not None]
        head = MAGIC + struct.pack("<IQQ", 3, self._n_tensors, len(left) + bool(first)) + first
        tail = b"".join(left) + self.infos
        return Mutant(
            0,
            len(self.whole),
            head,
            what,
            hole=hole,
            tail=tail + bytes(-(len(head) + hole + len(tail)) % 32),
        )

    def with_string(self, key: str, n: int) -> Mutant:
        """With a string of n zeros, which take no room on the disk, under the key."""
        first = _string(key) + struct.pack("<IQ", STRING, n)
        return self.mutant(f"{key}: string, {n}", {key: None}, first, n)


def named_mutants(path: str) -> Iterator[Mutant]:
    """Yield changes that have ended processes elsewhere, one by one: counts of layers,
    layers for drafts, tensors that overlap, F64, huge strings, templates.
    """
    with ModelFile(path) as model:
        header, metadata, tensors, alignment = (
            model.header(),
            model.metadata,
            list(model.tensors.values()),
            32,
        )
        data = {tensor.name: model.data(tensor.name).tobytes() for tensor in tensors}
    arch, parts = unpack(metadata["general.architecture"]), Header(header)
    places = {(field.kind, field.name): field for field in parts.places}
    n_layer, routers = (
        unpack(metadata[f"{arch}.block_count"]),
        [t.name for t in tensors if t.name.endswith("ffn_gate_inp.weight")],
    )

    def with_values(what: str, **values: Any) -> Mutant:
        return parts.mutant(
            what, {key.replace("__", "."): packed(value) for key, value in values.items()}
        )

    def with_type(what: str, names: list[str], number: int, form: str) -> Mutant:
        changed = [replace(t, type=number) if t.name in names else t for t in tensors]
        whole = [
            (
                np.frombuffer(data[t.name], "<f4").astype(form).tobytes()
                if t.name in names
                else data[t.name]
            )
            for t in tensors
        ]
        return Mutant(
            0,
            len(header),
            header_bytes(metadata, changed, alignment),
            what,
            b"".join(part + bytes(-len(part) % alignment) for part in whole),
        )

    for n in (0, 1, n_layer - 1, n_layer + 1, 512, 513, 1 << 31, (1 << 32) - 1):
        yield with_values(f"{n} layers", **{f"{arch}.block_count": n})
    for n in (1, n_layer - 1, n_layer, n_layer + 1, 1 << 31, (1 << 32) - 1):
        yield with_values(f"{n} layers for drafts", **{f"{arch}.nextn_predict_layers": n})
    yield with_values(
        "a layer for drafts behind the last",
        **{f"{arch}.block_count": n_layer + 1, f"{arch}.nextn_predict_layers": 1},
    )
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
    yield with_values("a huge name", general__name=huge)
    yield with_values("a huge architecture", general__architecture=huge)
    yield with_values("a huge chat template", tokenizer__chat_template=huge)
    yield with_values("a huge token", tokenizer__ggml__tokens=[*tokens[:-1], huge])
    yield with_values("a huge merge", tokenizer__ggml__merges=["a " + huge])
    yield with_values("a huge key", **{huge: 1})
    yield Mutant(
        0,
        len(header),
        header_bytes(metadata, [replace(tensors[0], name=huge), *tensors[1:]], alignment),
        "a huge tensor name",
    )
    for template in (*TEMPLATES, *(code % MARK for code in CODE)):
        yield with_values(f"chat template {template[:60]!r}", tokenizer__chat_template=template)


def value_mutants(path: str) -> Iterator[Mutant]:
    """Each number of a model's metadata, one after the other, is none, too small, too
    large, or not finite.
    """
    with ModelFile(path) as model:
        header = model.header()
    for field in fields(header):
        if field.kind in ("value:I", "value:f") and not field.name.startswith("general."):
            for value in (
                (0, 1, 3, 33, 513, 1 << 31, (1 << 32) - 1)
                if field.kind == "value:I"
                else (0.0, -1.0, 1e30, float("nan"), float("inf"))
            ):
                yield Mutant(
                    field.at, 4, struct.pack("<" + field.kind[6:], value), f"{field.name} = {value}"
                )


def mutate_header(header: bytes, places: list[Field], rng: random.Random) -> Mutant:
    """One field that says something else, of metadata more often than of the many
    tensors; or any bytes.
    """
    if rng.random() < 0.1:
        at = rng.randrange(4, len(header))
        data = rng.choice((rng.randbytes(rng.choice((1, 4, 8))), b"\x00" * 8, b"\xff" * 8))[
            : len(header) - at
        ]
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
                (
                    b"",
                    b"\xff\xfe",
                    b"\x00",
                    old[::-1],
                    old + b"x",
                    b"x" * rng.choice((1, 63, 64, 70000)),
                    rng.randbytes(max(len(old), 1)),
                    b"general.alignment",
                )
            )
        if rng.random() < 0.5:  # in its place, else with its length
            return (
                Mutant(field.at, len(new), new, f"text of {field.name!r}")
                if field.at + len(new) <= len(header)
                else Mutant(field.at, 0, b"", "nothing")
            )
        return Mutant(
            field.at - 8,
            field.size + 8,
            struct.pack("<Q", len(new)) + new,
            f"text of {field.name!r}",
        )
    form = {
        "count": "I" if field.size == 4 else "Q",
        "length": "Q",
        "type": "I",
        "n_dims": "I",
        "dim": "Q",
        "ggml_type": "I",
        "offset": "Q",
    }.get(field.kind) or field.kind[6:]
    if form in "fd":
        data = struct.pack(
            "<" + form, rng.choice(FLOATS) if form == "d" else rng.choice([f for f in FLOATS])
        )
    elif form == "?":
        data = bytes([rng.choice((0, 1, 2, 255))])
    else:
        value = (
            rng.choice(TYPES)
            if field.kind == "ggml_type"
            else (
                rng.randrange(14)
                if field.kind == "type" and rng.random() < 0.8
                else _near(header, field, form, rng)
            )
        )
        data = struct.pack("<" + form.upper(), value & ((1 << 8 * field.size) - 1))
    return Mutant(field.at, field.size, data, f"{field.kind} of {field.name!r}")


def _near(header: bytes, field: Field, form: str, rng: random.Random) -> int:
    """An extreme number, or one near what is there."""
    old = int.from_bytes(header[field.at : field.at + field.size], "little")
    return (
        rng.choice(EXTREME)
        if rng.random() < 0.7
        else max(old + rng.choice((-32, -1, 1, 2, 32)), 0)
        if rng.random() < 0.7
        else old * 2
    )


def mutate_numbers(h: Header, rng: random.Random) -> Mutant:
    """Several numbers that are multiplied with each other: too large together, or the
    same product as before.
    """
    numbers = [
        f
        for f in h.places
        if f.kind in ("value:I", "value:Q", "value:i")
        and not f.name.startswith(("tokenizer.", "general."))
    ]
    whole, changed = bytearray(h.whole), []

    def put(field: Field, value: int) -> None:
        whole[field.at : field.at + field.size] = (value & ((1 << 8 * field.size) - 1)).to_bytes(
            field.size, "little"
        )
        changed.append(f"{field.name} = {value}")

    def number(field: Field) -> int:
        return int.from_bytes(h.whole[field.at : field.at + field.size], "little")

    dims: dict[str, list[Field]] = {}
    for field in h.places:
        if field.kind == "dim":
            dims.setdefault(field.name, []).append(field)
    several = [d for d in dims.values() if len(d) > 1]
    if rng.random() < 0.6 or not several:
        for field in rng.sample(numbers, min(rng.randrange(1, 5), len(numbers))):
            put(
                field,
                rng.choice(
                    (
                        1 << rng.randrange(33),
                        (1 << rng.randrange(1, 33)) - 1,
                        number(field) << rng.randrange(1, 24),
                        rng.choice(EXTREME),
                    )
                ),
            )
    else:
        first, second = rng.sample(rng.choice(several), 2)
        if rng.random() < 0.5:
            factor = rng.choice((2, 4, 32))
            put(first, number(first) * factor)
            put(second, number(second) // factor)
        else:  # a product that wraps around to a small one
            bits = rng.randrange(1, 64)
            put(first, rng.choice((1 << bits, number(first) << bits % 40)))
            put(
                second,
                rng.choice(
                    (1 << 64 - bits, (1 << 64 - bits) + 1, number(second) << rng.randrange(40))
                ),
            )
    return Mutant(0, len(whole), bytes(whole), ", ".join(changed))


TOKENIZERS = [
    "llama",
    "gpt2",
    "bert",
    "t5",
    "rwkv",
    "plamo2",
    "none",
    "no_vocab",
    "hybriddna",
    "",
    "x" * 100,
]
PRETOKENIZERS = ["default", "llama-bpe", "deepseek-llm", "deepseek-v3", "falcon", "mpt", "starcoder", "gpt-2", "refact", "command-r", "qwen2", "stablelm2", "olmo", "dbrx",
                 "smaug-bpe", "poro-chat", "chatglm-bpe", "viking", "jais", "tekken", "smollm", "codeshell", "bloom", "gpt3-finnish", "exaone", "chameleon",
                 "minerva-7b", "megrez", "gpt-4o", "superbpe", "trillion", "bailingmoe", "llama4", "pixtral", "seed-coder", "hunyuan", "kimi-k2", "grok-2", "?"]  # fmt: skip
SPECIAL = ["bos", "eos", "unknown", "seperator", "padding", "cls", "mask", "eot", "eom", "prefix", "suffix", "middle", "fim_pre", "fim_suf", "fim_mid", "fim_pad",
           "fim_rep", "fim_sep"]  # fmt: skip
TEXTS = [
    "",
    "Hi",
    PROMPT,
    " \t\r\n  ",
    "日本語 🎉 \u200d\ufffd é",
    "\x00\x01",
    "<|im_start|><s></s>[INST]",
    "x" * 40,
    "1234567890" * 3,
    "don't I'LL",
]


def mutate_tokenizer(h: Header, rng: random.Random) -> Mutant:
    """A vocabulary of another kind, wrong token ids, scores and types of a wrong length
    or kind, merges that name no token.
    """
    tokens, n = h.value("tokenizer.ggml.tokens"), len(h.value("tokenizer.ggml.tokens"))

    def lengths() -> int:
        return rng.choice((0, 1, n - 1, n, n + 1, 2 * n))

    def words() -> list[str | bytes]:
        change = rng.randrange(6)
        if change == 0:
            return [rng.choice(tokens)] * n
        if change == 1:
            return rng.sample(tokens, n)
        if change == 2:
            return [
                (
                    token
                    if rng.random() < 0.9
                    else rng.choice((b"", b"\xff", b"\x00", b" ", "x" * 5000, "<0x41>", "▁", "\n"))
                )
                for token in tokens
            ]
        if change == 3:
            return (tokens * 2)[: lengths()]
        return (
            ["<0x%02X>" % (i % 256) for i in range(n)]
            if change == 4
            else [token.replace("Ġ", "▁") for token in tokens]
        )

    def merges() -> list[str | bytes]:
        old = h.value("tokenizer.ggml.merges") if "tokenizer.ggml.merges" in h.pairs else []
        odd = [
            "",
            " ",
            "x",
            "no such",
            b"\xff \xfe",
            "a  b",
            " a",
            "a ",
            "a b c",
            f"{tokens[0]} {tokens[0]}",
            "x" * 3000 + " y",
            rng.choice(tokens),
            "Ġ Ġ Ġ",
        ]
        return rng.choice(
            (
                odd,
                [],
                old[::-1],
                [*old, *odd],
                [rng.choice(odd) for _ in range(200)],
                [f"{a} {b}" for a, b in zip(tokens, tokens[1:])],
            )
        )

    def types() -> np.ndarray:
        kind = rng.choice((np.int32, np.int32, np.int32, np.uint32, np.int8, np.int64, np.float32))
        return rng.choice(
            (
                np.full(lengths(), rng.choice((0, 1, 2, 3, 4, 5, 6, 7, 100)), kind),
                np.array([rng.randrange(8) for _ in range(n)], kind),
            )
        )

    def scores() -> np.ndarray:
        kind = rng.choice((np.float32, np.float32, np.float64, np.int32))
        return rng.choice(
            (
                np.full(lengths(), rng.choice((0, 1, -1)), kind),
                np.full(n, rng.choice(FLOATS), np.float32),
                np.array([rng.random() for _ in range(n)], np.float32),
            )
        )

    def number() -> bytes:
        value = rng.choice(
            (
                0,
                n - 1,
                n,
                n + 1,
                (1 << 31) - 1,
                1 << 31,
                (1 << 32) - 2,
                (1 << 32) - 1,
                rng.randrange(n),
            )
        )
        return (
            packed(value)
            if rng.random() < 0.8
            else rng.choice(
                (
                    struct.pack("<IQ", 10, value << 20),
                    struct.pack("<Ii", 5, -1),
                    packed("1"),
                    packed(1.5),
                )
            )
        )

    kinds: list[Callable[[], tuple[str, bytes | None]]] = [
        lambda: ("model", packed(rng.choice(TOKENIZERS))),
        lambda: ("model", packed(rng.choice(TOKENIZERS[:6]))),
        lambda: ("pre", packed(rng.choice(PRETOKENIZERS))),
        lambda: (f"{rng.choice(SPECIAL)}_token_id", number()),
        lambda: ("tokens", packed(words())),
        lambda: ("merges", packed(merges())),
        lambda: ("token_type", packed(types())),
        lambda: ("scores", packed(scores())),
        lambda: (
            rng.choice(
                ("add_bos_token", "add_eos_token", "add_space_prefix", "remove_extra_whitespaces")
            ),
            rng.choice((packed(True), packed(False), packed(2))),
        ),
        lambda: (
            "precompiled_charsmap",
            packed(
                np.frombuffer(rng.randbytes(rng.choice((0, 1, 3, 4, 5, 8, 100, 5000))), np.uint8)
            ),
        ),
        lambda: ("token_type_count", number()),
        lambda: (
            rng.choice(
                ("merges", "scores", "token_type", "pre", "tokens", "model", "bos_token_id")
            ),
            None,
        ),
    ]
    changes = dict(rng.choice(kinds)() for _ in range(rng.choice((1, 1, 2, 3, 4))))
    what = ", ".join(
        f"{key}: {'none' if value is None else f'{value[:24]!r} of {len(value)} bytes'}"
        for key, value in changes.items()
    )
    return h.mutant(what, {f"tokenizer.ggml.{key}": value for key, value in changes.items()})


def mutate_size(h: Header, rng: random.Random) -> Mutant:
    """Insert a legal and huge value: a string, an array of numbers or of empty strings,
    or very many keys. Most of it is a hole in the file.
    """
    key = rng.choice(("general.name", "general.description", "tokenizer.chat_template", "tokenizer.ggml.scores", "tokenizer.ggml.token_type",
                      "tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.pre", "general.tags", "moeoff.nothing"))  # fmt: skip
    if rng.random() < 0.1:
        n = rng.choice((10_000, 100_000))
        return h.mutant(f"{n} keys", {f"moeoff.{i}": packed(i) for i in range(n)})
    kind = rng.choice(("string", "string", "numbers", "strings"))
    if kind == "string":
        return h.with_string(key, (1 << rng.randrange(16, 31)) - rng.randrange(2))
    code, each = (
        (STRING, 8)
        if kind == "strings"
        else rng.choice([(code, struct.calcsize(form)) for code, form in FORMATS.items()])
    )
    n = 1 << rng.randrange(10, 24 if kind == "strings" else 29)
    hole, value = n * each, struct.pack("<IIQ", ARRAY, code, n)
    return h.mutant(f"{key}: {kind}, {n}", {key: None}, _string(key) + value, hole)


RECIPES: dict[str, tuple[int, Callable[[Header, random.Random], Mutant]]] = {
    "a field": (50, lambda h, rng: mutate_header(h.whole, h.places, rng)),
    "numbers": (15, mutate_numbers),
    "vocabulary": (30, mutate_tokenizer),
    "sizes": (5, mutate_size),
}


def mutate_gguf(header: Header, whole: bytes, rng: random.Random) -> Mutant:
    """By one of the recipes, or any bytes of the file; without a vocabulary none of it
    changes.
    """
    if rng.random() < 0.1:
        return Mutant(0, len(header.whole), mutate(whole, rng), "bytes", rest=b"")
    recipes = {
        name: recipe
        for name, recipe in RECIPES.items()
        if name != "vocabulary" or "tokenizer.ggml.tokens" in header.pairs
    }
    name = rng.choices(list(recipes), [share for share, _ in recipes.values()])[0]
    return recipes[name][1](header, rng)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A flipped bit, noise, zeros, an extreme number, bytes cut out or put in, the end
    cut off; half of it in the first 3000 bytes.
    """
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


# --- files that are no GGUF ---

DEEP = [b"[" * 100000, b'{"a":' * 100000, b'{"default": ' + b"[" * 100000, b"\xff\xfe", b"", b"null", b"[]", b"{}", b'"x"', b"1e999", b"NaN",
        b'{"layers": {"0": {"0": 7}}}', b'{"default": ' + b"9" * 100000 + b"}"]  # fmt: skip
GRAMMAR = 'root ::= "a" | list{1,3}\nlist ::= "[" [a-z0-9]+ ("," list)? "]"\n'
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"enum": [1, 2]}, "more": {"$ref": "#/$defs/more"}},
          "required": ["name"], "$defs": {"more": {"type": "array", "items": {"type": "integer", "minimum": 3}, "maxItems": 4}}}  # fmt: skip
WORDS = ["root ::= root", "root ::= root root", 'root ::= ""*', "root ::= (" * 3000, 'root ::= "a"{100000000}', 'root ::= ("a"{0,1000}){0,1000}', "root ::= [^", "root ::= [z-a]", "x ::= y",
         'root ::= "\\x', 'root ::= "\\U99999999"', "root ::= a\na ::= b\nb ::= a", 'root ::= "a"{3,1}', 'root ::= "a"{99999999999999999999}', 'root ::= ("a"*)*', "root ::= .*" * 50, "::=", "\x00",
         'root ::= "' + "x" * 300_000 + '"', "root ::= " + "(" * 200_000, "root ::= a0\n" + "".join(f"a{i} ::= a{i + 1}\n" for i in range(100_000)),
         "root ::= " + " | ".join(f'"{i}"' for i in range(20_000)), 'root ::= <[99999999]>', "root ::= <|im_end|> !<[3]>"]  # fmt: skip
JSON_ODD: list[Any] = [None, -1, 0, 1 << 31, 1 << 64, 10**400, 1.5, float("nan"), float("inf"), "", "x", "#/$defs/more", "#", "#/a/b/~", "https://example.invalid/x", "^" + "(a" * 50, "[" * 99, "\ud800", True, [], {}, [[]], {"x": {}}, {"$ref": "#"}, {"type": "object"},
                       ["string", "null"], "integer", {"pattern": "^(a|b){1,999999}$"}]  # fmt: skip


def mutate_arrays(whole: bytes, rng: random.Random, prefix: str = "") -> bytes:
    """A whole archive whose arrays have other types, shapes or numbers, or other names,
    or are missing: of those whose names begin with the prefix.
    """
    with np.load(io.BytesIO(whole)) as file:
        arrays = {key: file[key] for key in file.files}
    for key in rng.sample(
        keys := [
            key
            for key in arrays
            if key.startswith(prefix) and (key != "moeoff" or rng.random() < 0.1)
        ],
        min(rng.choice((1, 1, 2, 3)), len(keys)) if len(arrays) > 3 else 1,
    ):
        a = arrays[key]
        kind = rng.randrange(14)
        if kind == 0:
            a = (
                a.astype(rng.choice(("f2", "f8", "i1", "u8", "?", "U4", "S3", "i8", "f4", "u4")))
                if a.dtype.kind in "iufb"
                else a[:0]
            )
        elif kind == 1:
            a = a.astype("c16") if a.dtype.kind in "iufb" else a.reshape(-1, 1)
        elif kind == 2:
            a = a.reshape(-1)
        elif kind == 3:
            a = a[..., None]
        elif kind == 4:
            a = a.T
        elif kind == 5:
            a = a.reshape(-1)[:0]
        elif kind == 6:
            a = np.concatenate([a.reshape(-1)] * 2)
        elif kind == 7:
            a = np.array(rng.choice((0, -1, 1 << 40, float("nan"), float("inf"), "text")))
        elif kind == 8 and a.dtype.kind in "f" and a.size:
            a = a.copy()
            a.flat[rng.randrange(a.size)] = (
                rng.choice(FLOATS + [1e300]) if a.dtype.itemsize > 2 else float("nan")
            )
        elif kind == 9 and a.dtype.kind in "iu" and a.size:
            a = a.copy()
            a.flat[rng.randrange(a.size)] = rng.choice(
                (np.iinfo(a.dtype).min, np.iinfo(a.dtype).max)
            )
        elif kind == 10 and a.dtype.kind in "iuf":
            a = np.full_like(a, rng.choice((0, 1, 100)))
        elif kind == 11 and a.ndim:
            a = a[:-1] if len(a) > 1 else np.concatenate([a, a])
        elif kind == 12:
            del arrays[key]
            continue
        else:
            arrays[
                rng.choice(
                    (key + "x", key.split("/")[0], "/", "", key.split("/")[0] + "/x/y", "../x")
                )
            ] = a
        arrays[key] = np.asarray(a)
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        for key, array in arrays.items():
            data = io.BytesIO()
            np.lib.format.write_array(data, array, allow_pickle=False)
            archive.writestr(f"{key}.npy", data.getvalue())
    return out.getvalue()


def unpacks_to(whole: bytes, key: str, size: int) -> bytes:
    """The archive with one more array, of so many zeros."""
    out = io.BytesIO(whole)
    with (
        zipfile.ZipFile(out, "a", zipfile.ZIP_DEFLATED) as archive,
        archive.open(f"{key}.npy", "w", force_zip64=True) as file,
    ):
        np.lib.format.write_array_header_1_0(
            file, {"descr": "|u1", "fortran_order": False, "shape": (size,)}
        )
        for _ in range(0, size, 1 << 20):
            file.write(bytes(1 << 20))
    return out.getvalue()


def mutate_json(whole: bytes, rng: random.Random) -> bytes:
    """Another value or key somewhere in it."""
    root = json.loads(whole)
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key, value in (
            node.items()
            if isinstance(node, dict)
            else enumerate(node)
            if isinstance(node, list)
            else ()
        ):
            places.append((node, key))
            walk(value)

    walk(root)
    for node, key in rng.sample(places, min(rng.choice((1, 1, 2)), len(places))):
        if rng.random() < 0.8 or not isinstance(node, dict):
            with contextlib.suppress(IndexError, KeyError):
                node[key] = rng.choice(JSON_ODD)
        else:
            node[
                rng.choice(
                    (
                        "",
                        "-1",
                        "99999999999",
                        "x" * 70000,
                        "minItems",
                        "pattern",
                        "$ref",
                        "anyOf",
                        "0",
                    )
                )
            ] = node.pop(key, 0)
    return json.dumps(root).encode()


def mutate_text(whole: bytes, rng: random.Random) -> bytes:
    data = bytearray(rng.choice(WORDS).encode() if rng.random() < 0.3 else whole)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        data[at : at + rng.randrange(3)] = rng.choice(
            (
                b"",
                b'"',
                b"(",
                b")",
                b"[",
                b"]",
                b"{",
                b"}",
                b"{9,",
                b"::=",
                b"\\",
                b"\xff",
                b"\0",
                b"*",
                b"root",
                b"\n",
                b"|",
                "🎉".encode(),
            )
        )
    return bytes(data)
