"""Completion in real shells: what a person gets who types and presses Tab."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from moeoff.cli.shell_completion import SHELLS

BIN = str(Path(sys.executable).parent)
START = {"bash": ["bash", "--norc", "--noprofile", "-i"], "zsh": ["zsh", "-f", "-i"], "fish": ["fish", "--no-config", "-i"]}
LOAD = {
    "bash": 'eval "$(moeoff shell-completion bash)"',
    "zsh": 'autoload -U compinit && compinit -D -u; eval "$(moeoff shell-completion zsh)"',
    "fish": "moeoff shell-completion fish | source",
}


def environment(home: Path) -> dict[str, str]:
    return {"HOME": str(home), "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "TERM": "dumb", "LANG": "C.UTF-8", "XDG_CONFIG_HOME": str(home)}


@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes(shell, tmp_path):
    """A command's rest, an option's rest, a file's rest."""
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "remarkable.gguf").touch()
    child = pexpect.spawn(START[shell][0], START[shell][1:], env=environment(tmp_path), cwd=str(tmp_path), encoding="utf-8", timeout=30, dimensions=(40, 150))
    try:
        child.sendline(LOAD[shell])
        child.sendline("echo loa''ded")
        child.expect("loaded")
        for typed, rest in (("moeoff insp", "ect"), ("moeoff run --expert-mem", "ory"), ("moeoff inspect rema", "rkable.gguf")):
            child.send(f"{typed}\t")
            child.expect(f"{rest}")
            child.send("\x03")  # the line is given up
            child.sendline("echo ne''xt")
            child.expect("next")
    finally:
        child.close(force=True)


def test_fish_reads_it(tmp_path):
    if not shutil.which("fish"):
        pytest.skip("fish is not installed")
    done = subprocess.run(
        ["fish", "--no-config", "-c", f"{LOAD['fish']}; complete -C 'moeoff calib'"], env=environment(tmp_path), capture_output=True, text=True, timeout=60
    )
    assert done.stdout.split("\t")[0].strip() == "calibrate", done.stderr
