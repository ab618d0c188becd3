"""Data of the results: commands that parse, commits as new as what was measured, enough
rounds.
"""

from __future__ import annotations

import functools
import re
import shlex
import subprocess
import sys

import pytest

import results
from helpers.files import ROOT

NAMES = sorted(path.stem for path in results.DATA.iterdir())
WORDS = "one two three four five six seven eight nine ten".split()

CLAIM = r"\b(\w+) rounds?\b([^.]*?)\]\((?:\.\./results/)?data/([\w-]+)\.json\)"


def git(*arguments: str) -> str:
    command = ["git", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@functools.cache
def help_of(script: str, *command: str) -> str | None:
    """Return the --help of a script's command, or None if there is none.

    Of a script whose dependency is not installed it returns the source.
    """
    if not (ROOT / script).exists():
        return None
    typed = [sys.executable, str(ROOT / script), *command, "--help"]
    done = subprocess.run(typed, capture_output=True, text=True, timeout=120)
    if "ModuleNotFoundError" in done.stderr:
        return (ROOT / script).read_text()
    return done.stdout if done.returncode == 0 else None


def parses(command: str) -> bool:
    """Return whether the command's script, subcommand and options exist in this tree."""
    _, script, *arguments = shlex.split(command)
    top = help_of(script)
    if top is None:
        return False
    has_commands = "COMMAND [ARGS]" in top
    text = help_of(script, *arguments[: int(has_commands)])
    if text is None:
        return False
    options = {part.partition("=")[0] for part in arguments if re.match(r"--?[a-z]", part)}
    return all(re.search(rf"(?<![\w-]){option}(?![\w-])", text) for option in options)


def changed_since(data: dict) -> str:
    """Return the first later commit that changed one of the data's paths, or an empty string.

    Commits of layout, names and comments alone (.git-blame-ignore-revs) do not count.
    """
    since = f"{data['commit'].removesuffix('-dirty')}..HEAD"
    commits = git("log", "--reverse", "--format=%H %h %s", since, "--", *data["paths"])
    ignored = (ROOT / ".git-blame-ignore-revs").read_text().split()
    found = (line.partition(" ") for line in commits.splitlines())
    return next((commit for full, _, commit in found if full not in ignored), "")


@pytest.fixture(scope="module")
def outdated() -> dict[str, str]:
    """Return why each data file is older than the tree, for those that are."""
    has_git = (ROOT / ".git").exists()
    if not has_git or git("rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("needs the history of the repository")
    found = {}
    for name in NAMES:
        data = results.read(name)
        if not parses(data["command"]):
            found[name] = f"its command no longer parses: {data['command']}"
        elif data["commit"].endswith("-dirty"):
            found[name] = f"measured with changes that no commit has, at {data['commit']}"
        elif commit := changed_since(data):
            found[name] = f"measured at {data['commit']}, before {commit}"
    return found


def test_data_are_as_new_as_what_they_measure_or_listed(outdated):
    older = {name for names in results.OLDER.values() for name in names.split()}
    unlisted = {name: why for name, why in outdated.items() if name not in older}
    assert not unlisted, "measure these again, or name them in results.OLDER with the reason"
    assert not older - set(outdated), "measured again: take them out of results.OLDER"


def test_every_path_of_data_exists_and_is_its_command_s():
    for name in NAMES:
        data = results.read(name)
        paths = data["paths"]
        assert paths and all((ROOT / path).exists() for path in paths), name
        if parses(data["command"]):
            assert paths == results.paths(data["command"]), name


def test_pages_claim_no_more_rounds_than_data_have():
    """A sentence that says "five rounds" and links data."""
    wrong, n_claims = [], 0
    for page in (ROOT / "docs").rglob("*.md"):
        claims = re.findall(CLAIM, page.read_text())
        for word, between, name in claims:
            claimed = WORDS.index(word) + 1 if word in WORDS else None
            measured = results.n_rounds(results.read(name))
            if claimed is None or measured is None or "](" in between:
                continue
            n_claims += 1
            if measured < claimed:
                wrong.append(f"{page.name}: {claimed} rounds, {name} has {measured}")
    assert not wrong
    assert n_claims >= 5


def test_pages_that_link_data_of_few_rounds_say_so():
    """Data of fewer than five rounds, by sections of the pages."""
    wrong = []
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for section in re.split(r"\n(?=## )", page.read_text()):
            for name in set(re.findall(r"\]\((?:\S*/)?data/([\w-]+)\.json\)", section)):
                n = results.n_rounds(results.read(name))
                if n is None or n >= results.ENOUGH:
                    continue
                said = rf"(?i)\b(?:{n}|{WORDS[n - 1]}) (?:rounds?|runs?)\b"
                if not re.search(said, section):
                    wrong.append(f"{page.name}: {name} has {n} rounds")
    assert not wrong


def test_commands_of_pages_parse():
    """Indented commands of scripts; those of README and guides are run (test_typed.py)."""
    wrong, n_commands = [], 0
    for page in (ROOT / "docs").rglob("*.md"):
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"^ {4}(python scripts/.*?)(?: +#.*)?$", text, re.MULTILINE):
            n_commands += 1
            if not parses(line):
                wrong.append(f"{page.name}: {line}")
    assert not wrong
    assert n_commands >= 20


def test_a_command_that_no_longer_parses_is_found():
    assert parses("python scripts/research/speed.py memory -m M.gguf --rounds 5 --stock")
    assert not parses("python scripts/research/speed.py live -m M.gguf")
    assert not parses("python scripts/research/speed.py memory --no-such-option 3")
    assert not parses("python scripts/bench/bench_caches.py table")
