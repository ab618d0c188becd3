#!/usr/bin/env python3
"""Writes the two mirrors of moeoff.h: the table of fields that the library tells (moeoff-abi.inc) and the ctypes side (moeoff/_abi.py).

    make_abi.py           writes both
    make_abi.py --check   fails if they are not what the header says

The header is plain enough to be read by lines: one field, one enumerator and one function each. What this script does not
understand it refuses.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "llamacpp_patches" / "src" / "core"
HEADER = CORE / "moeoff.h"
FIELDS = CORE / "moeoff-abi.inc"
MIRROR = ROOT / "moeoff" / "_abi.py"

SCALARS = {f"{sign}int{bits}_t": f"c_{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)}
SCALARS |= {"float": "c_float", "double": "c_double", "bool": "c_bool", "int": "c_int", "size_t": "c_size_t", "char": "c_char"}
OPAQUE = ("void", "moeoff_expert_buffer")  # pointers to them are addresses


FUNCTION = """

def function(name: str, result: Any, *arguments: Any) -> Any:
    try:
        found = getattr(lib, name)
    except AttributeError:
        what = "has another version of the expert buffer: run `make env` to rebuild it"
        if not hasattr(lib, "moeoff_abi_version"):
            what = "has no expert buffer: install moeoff's build of it (`make env` in the moeoff repository) over the stock one"
        raise ForkError(f"the installed llama-cpp-python {what}") from None
    found.restype = result
    found.argtypes = arguments
    return found


"""


class Unreadable(Exception):
    """The header has a form that this script does not know."""


def camel(name: str) -> str:
    """moeoff_gate_event -> GateEvent"""
    return "".join(part.capitalize() for part in name.removeprefix("moeoff_").split("_"))


def import_order(name: str) -> tuple:
    """Constants, classes, the rest; numbers by value: what `ruff check` wants."""
    return not name.isupper(), not name[0].isupper(), [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", name)]


class Header:
    """What moeoff.h declares, in its order.

    Attributes:
        constants: (name, value) of #defines and enumerators.
        structs: name -> (type, field, length of the array or None) of each field.
        callbacks: (name, declaration, argument types).
        functions: (name, declaration, result type, argument types).
    """

    def __init__(self, text: str):
        text = re.sub(r"//[^\n]*", "", text)
        blocks = re.findall(r"^(?:enum|struct) \w+ \{\n.*?\n\};", text, re.M | re.S)
        if text.count("{") - text.count('extern "C" {') != len(blocks):
            raise Unreadable("braces other than those of an enum or struct that begins its line")
        self.constants = [(name, int(value)) for name, value in re.findall(r"^#define (MOEOFF_\w+) +(\d+) *$", text, re.M)]
        for body in re.findall(r"^enum \w+ \{\n(.*?)\n\};", text, re.M | re.S):
            for line in filter(None, map(str.strip, body.split("\n"))):
                if not (found := re.fullmatch(r"(MOEOFF_\w+) += +(\d+),", line)):
                    raise Unreadable(f"an enumerator needs a value: {line}")
                self.constants.append((found[1], int(found[2])))
        self.structs: dict[str, list[tuple[str, str, int | None]]] = {}
        for name, body in re.findall(r"^struct (\w+) \{\n(.*?)\n\};", text, re.M | re.S):
            self.structs[name] = []
            for line in filter(None, map(str.strip, body.split("\n"))):
                if not (found := re.fullmatch(r"([\w *]+?)\s*\b(\w+)(?:\[(\d+)\])?;", line)):
                    raise Unreadable(f"struct {name}: {line}")
                self.structs[name].append((found[1], found[2], int(found[3]) if found[3] else None))
        self.callbacks = []
        for declaration, name, arguments in re.findall(r"^(typedef void \(\*(\w+)\)\(([^)]*)\);)", text, re.M):
            self.callbacks.append((name, declaration, self.arguments(arguments)))
        self.functions = []
        for line in re.findall(r"^MOEOFF_API ([^\n]*)", text, re.M):
            line = re.sub(r" +", " ", line.strip())
            if not (found := re.fullmatch(r"([\w *]+?) ?\b(moeoff_\w+)\(([^()]*)\);", line)):
                raise Unreadable(f"a function has to be on one line: {line}")
            self.functions.append((found[2], line, found[1], self.arguments(found[3])))

    @staticmethod
    def arguments(text: str) -> list[str]:
        """Types of a list of parameters, which all have names."""
        return [re.sub(r"\w+$", "", argument.strip()).strip() for argument in text.split(",")] if text.strip() != "void" else []

    def ctype(self, declared: str) -> str:
        """A type as ctypes names it."""
        name = declared.replace("const ", "").replace("struct ", "").strip()
        if name == "void":
            return "None"
        if name in SCALARS:
            return SCALARS[name]
        if name in self.structs or any(name == callback for callback, _, _ in self.callbacks):
            return camel(name)
        target = name.removesuffix("*").strip()
        if target == name or target.endswith("*"):
            raise Unreadable(f"unknown type: {declared}")
        if target in OPAQUE:
            return "c_void_p"
        return "c_char_p" if target == "char" else f"POINTER({self.ctype(target)})"


def field_table(header: Header) -> str:
    """moeoff-abi.inc, for an includer that defines STRUCT(type) and FIELD(type, field)."""
    lines = ["// made from moeoff.h by scripts/build/make_abi.py: do not edit", ""]
    for struct, fields in header.structs.items():
        lines += [f"STRUCT({struct})", *(f"FIELD({struct}, {name})" for _, name, _ in fields)]
    return "\n".join(lines) + "\n"


def mirror(header: Header) -> str:
    """moeoff/_abi.py"""
    body = []
    exported = []
    for name, value in header.constants:
        exported.append(name.removeprefix("MOEOFF_"))
        body.append(f"{exported[-1]} = {value}")
    for struct, fields in header.structs.items():
        exported.append(camel(struct))
        body += ["", "", f"class {camel(struct)}(Structure):", f'    """struct {struct}"""', "", "    _fields_ = ["]
        for declared, name, length in fields:
            body.append(f'        ("{name}", {header.ctype(declared)}{f" * {length}" if length else ""}),')
        body.append("    ]")
    exported.append("STRUCTS")
    body += ["", "", "STRUCTS: dict[str, type[Structure]] = {", *(f'    "{name}": {camel(name)},' for name in header.structs), "}", ""]
    for name, declaration, arguments in header.callbacks:
        exported.append(camel(name))
        types = ", ".join("c_void_p" if argument.endswith("*") else header.ctype(argument) for argument in arguments)
        body += [f"# {declaration}  -- pointers as addresses, which costs less for each call", f"{camel(name)} = CFUNCTYPE(None, {types})", ""]
    for name, declaration, result, arguments in header.functions:
        exported.append(name.removeprefix("moeoff_"))
        types = "".join(f", {header.ctype(argument)}" for argument in arguments)
        body += [f"# {declaration}", f'{exported[-1]} = function("{name}", {header.ctype(result)}{types})']
    text = "\n".join(body) + "\n"
    names = sorted(name for name in {*SCALARS.values(), "c_void_p", "c_char_p", "CFUNCTYPE", "POINTER", "Structure"} if re.search(rf"\b{name}\b", text))
    listed = "\n".join(f'    "{name}",' for name in exported)
    head = [
        '"""The ctypes mirror of moeoff.h, made by scripts/build/make_abi.py: do not edit. The header says what each thing means."""',
        "",
        "from __future__ import annotations",
        "",
        "from ctypes import (",
        *(f"    {name}," for name in sorted(names, key=import_order)),
        ")",
        "from typing import Any",
        "",
        "from .binding import lib",
        "from .errors import ForkError",
        "",
        "__all__ = [",
        listed,
        "]",
        "",
    ]
    return "\n".join(head) + FUNCTION + text


def generated() -> dict[Path, str]:
    header = Header(HEADER.read_text())
    return {FIELDS: field_table(header), MIRROR: mirror(header)}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not current")
    options = parser.parse_args(arguments)
    try:
        files = generated()
    except Unreadable as error:
        print(f"{HEADER}: {error}", file=sys.stderr)
        return 1
    stale = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if options.check:
            print(f"{path.relative_to(ROOT)} is not what moeoff.h says: run scripts/build/make_abi.py", file=sys.stderr)
        else:
            path.write_text(files[path])
            print(path.relative_to(ROOT))
    return int(options.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
