"""What the documentation says is what the program does."""

import re
import subprocess
import sys

import pytest

import moeoff
from helpers.files import ROOT


def test_cli_page_is_up_to_date():
    import make_cli_docs

    assert make_cli_docs.PAGE.read_text() == make_cli_docs.page(), "run scripts/make_cli_docs.py"


def test_links_of_the_readme_and_docs():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert (page.parent / target).exists() or target.startswith("http"), f"{page.name}: {target}"


@pytest.mark.parametrize("name, given", [("completion", ""), ("chat", "How many apples?\nAnd pears?\n")])
def test_examples_run(name, given):
    script = ROOT / "docs" / "examples" / f"{name}.py"
    done = subprocess.run([sys.executable, str(script)], input=given, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) >= 3


def test_fastapi_example_streams():
    pytest.importorskip("fastapi", reason="the server extra is not installed")
    pytest.importorskip("httpx", reason="the test client needs httpx")
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
