"""The commands of README and guides, typed as they stand there into a terminal of 80 columns: each does what the page says, or says why not here."""

import os
import re
import shlex
import sys
from pathlib import Path

import pexpect
import pytest

from helpers.files import DEMO, PROSE, ROOT

PAGES = ("README.md", "docs/guides/start.md", "docs/guides/memory.md")
NEEDS = re.compile(r"ORG/REPO|--vram|-ngl|OLD\.gguf|SECRET|serve|--max-loss|--compare-stock")  # a network, a GPU, hours, or another test's
COMMANDS = sorted({
    re.sub(r" +#.*", "", line.strip()) for page in PAGES for line in (ROOT / page).read_text().splitlines() if line.startswith("    moeoff ")
})  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in COMMANDS if not NEEDS.search(line)])
def test_typed(line, tmp_path):
    for name, source in (("MODEL.gguf", DEMO), ("FILE", PROSE), ("prose.txt", PROSE)):
        os.symlink(source, tmp_path / name)
    words = shlex.split(line)
    if words[1] == "calibrate":
        words += ["--tokens", "512"]
    if words[1] == "eval":
        words += ["--chunks", "1"]
    child = pexpect.spawn(str(Path(sys.executable).with_name("moeoff")), words[1:], cwd=tmp_path, dimensions=(40, 80), encoding="utf-8", timeout=100,
                          env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"})  # fmt: skip
    if child.expect([r"Ctrl-D leaves", pexpect.EOF]) == 0:  # a chat
        child.expect(">>>")
        child.send("\x04")
        child.expect(pexpect.EOF)
    child.wait()
    assert child.exitstatus == 0 and "Traceback" not in child.before, child.before
    if "-o" in words:
        assert (tmp_path / words[words.index("-o") + 1]).exists()
