"""What the documentation says is what the program does."""

import re
import subprocess
import sys

import pytest

import moeoff
from helpers.files import ROOT

PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


def test_pages_about_options_are_up_to_date():
    import docs

    assert docs.main(["cli", "--check"]) is None


def test_result_pages_are_up_to_date():
    import results

    stale = [path.name for path, text in results.pages().items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    assert not stale, f"run make results: {stale}"


def test_every_measured_table_is_on_a_page():
    import results

    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    shown = [match["name"] for match in results.BLOCK.finditer(text)]
    linked = re.findall(r"\(data/([\w-]+)\.json\)", text)  # long tables are data
    assert len(shown) == len(re.findall(r"^<!-- (?:results|end) ", text, re.MULTILINE)) // 2, "a marker that is none"
    assert (set(shown) | set(linked) | set(results.SCENARIOS)) - set(results.GATHERED) == {path.stem for path in results.DATA.iterdir()}


def test_a_benchmark_writes_what_the_pages_are_made_from(tmp_path, monkeypatch, capsys):
    import results

    path = tmp_path / "new.json"
    monkeypatch.setattr(
        sys, "argv", ["/anywhere/scripts/bench/bench_x.py", "--model", "/models/m.gguf", "--trace", "a=/t/a.trace", "--json", str(path), "-n", "1 2"]
    )
    with results.ResultsFile(path) as file:
        table = file.table("speed", "Speed", ["limit", "`lru`: tok/s"])
        table.row("1 GiB", "1.0")
        with pytest.raises(ValueError):
            table.row("2 GiB")
        table.row('"two"', "")
    printed = capsys.readouterr().out
    monkeypatch.setattr(results, "DATA", tmp_path)
    page = results.block("new", None)
    assert results.read("new")["command"] == "python scripts/bench/bench_x.py --model m.gguf --trace a=a.trace -n '1 2'"
    assert printed.strip() == page[page.index("**Speed**") :].strip()
    assert results.block("new", "speed") == printed.split("\n\n")[1]
    assert results.block("new", "speed", "+") == page

    with pytest.raises(RuntimeError), results.ResultsFile(tmp_path / "broken.json"):
        raise RuntimeError
    assert not (tmp_path / "broken.json").exists()


def test_links_of_the_readme_and_docs():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists() or target.startswith("http"), f"{page.name}: {target}"


def test_paths_in_the_pages_exist():
    """Measured blocks tell what was typed at their commit, where scripts may have had other names."""
    import results

    wrong = []
    for page in PAGES:
        text = results.BLOCK.sub("", page.read_text())
        for path in re.findall(r"(?<![\w./-])((?:moeoff|scripts|tests|docs|llamacpp_patches)/[\w./-]*\w/?)(?![\w*<])", text):
            if not (ROOT / path).exists():
                wrong.append(f"{page.name}: {path}")
    assert not wrong


@pytest.mark.parametrize("name, given", [("completion", ""), ("chat", "How many apples?\nAnd pears?\n")])
def test_examples_run(name, given):
    script = ROOT / "docs" / "examples" / f"{name}.py"
    done = subprocess.run([sys.executable, str(script)], input=given, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 3


@pytest.mark.slow  # FastAPI is of the extra nightly
def test_fastapi_example_streams():
    sys.path.insert(0, str(ROOT / "docs" / "examples"))
    import fastapi_stream
    from fastapi.testclient import TestClient

    with TestClient(fastapi_stream.app) as client:
        reply = client.get("/say", params={"prompt": "User: How many apples?\nAssistant:", "max_tokens": 12})
        assert reply.status_code == 200 and len(reply.text.split()) > 3
        assert client.get("/stats").json()["demand_misses"] > 0
    fastapi_stream.llm.close()


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == moeoff.__version__
