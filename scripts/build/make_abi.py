#!/usr/bin/env python3
"""Writes what follows from our C headers: the tables of fields that the libraries tell (moeoff-abi.inc, moeoff-server-abi.inc) and the ctypes side of all
that is exported (moeoff/llamacpp/_abi.py).

    make_abi.py           writes them
    make_abi.py --check   fails if they are not what the headers say

The headers are plain enough to be read by lines: one field and one enumerator each, and one function but for its arguments. What this script does not
understand it refuses.
"""

from __future__ import annotations

import argparse
import itertools
import re
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "llamacpp_patches" / "src"
HEADER = SOURCES / "core" / "moeoff.h"
FUNCTIONS = (  # whose functions alone are for a binding
    SOURCES / "llama" / "moeoff-llama.h",
    SOURCES / "ggml-cpu" / "moeoff-row-kernels.h",
    SOURCES / "ggml-cpu" / "moeoff-attention.h",
)
SERVER = SOURCES / "server" / "moeoff-server.h"  # of a library of its own
FIELDS = {
    HEADER: HEADER.with_name("moeoff-abi.inc"),
    SERVER: SERVER.with_name("moeoff-server-abi.inc"),
}
MIRROR = ROOT / "moeoff" / "llamacpp" / "_abi.py"

SCALARS = {
    f"{sign}int{bits}_t": f"c_{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
SCALARS |= {
    "float": "c_float",
    "double": "c_double",
    "bool": "c_bool",
    "int": "c_int",
    "size_t": "c_size_t",
    "char": "c_char",
}
GGML = """
ggml_backend_buffer_type_t ggml_backend_cpu_buffer_type(void);
const char * ggml_type_name(enum ggml_type type);
int64_t ggml_blck_size(enum ggml_type type);
size_t ggml_type_size(enum ggml_type type);
bool ggml_quantize_requires_imatrix(enum ggml_type type);
size_t ggml_quantize_chunk(enum ggml_type type, const void * src, void * dst, int64_t start, int64_t nrows, int64_t n_per_row, const void * imatrix);
size_t ggml_backend_dev_count(void);
ggml_backend_dev_t ggml_backend_dev_get(size_t index);
enum ggml_backend_dev_type ggml_backend_dev_type(ggml_backend_dev_t device);
const char * ggml_backend_dev_name(ggml_backend_dev_t device);
const char * ggml_backend_dev_description(ggml_backend_dev_t device);
void ggml_backend_dev_memory(ggml_backend_dev_t device, size_t * free, size_t * total);
ggml_backend_buffer_type_t ggml_backend_dev_buffer_type(ggml_backend_dev_t device);
const char * ggml_backend_buft_name(ggml_backend_buffer_type_t buft);
size_t ggml_backend_reg_count(void);
ggml_backend_reg_t ggml_backend_reg_get(size_t index);
const char * ggml_backend_reg_name(ggml_backend_reg_t reg);
void ggml_threadpool_free(ggml_threadpool_t threadpool);
void llama_attach_threadpool(struct llama_context * ctx, ggml_threadpool_t threadpool, ggml_threadpool_t threadpool_batch);
void llama_detach_threadpool(struct llama_context * ctx);
"""  # of ggml's and llama.cpp's own functions, those that llama_cpp does not declare
OPAQUE = (
    "void",
    "ggml_tensor",
    "moeoff_expert_buffer",
    "moeoff_simulation",
    "llama_context",
    "llama_model",
    "llama_model_tensor_buft_override",
)  # pointers to them are addresses
ADDRESSES = ("moeoff_four_rows", "moeoff_four_columns")  # of functions
ADDRESSES += (
    "ggml_backend_buffer_type_t",
    "ggml_backend_dev_t",
    "ggml_backend_reg_t",
    "ggml_threadpool_t",
)
ENUMS = ("ggml_type", "ggml_backend_dev_type")
WIDTH = 160
EXPORTED = r'^(?:MOEOFF_API|extern "C" LLAMA_API|MOEOFF_SERVER_API|EXTERN) ([^\n]*)'


FUNCTION = """

def function(name: str, result: Any, *arguments: Any) -> Any:
    try:
        declared = getattr(lib, name)
    except AttributeError:
        what = "has another version of the expert buffer: run `make env` to rebuild it"
        if not hasattr(lib, "moeoff_abi_version"):
            what = "has no expert buffer: install moeoff's build of it (`make env` in the moeoff repository) over the stock one"
        raise ForkError(f"the installed llama-cpp-python {what}") from None
    declared.restype = result
    declared.argtypes = arguments
    return declared


def each(kind: Any, names: str) -> list[tuple[str, Any]]:
    return [(name, kind) for name in names.split()]


"""


@dataclass(frozen=True)
class Callback:
    """The type of a function's address."""

    result: str
    arguments: tuple[str, ...]


class Unreadable(Exception):
    """The header has a form that this script does not know."""


def call(function: str, listed: Sequence[str]) -> list[str]:
    """Lines of a call, as `ruff format` has them."""
    line = f"{function}({', '.join(listed)})"
    return (
        [line]
        if len(line) <= WIDTH
        else [f"{function}(", *(f"    {argument}," for argument in listed), ")"]
    )


def arguments(text: str) -> list[str]:
    """Types of a list of parameters, which all have names."""
    return (
        [re.sub(r"\w+$", "", argument.strip()).strip() for argument in text.split(",")]
        if text.strip() != "void"
        else []
    )


def camel(name: str) -> str:
    """moeoff_gate_event -> GateEvent"""
    return "".join(part.capitalize() for part in name.removeprefix("moeoff_").split("_"))


def import_order(name: str) -> tuple:
    """Constants, classes, the rest; numbers by value: what `ruff check` wants."""
    return (
        not name.isupper(),
        not name[0].isupper(),
        [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)],
    )


class Header:
    """The declarations of a header, in its order.

    Attributes:
        constants: (name, value) of #defines and enumerators.
        structs: name -> (type, field, length of the array or None) of each field; the type of a function's address is a `Callback`.
        callbacks: (name, declaration, argument types).
        functions: (name, declaration, result type, argument types).
    """

    def __init__(self, text: str, only_functions: bool = False):
        text = re.sub(r"//[^\n]*", "", text)
        text = re.sub(r"\([^()]*\)", lambda found: re.sub(r"\s+", " ", found[0]), text)
        self.constants: list[tuple[str, int]] = []
        self.structs: dict[str, list[tuple[str | Callback, str, int | None]]] = {}
        self.callbacks: list[tuple[str, str, list[str]]] = []
        if not only_functions:
            self._read_types(text)
        self.functions = []
        for line in re.findall(EXPORTED, text, re.M):
            line = re.sub(r" +", " ", line.strip())
            if not (match := re.fullmatch(r"([\w *]+?) ?\b(\w+)\(([^()]*)\);", line)):
                raise Unreadable(f"a function's result and name have to be on one line: {line}")
            self.functions.append((match[2], line, match[1], arguments(match[3])))

    def _read_types(self, text: str) -> None:
        blocks = re.findall(r"^(?:enum|struct) \w+ \{\n.*?\n\};", text, re.M | re.S)
        if text.count("{") - text.count('extern "C" {') != len(blocks):
            raise Unreadable("braces other than those of an enum or struct that begins its line")
        self.constants += [
            (name, int(value))
            for name, value in re.findall(r"^#define (MOEOFF_\w+) +(\d+) *$", text, re.M)
        ]
        for body in re.findall(r"^enum \w+ \{\n(.*?)\n\};", text, re.M | re.S):
            for line in filter(None, map(str.strip, body.split("\n"))):
                if not (match := re.fullmatch(r"(MOEOFF_\w+) += +(\d+),", line)):
                    raise Unreadable(f"an enumerator needs a value: {line}")
                self.constants.append((match[1], int(match[2])))
        for name, body in re.findall(r"^struct (\w+) \{\n(.*?)\n\};", text, re.M | re.S):
            self.structs[name] = []
            for line in filter(None, map(str.strip, body.split("\n"))):
                if match := re.fullmatch(r"([\w *]+?) ?\(\*(\w+)\)\(([^()]*)\);", line):
                    self.structs[name].append(
                        (Callback(match[1], tuple(arguments(match[3]))), match[2], None)
                    )
                elif match := re.fullmatch(r"([\w *]+?)\s*\b(\w+)(?:\[(\d+)\])?;", line):
                    self.structs[name].append(
                        (match[1], match[2], int(match[3]) if match[3] else None)
                    )
                else:
                    raise Unreadable(f"struct {name}: {line}")
        for declaration, name, listed in re.findall(
            r"^(typedef void \(\*(\w+)\)\(([^)]*)\);)", text, re.M
        ):
            self.callbacks.append((name, declaration, arguments(listed)))

    def ctype(self, declared: str | Callback) -> str:
        """A type as ctypes names it."""
        if isinstance(declared, Callback):  # it writes into text that is not constant
            kinds = [
                "c_void_p" if kind == "char *" else self.ctype(kind)
                for kind in (declared.result, *declared.arguments)
            ]
            return f"CFUNCTYPE({', '.join(kinds)})"
        name = re.sub(r"\bconst\b|\bstruct\b", "", declared).strip()
        if name == "void":
            return "None"
        if name in SCALARS:
            return SCALARS[name]
        if name in ADDRESSES:
            return "c_void_p"
        if name.removeprefix("enum ") in ENUMS:
            return "c_int"
        if name in self.structs or any(name == callback for callback, _, _ in self.callbacks):
            return camel(name)
        target = name.removesuffix("*").strip()
        if target == name:
            raise Unreadable(f"unknown type: {declared}")
        if target in OPAQUE:
            return "c_void_p"
        return "c_char_p" if target == "char" else f"POINTER({self.ctype(target)})"


def field_table(header: Header, name: str) -> str:
    """For an includer that defines STRUCT(type, ...) and FIELD(field); the fields of a struct are a list in braces."""
    lines = [f"// made from {name} by scripts/build/make_abi.py: do not edit", ""]
    for struct, fields in header.structs.items():
        lines += textwrap.wrap(
            f"STRUCT({struct}, {{ {', '.join(f'FIELD({name})' for _, name, _ in fields)} }})",
            150,
            subsequent_indent="    ",
        )
    return "\n".join(lines) + "\n"


def mirror(header: Header, functions: Sequence[Header] = (), server: Header | None = None) -> str:
    """moeoff/llamacpp/_abi.py: the whole of a header, functions of others, and a library's of which nothing is loaded yet."""
    body = [f"{name.removeprefix('MOEOFF_')} = {value}" for name, value in header.constants]
    for each, table in [(header, "STRUCTS"), *([(server, "SERVER_STRUCTS")] if server else [])]:
        for struct, fields in each.structs.items():
            body += [
                "",
                "",
                f"class {camel(struct)}(Structure):",
                f'    """struct {struct}"""',
                "",
                "    _fields_ = [",
            ]
            typed = [
                (f"{each.ctype(declared)}{f' * {length}' if length else ''}", name)
                for declared, name, length in fields
            ]
            for kind, alike in itertools.groupby(typed, key=lambda field: field[0]):
                names = [name for _, name in alike]
                if len(names) < 3:
                    body += [f'        ("{name}", {kind}),' for name in names]
                else:
                    body += [
                        f'        *each({kind}, "{part}"),'
                        for part in textwrap.wrap(" ".join(names), WIDTH - 20 - len(kind))
                    ]
            body.append("    ]")
        body += [
            "",
            "",
            f"{table}: dict[str, type[Structure]] = {{",
            *(f'    "{name}": {camel(name)},' for name in each.structs),
            "}",
        ]
    body.append("")
    for name, declaration, listed in header.callbacks:
        types = ", ".join(
            "c_void_p" if argument.endswith("*") else header.ctype(argument) for argument in listed
        )
        body += [
            f"# {declaration}  -- pointers as addresses, which costs less for each call",
            f"{camel(name)} = CFUNCTYPE(None, {types})",
            "",
        ]
    for each in (header, *functions):
        for name, declaration, result, listed in each.functions:
            ours = re.sub("^(moeoff|ggml_backend|ggml|llama)_", "", name)
            kinds = [
                "c_void_p" if argument.endswith("float *") else each.ctype(argument)
                for argument in listed
            ]  # numpy's arrays, as addresses
            body += [
                f"# {declaration}",
                *call(f"{ours} = function", [f'"{name}"', each.ctype(result), *kinds]),
            ]
    if server:
        body += ["", "SERVER_FUNCTIONS: dict[str, tuple[Any, ...]] = {  # result, then arguments"]
        for name, declaration, result, listed in server.functions:
            kinds = ", ".join(server.ctype(kind) for kind in (result, *listed))
            body += [f"    # {declaration}", f'    "{name}": ({kinds}{"" if listed else ","}),']
        body.append("}")
    text = "\n".join(body) + "\n"
    names = sorted(
        name
        for name in {*SCALARS.values(), "c_void_p", "c_char_p", "CFUNCTYPE", "POINTER", "Structure"}
        if re.search(rf"\b{name}\b", text)
    )
    head = [
        '"""The ctypes mirror of our C headers, made by scripts/build/make_abi.py: do not edit. The headers say what each thing means."""',
        "",
        "from __future__ import annotations",
        "",
        "from ctypes import (",
        *(f"    {name}," for name in sorted(names, key=import_order)),
        ")",
        "from typing import Any",
        "",
        "from ..errors import ForkError",
        "from .llama import lib",
        "",
    ]
    return "\n".join(head) + FUNCTION + text


def generated() -> dict[Path, str]:
    header, server = Header(HEADER.read_text()), Header(SERVER.read_text())
    functions = [Header(path.read_text(), only_functions=True) for path in FUNCTIONS]
    functions.append(Header(re.sub("^(?=.)", "EXTERN ", GGML, flags=re.M), only_functions=True))
    tables = {
        FIELDS[path]: field_table(each, path.name)
        for path, each in ((HEADER, header), (SERVER, server))
    }
    return {**tables, MIRROR: mirror(header, functions, server)}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing; fail if a file is not current"
    )
    options = parser.parse_args(argv)
    try:
        files = generated()
    except Unreadable as error:
        print(error, file=sys.stderr)
        return 1
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if options.check:
            print(
                f"{path.relative_to(ROOT)} is not what the headers say: run scripts/build/make_abi.py",
                file=sys.stderr,
            )
        else:
            path.write_text(files[path])
            print(path.relative_to(ROOT))
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
