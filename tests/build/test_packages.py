"""The order of packages: which may import which. docs/internals/design.md draws it."""

import ast
import graphlib
import importlib.metadata
import operator
import re
import sys

import grimp
import pytest

import moeoff
from helpers.files import ROOT
from helpers.processes import run_python

# the highest first; a package imports from lower lines only, and packages on one line
# do not know each other
FLOORS = [
    {"cli"},
    {"ray"},
    {"server", "measure"},
    {"engine"},
    {"options"},
    {"budget"},
    {"experts", "policies"},
    {"routing"},
    {"gguf"},
    {"llamacpp", "precision"},
    {"option"},
    {"system"},
    {"errors"},
]
FLOOR = {package: floor for floor, packages in enumerate(FLOORS) for package in packages}
PUBLIC = {"moeoff"}  # names for users; nothing inside imports them


@pytest.fixture(scope="module")
def imports() -> grimp.ImportGraph:
    return grimp.build_graph("moeoff", cache_dir=None)


def package_of(module: str) -> str:
    return module.split(".")[1]


def test_every_module_is_in_a_package(imports):
    assert {package_of(module) for module in imports.modules - PUBLIC} == set(FLOOR)


def test_imports_go_down(imports):
    up = []
    for importer in imports.modules - PUBLIC:
        for imported in imports.find_modules_directly_imported_by(importer):
            if imported == "moeoff":  # the version
                continue
            if imported in PUBLIC or (
                package_of(importer) != package_of(imported)
                and FLOOR[package_of(importer)] >= FLOOR[package_of(imported)]
            ):
                up.append(f"{importer} -> {imported}")
    assert not up, "imports upwards: " + ", ".join(sorted(up))


@pytest.mark.parametrize(
    "path", ["measure.perplexity", "experts.convert", "routing.trace", "policies.replay"]
)
def test_modules_for_users_are_there_without_an_import_of_their_own(path):
    code = (
        "import sys, operator, moeoff; assert operator.attrgetter(sys.argv[1])(moeoff) is"
        " sys.modules['moeoff.' + sys.argv[1]]"
    )
    run_python(code, path)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        operator.attrgetter(f"{path.split('.')[0]}.nothing")(moeoff)


def test_no_circle_of_modules(imports):
    # the package itself names what it imports when first asked: modules import its
    # version CycleError
    graphlib.TopologicalSorter(
        {
            module: imports.find_modules_directly_imported_by(module)
            for module in imports.modules - PUBLIC
        }
    ).prepare()


def test_internals_of_llama_cpp_are_used_in_one_module():
    """docs/internals/patches.md lists them; an update of llama_cpp is then checked
    against one file.
    """
    internals = {
        "_ctx",
        "_batch",
        "_model",
        "_stack",
        "_logits_all",
        "_n_vocab",
        "_lib",
        "_internals",
        "_logger",
    }
    guilty = set()
    for path in (ROOT / "moeoff").rglob("*.py"):
        tree = ast.parse(path.read_text())
        # of the module's own classes
        own = {
            n.attr
            for n in ast.walk(tree)
            if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and node.attr in internals - own
                and path != ROOT / "moeoff" / "llamacpp" / "llama.py"
            ):
                guilty.add(f"{path.name}:{node.lineno} {ast.unparse(node)}")
    assert not guilty


def test_the_picture_shows_the_order():
    text = (ROOT / "docs" / "internals" / "design.md").read_text()
    picture = re.search(r"## The packages\n.*?\n((?:    [^\n]*\n)+)", text, re.DOTALL)[1]
    assert [set(line[:39].split()) for line in picture.splitlines()] == FLOORS


def test_no_test_imports_from_another():
    for file in (ROOT / "tests").rglob("*.py"):
        assert not re.findall(
            r"^\s*(?:from|import) (?:test_\w+|conftest)\b", file.read_text(), re.MULTILINE
        ), file.name


def third_party_imports() -> dict[str, str]:
    """Packages that the program imports, by name, each with a file that does; what only
    a type checker sees is left out.
    """
    file_of: dict[str, str] = {}

    def visit(node: ast.AST, file: str) -> None:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        if isinstance(node, ast.Import):
            file_of.update({alias.name.partition(".")[0]: file for alias in node.names})
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            file_of[node.module.partition(".")[0]] = file
        for child in ast.iter_child_nodes(node):
            visit(child, file)

    for path in (ROOT / "moeoff").rglob("*.py"):
        visit(ast.parse(path.read_text()), path.name)
    return {
        name: file
        for name, file in file_of.items()
        if name not in sys.stdlib_module_names and name != "moeoff"
    }


def test_every_import_is_declared():
    """In pyproject.toml, among the dependencies or an extra for users; and no
    dependency is declared that nothing imports.
    """
    project = (ROOT / "pyproject.toml").read_text()
    blocks = {
        name: re.search(rf"^{name} = \[(.*?)\]\s*$", project, re.DOTALL | re.MULTILINE)[1]
        for name in ("dependencies", "hub", "ray")
    }
    declared = {
        name: set(re.findall(r'"([\w-]+)[^"]*[<>=]=[^"]*"', block.lower().replace("_", "-")))
        for name, block in blocks.items()
    }
    files, distributions = third_party_imports(), importlib.metadata.packages_distributions()
    imported = {
        name: {
            distribution.lower().replace("_", "-")
            for distribution in distributions.get(name, [name])
        }
        for name in files
    }
    missing = {
        name: files[name]
        for name, names in imported.items()
        if not names & set().union(*declared.values())
    }
    assert not missing
    assert len(declared["dependencies"]) > 5 and declared["dependencies"] <= set().union(
        *imported.values()
    )


@pytest.mark.parametrize(
    "folder, endings, columns",
    [("moeoff", {".py"}, 100), ("llamacpp_patches/src", {".h", ".cpp"}, 120)],
)
def test_no_line_is_wider_than_the_formatter_allows(folder, endings, columns):
    """Strings and comments, which formatters leave as they are."""
    wide = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in (ROOT / folder).rglob("*")
        if path.suffix in endings and path.name != "_abi.py"  # it is generated
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > columns
    ]
    assert not wide
