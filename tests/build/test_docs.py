"""The documentation agrees with the program."""

import ast
import importlib.util
import re
import subprocess
import sys

import click
import httpx
import pytest

import moeoff
from helpers.files import ROOT
from helpers.servers import Service
from moeoff.cli.main import main

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
# pages of those who use moeoff
READERS = [ROOT / "README.md", *(ROOT / "docs" / "guides").glob("*.md")]
OPTION = re.compile(r"(?<= )--?[a-z][\w-]*")
# ours alone: the field has others (docs/glossary.md)
PRIVATE = re.compile(
    r"\b(arenas?|lent|lend(er|ing|s)?|contracts?|strangers?|twins?|habits?|remarks?|mended|lanes?|shape's|what"
    r" no|such that are|those that there are"
    r"|as \d+[GM]|as Q\d\w*)\b"
)


def hand_written(page):
    """A page without what is measured or typed: the blocks of `make results`, code, and
    where links lead.
    """
    import results

    text = re.sub(
        r"```.*?```|<!--.*?-->", "", results.BLOCK.sub("", page.read_text()), flags=re.DOTALL
    )
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"^    .*$", "", text, flags=re.MULTILINE))


def sentences(page):
    """The number of words of each, with the sentence; of lists and paragraphs, not of
    tables.
    """
    prose = re.sub(r"^(\||#|!\[).*$", "", hand_written(page), flags=re.MULTILINE)
    for block in re.split(r"\n\s*\n|\n(?=- |\d+\. )", prose):
        words = re.sub(r"e\.g\. ", "e.g.", " ".join(block.split()).lstrip("- "))
        yield from (
            (n, sentence)
            for sentence in re.split(r"(?<=[.!?:])[*)\]]* ", words)
            if (n := len(sentence.split())) > 1
        )


def test_pages_about_options_are_up_to_date():
    import docs

    assert docs.main(["cli", "--check"]) is None


def test_result_pages_are_up_to_date():
    import results

    stale = [
        path.name
        for path, text in results.pages().items()
        if not path.exists() or path.read_text(encoding="utf-8") != text
    ]
    assert not stale, f"run make results: {stale}"


def test_every_measured_table_is_on_a_page():
    import results

    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    shown = [match["name"] for match in results.BLOCK.finditer(text)]
    linked = re.findall(r"\((?:../results/)?data/([\w-]+)\.json\)", text)  # long tables are data
    assert len(shown) == len(re.findall(r"^<!-- (?:results|end) ", text, re.MULTILINE)) // 2, (
        "a marker that is none"
    )
    assert (set(shown) | set(linked) | set(results.SCENARIOS)) - set(results.GATHERED) == {
        path.stem for path in results.DATA.iterdir()
    }


def test_a_benchmark_writes_what_the_pages_are_made_from(tmp_path, monkeypatch, capsys):
    import results

    path = tmp_path / "new.json"
    monkeypatch.setattr(
        sys,
        "argv",
        [
            "/anywhere/scripts/bench/bench_x.py",
            "--model",
            "/models/m.gguf",
            "--trace",
            "a=/t/a.trace",
            "--json",
            str(path),
            "-n",
            "1 2",
        ],
    )
    with results.ResultsFile(path) as file:
        table = file.table("speed", "Speed", ["limit", "`lru`: tok/s"])
        table.row("1 GiB", "1.0")
        with pytest.raises(ValueError):
            table.row("2 GiB")
        table.row('"two"', "")
    printed = capsys.readouterr().out
    monkeypatch.setattr(results, "DATA", tmp_path)
    assert (
        results.read("new")["command"]
        == "python scripts/bench/bench_x.py --model m.gguf --trace a=a.trace -n '1 2'"
    )
    table, command = results.block("new", "speed").split("\n\n")
    assert table + "\n" == printed.split("\n\n")[1]
    assert command.startswith("`python scripts/bench/bench_x.py --model m.gguf")

    with pytest.raises(RuntimeError), results.ResultsFile(tmp_path / "broken.json"):
        raise RuntimeError
    assert not (tmp_path / "broken.json").exists()


def anchors(page):
    """Return the anchors of a page's headings, as a code host makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {
        re.sub(r"[^\w -]", "", re.sub(r"\]\([^)]*\)", "]", heading).lower()).replace(" ", "-")
        for heading in headings
    }


def test_links_of_the_readme_and_docs():
    for page in PAGES:
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]+))?\)", page.read_text()):
            if not target.startswith("http"):
                path = page.parent / target if target else page
                assert path.exists() and (not anchor or anchor in anchors(path)), (
                    f"{page.name}: {target}#{anchor}"
                )


def test_sentences_are_short_and_in_the_words_of_the_field():
    long = [
        f"{page.name}: {n}: {sentence}"
        for page in READERS
        for n, sentence in sentences(page)
        if n > 35
    ]
    assert not long
    lengths = [n for page in READERS for n, _ in sentences(page)]
    assert sum(lengths) / len(lengths) < 18
    # which says what code calls them
    pages = [page for page in PAGES if page.name != "glossary.md"]
    private = [
        f"{page.name}: {match[0]}"
        for page in pages
        for match in PRIVATE.finditer(re.sub(r"`[^`]*`", "", hand_written(page)))
    ]
    assert not private


def names_in_code():
    """Return the identifiers and modules of the package, the scripts and the native sources,
    but not words of comments and strings.
    """
    names = set()
    for path in [*(ROOT / "moeoff").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        names.add(path.stem)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for field in ("name", "id", "attr", "arg"):
                name = getattr(node, field, None)
                names |= {name} if isinstance(name, str) else set()
    for path in (ROOT / "llamacpp_patches" / "src").rglob("*.*"):
        code = re.sub(r"//.*|\"(\\.|[^\"\\])*\"", "", path.read_text(encoding="utf-8"))
        names |= set(re.findall(r"[A-Za-z_]\w+", code))
    return names


def words_of(name):
    """Return a text in which each word of a name, in lower case, stands between spaces."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return f" {' '.join(words).lower()} "


def test_terms_of_the_glossary_are_names_in_code():
    """A term is spelled in a name as it is in the glossary, or the glossary gives the name."""
    text = (ROOT / "docs" / "glossary.md").read_text()
    names = names_in_code()
    spelled = "".join(map(words_of, names))
    rows = re.findall(r"^\| (\*\*.+?) \| ", text, re.MULTILINE)
    assert len(rows) > 35
    missing = []
    for row in rows:
        given = re.search(r"in code: `(\w+)`", row)
        if given and given[1] not in names:
            missing.append(given[1])
        for term in [] if given else re.findall(r"\*\*(.+?)\*\*", row):
            if not re.search(rf" {term.lower()}s? ", spelled):
                missing.append(term)
    source = "".join(path.read_text() for path in (ROOT / "moeoff").rglob("*.py"))
    others = re.findall(r"`([^`]+)`", re.sub(r"in code: `\w+`", "", text))
    for name in others:  # options, commands and values
        words = re.findall(r"[A-Za-z]\w+", name.replace("--", "").replace("-", "_"))
        missing += [word for word in words if not re.search(rf"\b{word}\b", source)]
    assert not missing


def test_terms_have_the_glossary_s_form():
    """No page and no docstring joins or hyphenates a term of several words."""
    glossary = ROOT / "docs" / "glossary.md"
    terms = re.findall(r"\*\*(\w+(?: \w+)+)\*\*", glossary.read_text())
    assert len(terms) > 10
    joined = "|".join(
        f"[{term[0]}{term[0].upper()}]{term[1:].replace(' ', '-?')}" for term in terms
    )
    other = re.compile(rf"\b({joined})\b")
    texts = {page: hand_written(page) for page in PAGES}
    for path in (ROOT / "moeoff").rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
        texts[path] = "\n".join(ast.get_docstring(n) or "" for n in nodes if isinstance(n, kinds))
    wrong = [
        f"{path.name}: {match[0]}"
        for path, text in texts.items()
        for match in other.finditer(re.sub(r"`[^`]*`", "", text))
    ]
    assert not wrong


def test_numbers_have_a_source():
    """Cells that are typed on a page of results stand in data that the page links; a
    speed in README or guides stands above a link to the results.
    """
    import results

    wrong = []
    for page in (ROOT / "docs" / "results").glob("*.md"):
        text = page.read_text()
        linked = re.findall(r"\((?:../results/)?data/([\w-]+)\.json\)", text)
        names = {*linked, *(match["name"] for match in results.BLOCK.finditer(text))} - set(
            results.GATHERED
        )
        data = "".join((results.DATA / f"{name}.json").read_text() for name in names) + str(
            results.SHAPES
        )
        known = set(map(float, re.findall(r"\d+(?:\.\d+)?", data.replace(",", ""))))
        rows = re.findall(r"^\|.*$", hand_written(page), re.MULTILINE)
        cells = re.findall(
            r"(?<![\w.§-])(?:\d+\.\d+|\d{1,3}(?:,\d{3})+)\b",
            re.sub(r"§\S+|`[^`]*`", "", "\n".join(rows)),
        )
        wrong += [
            f"{page.name}: {cell}" for cell in cells if float(cell.replace(",", "")) not in known
        ]
    for page in READERS:
        for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE):
            prose = re.sub(r"```.*?```|<!--.*?-->|\n    [^\n]*", "", section, flags=re.DOTALL)
            if (
                re.search(r"\d (tok/s|[MG]B/s|MB a token)|\d times as fast|\d s for", prose)
                and "results/" not in section
            ):
                wrong.append(f"{page.name}: {section.splitlines()[0]}")
    assert not wrong


def test_paths_and_commands_in_the_pages_exist():
    """Measured blocks tell what was typed at their commit, where scripts may have had
    other names.
    """
    import results

    wrong = []
    for page in PAGES:
        text = results.BLOCK.sub("", page.read_text())
        for path in re.findall(
            r"(?<![\w./-])((?:moeoff|scripts|tests|docs|llamacpp_patches)/[\w./-]*\w/?)(?![\w*<])",
            text,
        ):
            if not (ROOT / path).exists():
                wrong.append(f"{page.name}: {path}")
        typed = text.replace("\\\n", " ")
        for script, command, arguments in re.findall(
            r"python (scripts/\S+\.py)(?: ([a-z][\w-]+)(?![\w.=]))?([^`\n#]*)", typed
        ):
            if not re.search(rf"(def |[\"|]|\.py ){command}\b", (ROOT / script).read_text()):
                wrong.append(f"{page.name}: {script} {command}")
            # a command's options may stand in a module beside it
            source = "".join(path.read_text() for path in (ROOT / script).parent.glob("*.py"))
            wrong += [
                f"{page.name}: {script} {option}"
                for option in OPTION.findall(arguments)
                if not re.search(rf"[\"\[ |]{option}[\"\] |=]", source)
            ]
        for name, arguments in re.findall(
            r"(?:^    |`)moeoff ([a-z]+)( [^`\n#]*)", typed, re.MULTILINE
        ):
            options = {
                option
                for parameter in main.get_command(click.Context(main), name).params
                for option in parameter.opts
            }
            wrong += [
                f"{page.name}: moeoff {name} {option}"
                for option in OPTION.findall(arguments)
                if option not in options and name != "serve"
            ]
    assert not wrong


def head_of(path):
    """Return the first comment of a native file, or "" if an include or code comes first."""
    sign = "# " if path.suffix == ".cmake" else "// "
    head = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.startswith(sign):
            head.append(line.removeprefix(sign))
        elif head or line.startswith("#include") or line and not line.startswith("#"):
            break
    return " ".join(head)


def test_native_files_begin_with_what_they_are():
    """A .cpp file may leave that to the header of its name."""
    folder = ROOT / "llamacpp_patches" / "src"
    heads = {}
    for path in folder.rglob("moeoff*.*"):
        name = path.relative_to(folder).with_suffix("")
        heads[name] = max(heads.get(name, ""), head_of(path), key=len)
    assert len(heads) > 40
    assert not [str(name) for name, head in heads.items() if len(head.split()) < 5]
    design = (ROOT / "docs" / "internals" / "design.md").read_text()
    assert {name.parts[0] for name in heads} == set(re.findall(r"^    ([a-z-]+)/ ", design, re.M))


def test_contributing_lists_every_program():
    scripts = ROOT / "scripts"
    section = re.search(r"## Scripts\n.*?\n## ", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)[
        0
    ]
    programs = {
        str(path.relative_to(scripts))
        for path in scripts.rglob("*.*")
        if path.suffix == ".sh" or path.suffix == ".py" and "__main__" in path.read_text()
    }
    assert set(re.findall(r"`([\w/]+\.(?:py|sh))`", section)) == programs


@pytest.mark.parametrize(
    "name, lines", [("completion", ""), ("chat", "How many apples?\nAnd pears?\n")]
)
def test_examples_run(name, lines):
    script = ROOT / "docs" / "examples" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, str(script)], input=lines, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 3


def installed(name: str) -> pytest.MarkDecorator:
    """Skip a test without a package of the extra nightly."""
    missing = importlib.util.find_spec(name) is None
    return pytest.mark.skipif(
        missing, reason=f"{name} is not installed: it is of the extra nightly"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, lines",
    [
        pytest.param("langchain_chat", 1, marks=installed("langchain_openai")),
        pytest.param("llamaindex_chat", 2, marks=installed("llama_index")),
    ],
)
def test_examples_ask_a_server(name, lines, demo):
    with Service(demo, expert_memory=4 << 20, n_ctx=1024) as server:
        script = str(ROOT / "docs" / "examples" / f"{name}.py")
        done = subprocess.run(
            [sys.executable, script, f"{server.url}/v1"],
            capture_output=True,
            text=True,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    answers = [line for line in done.stdout.splitlines() if line.strip()]
    assert len(answers) >= lines and "legs" in done.stdout


@pytest.mark.slow
@installed("uvicorn")
@installed("fastapi")
def test_fastapi_example_streams():
    command = [
        sys.executable,
        "-m",
        "uvicorn",
        "fastapi_stream:app",
        "--port",
        "0",
        "--no-access-log",
    ]
    with subprocess.Popen(
        command, cwd=ROOT / "docs" / "examples", stderr=subprocess.PIPE, text=True
    ) as app:
        try:
            url = next(
                match[0]
                for line in app.stderr
                if (match := re.search(r"http://127\.0\.0\.1:\d+", line))
            )
            params = {"prompt": "User: How many apples?\nAssistant:", "max_tokens": 12}
            with httpx.stream("GET", f"{url}/say", params=params, timeout=300) as reply:
                pieces = list(reply.iter_text())
            assert reply.status_code == 200 and len(pieces) > 3 and len("".join(pieces).split()) > 3
            assert httpx.get(f"{url}/stats", timeout=300).json()["demand_misses"] > 0
        finally:
            app.terminate()


def test_changelog_keeps_its_form_and_begins_with_this_version():
    """The form is https://keepachangelog.com's."""
    text = (ROOT / "CHANGELOG.md").read_text()
    first = re.search(r"^## \[(.+?)\]", text, re.MULTILINE)[1]
    assert first == moeoff.__version__ or (
        first == "Unreleased" and f"release will be {moeoff.__version__}" in text
    )
    kinds = set(re.findall(r"^### (.+)$", text, re.MULTILINE))
    assert kinds and kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
