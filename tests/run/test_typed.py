"""The commands of README and guides, page by page, typed as they stand there into a
terminal of 80 columns: each does what the page says.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

import moeoff
from helpers.files import PROSE, ROOT
from helpers.terminal import ENTERED, READING, plain

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs" / "guides").glob("*.md")))
COLUMNS = 80
MOEOFF = Path(sys.executable).with_name("moeoff")
# of the line below an answer, which is broken between words
_ANSWERED = r"generated\s+\d+,\s+\S+\s+tok/s"

# what is not typed, by a pattern of the command, and why
EXCEPT = {
    r"-hf |pip install|scripts/build/wheels": "a network",
    r"^(docker|MODELS=)": "Docker",
    r"^OPENAI_API_BASE_URL=": (
        "a package of gigabytes: tests/server/test_clients.py sends its requests"
    ),
    r"^(ray|serve run) ": "a cluster: tests/server/test_ray.py has one",
    r"^make (test|env)|^\. ": "what has made the environment that this test runs in",
    r"^make run": "test_a_fresh_clone_answers",
}
# fenced code that is not run, by a pattern of it, and why
NOT_RUN = {
    r"moeoff\.ray": "a cluster: tests/server/test_ray.py has one",
}
# what is said or written, by a pattern of the command; the first that fits
SAYS = {
    r"^moeoff run .*-p ": _ANSWERED,
    r"^moeoff run .*--memory (6|12)G": r"context of \d+ tokens, (6|12)\.00 GiB of memory\. /help",
    r"^moeoff run": r"context of \d+ tokens, .* of memory \(80% of what is available\)",
    r"^moeoff inspect .*--memory (6|12)G": (
        r"(6|12)\.00 GiB is enough at a context of \d+: 100% of the experts in memory, (about|at"
        r" most) \d+ tokens/s"
    ),
    r"^moeoff serve --models": r"serving \d+ models on http://\S+/v1",
    r"^moeoff serve": r"serving MODEL\.gguf on http://\S+/v1",
    r"^moeoff doctor": r"needs \d+ MiB at a context of",
    r"^moeoff calibrate .*--max-loss": (
        r"for moeoff run -m MODEL\.gguf --max-loss 1%|leaves the model lossless"
    ),
    r"^moeoff eval .*--max-loss": r"perplexity .*loss",
    r"^moeoff convert": r"MODEL\.experts\.gguf",
    r"^moeoff simulate": r"belady .*hit rate: share of slices found in memory",
}
# what is added to a command, so that it takes seconds, or nobody else's port
ADDED = {"moeoff calibrate": ["--minutes", "15", "--tokens", "3072"], "moeoff eval": ["--chunks", "1"], "moeoff serve": ["--port", "0"],
         "moeoff run": ["-n", "24"]}  # fmt: skip
# lines that may be longer than the terminal, and why
LONG = {r"^moeoff run": "an answer's lines are the model's"}


def commands(page: Path) -> list[str]:
    """The lines of a page that are typed: indented, no code of another language,
    without comments, put together where a backslash ends one.
    """
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).replace("\\\n", " ")
    lines = re.findall(r"(?<=\n\n)(?: {4}\S.*\n)+", text)
    return [
        re.sub(r"\s+", " ", re.sub(r"\s+#.*", "", line)).strip()
        for block in lines
        for line in block.splitlines()
    ]


def first(table: dict, line: str):
    return next((value for pattern, value in table.items() if re.search(pattern, line)), None)


def test_every_command_is_typed_or_has_a_reason():
    pages = {line: page.name for page in PAGES for line in commands(page)}
    assert len(pages) >= 30 and {"README.md", "serving.md", "policy.md"} <= set(pages.values())
    lost = [line for line in pages if first(EXCEPT, line) is None and first(SAYS, line) is None]
    assert not lost, lost
    for table in (EXCEPT, SAYS):
        for pattern in table:
            assert any(re.search(pattern, line) for line in pages), (
                f"{pattern}: no page has such a command"
            )


def fences(page: Path, language: str) -> list[str]:
    """Return the fenced code of a page in a language, except what `NOT_RUN` names."""
    found = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    return [code for code in found if not any(re.search(pattern, code) for pattern in NOT_RUN)]


FENCED = [page for page in PAGES if fences(page, "python") or fences(page, "sh")]


@pytest.mark.parametrize("page", FENCED, ids=lambda page: page.stem)
def test_fenced_code_runs(page, demo, tmp_path):
    """The Python of a page as one program, and its shell lines, beside a server if one
    is asked.
    """
    for name in ("MODEL.gguf", "model.gguf"):
        os.symlink(demo, tmp_path / name)
    python, shell = "\n".join(fences(page, "python")), "\n".join(fences(page, "sh"))
    # a free port, and no waiting for a server that nobody stops
    python = python.replace("parallel=4)", "parallel=4, port=0)").replace("server.wait()", "pass")
    if "a.trace" in python:
        run = [MOEOFF, *"run -m MODEL.gguf -p apples -n 8 --trace a.trace".split()]
        subprocess.run(run, cwd=tmp_path, check=True, timeout=120)
    with contextlib.ExitStack() as stack:
        if "127.0.0.1:8080" in python + shell:
            pytest.importorskip("openai")
            server = stack.enter_context(moeoff.Server(demo, memory="1G", port=0))
            url = server.url.removesuffix("/v1")
            python = python.replace("http://127.0.0.1:8080", url)
            shell = shell.replace("http://127.0.0.1:8080", url)
        for program, code in ((sys.executable, python), ("bash", shell)):
            if code:
                typed = [program, *(["-e"] if program == "bash" else []), "-c", code]
                done = subprocess.run(
                    typed,
                    cwd=tmp_path,
                    capture_output=True,
                    text=True,
                    timeout=300,
                )
                assert done.returncode == 0, done.stderr
                assert done.stdout.strip() and '"error"' not in done.stdout, done.stdout


@pytest.mark.slow
@pytest.mark.timeout(7200)  # a calibration within a loss tries every tier, minutes of one core each
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(first(EXCEPT, line) is None for line in commands(page))],
    ids=lambda page: page.stem,
)
def test_typed(page, grown, tmp_path):
    """One after the other, in one folder: what a command leaves the next one finds."""
    for name, source in (("MODEL.gguf", grown), ("OTHER", PROSE)):
        os.symlink(source, tmp_path / name)
    for line in dict.fromkeys(commands(page)):
        if first(EXCEPT, line) is None:
            _type(line, tmp_path)


def _type(line: str, folder: Path) -> None:
    words = shlex.split(line)
    words += next((more for name, more in ADDED.items() if line.startswith(name)), [])
    env = os.environ | {
        "XDG_CACHE_HOME": str(folder / "cache"),
        "TERM": "xterm",
        "PROMPT_TOOLKIT_NO_CPR": "1",
        "MOEOFF_MODELS": str(folder),  # this machine may have no other model
    }
    child = pexpect.spawn(
        str(Path(sys.executable).with_name(words[0])),
        words[1:],
        cwd=folder,
        dimensions=(40, COLUMNS),
        encoding="utf-8",
        timeout=2400,
        env=env,
    )
    ending, output = child.expect([r"Ctrl-D\s+leaves", r"Ctrl-C\s+ends", pexpect.EOF]), ""
    # what is drawn over later begins a line of its own
    output = child.before + (child.after + "\n" if ending < 2 else "")
    if ending == 0:  # a chat
        child.expect(READING)
        child.send("How many apples?\r")
        child.expect(ENTERED)
        child.expect(_ANSWERED)
        output += child.before + child.after
        child.expect(READING)
        child.send("\x04")
    elif ending == 1:  # a server
        child.sendintr()
    if ending < 2:
        child.expect(pexpect.EOF)
        output += child.before
    child.close()
    output = plain(re.sub(r"[^\n]*\r(?!\n)", "", output))  # without what was drawn over
    assert child.exitstatus == 0 and "Traceback" not in output, f"{line}\n{output}"
    assert re.search(first(SAYS, line), " ".join(output.split())), f"{line}\n{output}"
    if (
        made := next(
            (words[i + 1] for i, word in enumerate(words) if word in ("-o", "--plot", "--trace")),
            None,
        )
    ) is not None:
        assert (folder / made).exists(), line
    if first(LONG, line) is None:
        long = [text for text in output.splitlines() if len(text.rstrip()) > COLUMNS]
        assert not long, f"{line}\n" + "\n".join(long)


@pytest.mark.slow
def test_a_fresh_clone_answers(tmp_path):
    """`make run`, as README has it: with what an earlier build has left in the cache it
    takes a minute.
    """
    subprocess.run(["git", "clone", "--quiet", ROOT, tmp_path / "clone"], check=True)
    done = subprocess.run(
        ["make", "run"],
        cwd=tmp_path / "clone",
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0 and re.search(_ANSWERED, done.stderr), done.stdout + done.stderr
