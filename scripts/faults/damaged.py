"""Damaged files: whatever a GGUF, a sidecar, a profile, a trace, a plan say, there is an answer or one sentence.

usage: damaged.py [--no-named] [--no-values] [--headers N] [--runs N] [--beside N] [--seed N] [--json FILE]

named: what has ended processes elsewhere (no layers, too many, layers for drafts, tensors that overlap, F64, huge strings, hostile chat templates), each
through `inspect`, `run`, `convert` and `serve`.
values: each hyperparameter and token that is one number says another one, through `run`.
headers: so many GGUF headers of which one field says something else are read in one process, as every command reads them first
(model_index, preflight, what `inspect` says). runs: so many of those that this does not refuse go through `run`, `convert` and `inspect` in a child each,
with --memory, in 8 GiB of address space, and under a deadline; some through `serve`. beside: so many damaged files beside a model are read.
A child that is ended by a signal, that takes more memory than its budget, that says more than a sentence, or hangs, is a finding; so is
any exception that is not the library's own. Exit code 1 if there is one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from common import DEMO, Child, Table, findings, import_all, is_sentence, json_option
from moeoff.gguf.file import ModelFile, unpack
from moeoff.gguf.writer import header_bytes

DEADLINE = 300  # seconds of a child, on a machine that is busy
ADDRESS_SPACE = 8 << 30
MEMORY = 300 << 20
OPTIONS = ["-c", "64", "--warm", "off", "--profile", "none", "--experts", "none", "-t", "1", "--memory", str(MEMORY)]


# --- mutants ---

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
        yield with_values(f"{n} layers", **{f"{arch}.block_count": n})
    for n in (1, n_layer - 1, n_layer, n_layer + 1, 1 << 31, (1 << 32) - 1):
        yield with_values(f"{n} layers for drafts", **{f"{arch}.nextn_predict_layers": n})
    yield with_values("a layer for drafts behind the last", **{f"{arch}.block_count": n_layer + 1, f"{arch}.nextn_predict_layers": 1})
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
    yield Mutant(0, len(header), header_bytes(metadata, [replace(tensors[0], name=huge), *tensors[1:]], alignment), "a huge tensor name")
    for template in (*TEMPLATES, *(code % MARK for code in CODE)):
        raw = template.encode("utf-8", "surrogateescape")
        yield with_values(f"chat template {template[:60]!r}", tokenizer__chat_template=struct.pack("<IQ", STRING, len(raw)) + raw)


def value_mutants(path: str) -> Iterator[Mutant]:
    """Each number of a model's metadata, one after the other, is none, too small, too large, or not finite."""
    with ModelFile(path) as model:
        header = model.header()
    for field in fields(header):
        if field.kind in ("value:I", "value:f") and not field.name.startswith("general."):
            for value in (0, 1, 3, 33, 513, 1 << 31, (1 << 32) - 1) if field.kind == "value:I" else (0.0, -1.0, 1e30, float("nan"), float("inf")):
                yield Mutant(field.at, 4, struct.pack("<" + field.kind[6:], value), f"{field.name} = {value}")


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


# --- headers in one process ---


class Damaged:
    """A model in a folder of its own whose header is another one each time."""

    def __init__(self, folder: Path, seed: int):
        self.path, self.rng = folder / "model.gguf", random.Random(seed)
        shutil.copy(DEMO, self.path)
        with ModelFile(DEMO) as model:
            self.header = model.header()
        self.rest = Path(DEMO).read_bytes()[len(self.header) :]
        self.places = fields(self.header)
        self._plain = True

    def next(self) -> Mutant:
        return mutate_header(self.header, self.places, self.rng)

    def write(self, mutant: Mutant) -> None:
        """Where nothing moves, only what differs is written."""
        if len(mutant.data) == mutant.n_removed and mutant.rest is None and self._plain:
            with open(self.path, "r+b", buffering=0) as file:
                file.seek(mutant.at)
                file.write(mutant.data)
            return
        with open(self.path, "wb") as file:
            file.write(mutant.apply(self.header))
            file.write(self.rest if mutant.rest is None else mutant.rest)
        self._plain = False

    def restore(self, mutant: Mutant) -> None:
        if self._plain:
            with open(self.path, "r+b", buffering=0) as file:
                file.seek(mutant.at)
                file.write(self.header[mutant.at : mutant.at + mutant.n_removed])
        else:
            self.path.write_bytes(self.header + self.rest)
            self._plain = True


def check_headers(damaged: Damaged, count: int, keep: int) -> tuple[Counter[str], list[str], list[Mutant]]:
    """What became of each kind, what is wrong, and a sample of what was accepted."""
    from moeoff.errors import MoeoffError
    from moeoff.gguf.model_index import ModelIndex
    from moeoff.gguf.preflight import preflight

    kinds, problems, accepted = Counter(), [], []
    for n in range(count):
        mutant = damaged.next()
        damaged.write(mutant)
        faulthandler.dump_traceback_later(DEADLINE, exit=True)
        try:
            model_index = ModelIndex.read(str(damaged.path))
            model_index.require_experts()
            preflight(model_index)
            kinds["accepted"] += 1
            if len(accepted) < keep:
                accepted.append(mutant)
            elif (at := damaged.rng.randrange(n + 1)) < keep:
                accepted[at] = mutant
        except MoeoffError as error:
            kinds["refused"] += 1
            if not is_sentence(str(error).replace(str(damaged.path), "model")):
                problems.append(f"{mutant.what}: no sentence: {str(error)[:300]!r}")
        except Exception as error:
            problems.append(f"{mutant.what}, {mutant.data[:16].hex()} at {mutant.at}: {type(error).__name__}: {str(error)[:300]}")
        damaged.restore(mutant)
    faulthandler.cancel_dump_traceback_later()
    return kinds, problems, accepted


# --- children ---


def confined(body: Callable[[], object], folder: Path) -> None:
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    body()


def command(args: list[str]) -> None:
    from moeoff.cli.main import main

    main(args)


def serve(path: Path) -> None:
    """Starts a server, asks it twice if it starts, and stops it."""
    import moeoff

    try:
        with moeoff.Server(str(path), port=0, memory=MEMORY, n_ctx=256, parallel=1, warm=False) as server:
            for text in ("Hi", "now"):
                body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 2}).encode()
                request = urllib.request.Request(f"{server.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
                with contextlib.suppress(urllib.error.HTTPError):
                    urllib.request.urlopen(request, timeout=DEADLINE).read()
            urllib.request.urlopen(f"{server.url}/health", timeout=DEADLINE).read()
    except moeoff.MoeoffError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(1)


def verdict(code: int | None, text: str, peak: int, *, bounded: bool, quiet: bool = True) -> str:
    """What is wrong; empty: nothing."""
    lines = [line for line in text.splitlines() if line.strip()]
    if code not in (0, 1):
        return f"exit code {code}: {text[-600:]}"
    if bounded and peak > MEMORY:
        return f"{peak >> 20} MiB of {MEMORY >> 20}"
    if code == 1 and quiet and not (lines and lines[-1].startswith("Error: ") and sum(line.startswith("Error: ") for line in lines) == 1):
        return f"no sentence: {text[-600:]!r}"
    return ""


def check_runs(damaged: Damaged, mutants: Iterable[Mutant], *, all_commands: bool = False) -> Iterator[tuple[str, int | None, str]]:
    """(command, exit code, what is wrong) of each run; of most mutants `run` alone."""
    out, mark = damaged.path.with_name("model.experts.gguf"), damaged.path.with_name(MARK)
    for n, mutant in enumerate(mutants):
        damaged.write(mutant)
        said = f"{mutant.what}, {mutant.data[:16].hex()} at {mutant.at}"
        mutant = replace(mutant, data=mutant.data[: mutant.n_removed], rest=None)  # a child begins with the memory of this process
        commands = {"run": ["run", "-m", str(damaged.path), "-p", "Hi", "-n", "2", *OPTIONS]}
        if all_commands or n % 8 == 0:
            commands["inspect"] = ["inspect", str(damaged.path), "--probe", "off"]
            commands["convert"] = ["convert", str(damaged.path), "--tiers", "original,Q4_0", "-o", str(out), "--force"]
        bodies = {name: functools.partial(command, args) for name, args in commands.items()}
        if all_commands or n % 16 == 0:
            bodies["serve"] = functools.partial(serve, damaged.path)
        for name, body in bodies.items():
            child = Child(functools.partial(confined, body, mark.parent))
            code = child.wait(DEADLINE)
            wrong = verdict(code, child.errors, child.peak, bounded=name in ("run", "serve"), quiet=name != "serve")
            if mark.exists():
                mark.unlink()
                wrong += " the template has run code"
            yield name, code, wrong and f"{name}, {said}: {wrong}"
        damaged.restore(mutant)


# --- beside a model ---


def files_beside(folder: Path, model: str) -> dict[str, tuple[Path, Callable[[Path], object]]]:
    """A whole file of each kind, and what reads it."""
    import gguf

    from moeoff.gguf.imatrix import Imatrix
    from moeoff.gguf.model_index import ModelIndex
    from moeoff.sidecar.convert import convert
    from moeoff.sidecar.file import Sidecar
    from moeoff.sidecar.profile import Profile
    from moeoff.sidecar.tiers import read_plan
    from moeoff.sidecar.verify import verify
    from moeoff.trace import Trace

    model_index = ModelIndex.read(model)
    sidecar, profile, plan, imatrix = (folder / name for name in ("m.experts.gguf", "m.profile.npz", "plan.json", "imatrix.gguf"))
    convert(model, tiers="original,Q4_0", output=sidecar)
    Profile.write(profile, model_index, {"popularity": {"counts": np.arange(384).reshape(12, 32)}, "precision": {"bits": np.arange(3.0)}})
    plan.write_text(json.dumps({"default": "Q4_0", "layers": {"0": {"0": "Q8_0", "1": "original"}, "3": "F16"}}))
    writer = gguf.GGUFWriter(imatrix, "imatrix")
    writer.add_string("general.type", "imatrix")
    for name, span in list(model_index.experts.items())[:4]:
        writer.add_tensor(f"{name}.in_sum2", np.ones((span.shape[2], span.shape[0]), np.float32))
        writer.add_tensor(f"{name}.counts", np.ones((span.shape[2], 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    trace = Path(DEMO).parents[2] / "tests" / "data" / "small.trace"

    def read_sidecar(path: Path) -> None:
        found = Sidecar(path)
        found.check_belongs(model_index)
        for span in model_index.experts.values():
            list(found.sources(span, "original"))

    return {
        "sidecar": (sidecar, read_sidecar),
        "sidecar, verify": (sidecar, lambda path: verify(path, model=model)),
        "profile": (profile, lambda path: Profile.read(path, model_index)),
        "plan": (plan, lambda path: read_plan(path, model_index.experts)),
        "importance matrix": (imatrix, lambda path: Imatrix.read(path)),
        "trace": (trace, lambda path: Trace.read(path).counts()),
    }


DEEP = [b"[" * 100000, b'{"a":' * 100000, b'{"default": ' + b"[" * 100000, b"\xff\xfe", b"", b"null", b"[]", b"{}", b'"x"', b"1e999", b"NaN",
        b'{"layers": {"0": {"0": 7}}}']  # fmt: skip


def check_beside(count: int, rng: random.Random) -> Iterator[tuple[str, bool, str]]:
    """(kind, whether it was accepted, what is wrong)."""
    from moeoff.errors import MoeoffError

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = shutil.copy(DEMO, folder / "m.gguf")
        bad = folder / "bad"
        for kind, (path, read) in files_beside(folder, str(model)).items():
            whole = path.read_bytes()
            for n in range(max(count // 10, 1) if "verify" in kind else count):
                data = DEEP[n] if n < len(DEEP) and path.suffix == ".json" else mutate(whole, rng)
                bad.write_bytes(data)
                faulthandler.dump_traceback_later(DEADLINE, exit=True)
                try:
                    read(bad)
                    yield kind, True, ""
                except MoeoffError as error:
                    yield kind, False, "" if is_sentence(str(error).replace(str(bad), "bad")) else f"{kind}: no sentence: {str(error)[:300]!r}"
                except Exception as error:
                    yield kind, False, f"{kind}: {type(error).__name__}: {str(error)[:300]}"
    faulthandler.cancel_dump_traceback_later()


def tell_runs(table: Table, what: str, runs: Iterable[tuple[str, int | None, str]]) -> list[str]:
    """A row for each command; what is wrong."""
    counted: dict[str, Counter[str]] = {}
    wrong = []
    for name, code, problem in runs:
        counted.setdefault(name, Counter())[str(code)] += 1
        counted[name]["problems"] += bool(problem)
        wrong += [problem] * bool(problem)
    for name, codes in counted.items():
        table.row(f"{what}, {name}", str(codes.total() - codes["problems"]), str(codes["1"]), str(codes["0"]), str(codes["problems"]))
    return wrong


@click.command()
@click.option("--named/--no-named", default=True, show_default=True)
@click.option("--values/--no-values", default=True, show_default=True)
@click.option("--headers", default=100_000, show_default=True)
@click.option("--runs", default=2000, show_default=True)
@click.option("--beside", default=2000, show_default=True)
@click.option("--seed", default=1, show_default=True)
@json_option
def main(named: bool, values: bool, headers: int, runs: int, beside: int, seed: int, json_file: str | None) -> None:
    import_all()
    columns = ["what", "files", "refused in one sentence", "accepted", "problems"]
    with findings(json_file, "damaged", f"damaged files, seed {seed}", columns) as (table, wrong), tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        damaged = Damaged(Path(name), seed)
        if named:
            wrong += tell_runs(table, "named damage", check_runs(damaged, named_mutants(DEMO), all_commands=True))
        if values:
            wrong += tell_runs(table, "numbers", check_runs(damaged, value_mutants(DEMO)))
        if headers:
            started = time.monotonic()
            kinds, problems, accepted = check_headers(damaged, headers, runs)
            table.row("GGUF headers", str(headers), str(kinds["refused"]), str(kinds["accepted"]), str(len(problems)))
            print(f"{headers / (time.monotonic() - started):.0f} headers/s", file=sys.stderr)
            wrong += problems
            wrong += tell_runs(table, "accepted headers", check_runs(damaged, accepted))
        if beside:  # an accepted file counts as exit code 0, a refused one as 1
            rows = ((kind, int(not accepted), problem) for kind, accepted, problem in check_beside(beside, random.Random(seed)))
            wrong += tell_runs(table, "beside a model", rows)


if __name__ == "__main__":
    main()
