"""The house: which room may import which. docs/design.md draws it."""

import graphlib

import grimp
import pytest

# the highest first; a room imports from lower lines only, and rooms on one line do not know each other
FLOORS = [
    {"cli"},
    {"server", "calibrate"},
    {"engine"},
    {"budget"},
    {"companion", "predict"},
    {"simulate"},
    {"cache"},
    {"gguf", "threads"},
    {"native", "memory", "console", "paths"},
    {"errors"},
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
