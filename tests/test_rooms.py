"""The house: which room may import which. docs/internals/design.md draws it."""

import ast
import graphlib
import re
from pathlib import Path

import grimp
import pytest

import moeoff
from helpers.files import ROOT

# the highest first; a room imports from lower lines only, and rooms on one line do not know each other
FLOORS = [
    {"cli"},
    {"tune", "report", "ray"},
    {"server", "calibrate", "bench"},
    {"engine"},
    {"budget"},
    {"companion", "predict"},
    {"simulate"},
    {"cache"},
    {"gguf"},
    {"native", "threads", "machine", "devices"},
    {"_abi"},
    {"binding", "memory", "console", "paths"},
    {"registry", "gate_event", "atomic_file"},
    {"cpu_level", "darwin"},
    {"errors", "chat_sandbox"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
PUBLIC = {"moeoff", "moeoff.convert"}  # names for users; nothing inside imports them


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return grimp.build_graph("moeoff", cache_dir=None)


def room(module: str) -> str:
    return module.split(".")[1]


def test_every_module_is_in_a_room(imports):
    assert {room(module) for module in imports.modules - PUBLIC} == set(FLOOR)


def test_imports_go_down(imports):
    up = []
    for importer in imports.modules - PUBLIC:
        for imported in imports.find_modules_directly_imported_by(importer):
            if imported == "moeoff":  # the version
                continue
            if imported in PUBLIC or (room(importer) != room(imported) and FLOOR[room(importer)] >= FLOOR[room(imported)]):
                up.append(f"{importer} -> {imported}")
    assert not up, "imports upwards: " + ", ".join(sorted(up))


def test_no_circle_of_modules(imports):
    graphlib.TopologicalSorter({module: imports.find_modules_directly_imported_by(module) for module in imports.modules}).prepare()  # raises CycleError


def test_internals_of_llama_cpp_are_used_in_one_module():
    """docs/internals/patches.md lists them; an update of llama_cpp is then checked against one file."""
    internals = {"_ctx", "_batch", "_model", "_stack", "_logits_all", "_n_vocab", "_lib", "_internals", "_logger"}
    guilty = set()
    for path in Path(moeoff.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        own = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}  # of the module's own classes
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in internals - own and path.name != "binding.py":
                guilty.add(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert not guilty


def test_the_picture_shows_the_order():
    text = (ROOT / "docs" / "internals" / "design.md").read_text()
    picture = re.search(r"## The rooms\n.*?\n((?:    [^\n]*\n)+)", text, re.DOTALL)[1]
    assert [set(line[:39].split()) for line in picture.splitlines()] == FLOORS


def test_no_test_imports_from_another():
    for file in (ROOT / "tests").rglob("*.py"):
        assert not re.findall(r"^\s*(?:from|import) (?:test_\w+|conftest)\b", file.read_text(), re.MULTILINE), file.name
