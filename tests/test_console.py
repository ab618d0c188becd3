"""The loading bar: seen on a terminal although llama_cpp has pointed both descriptors elsewhere, and only if loading takes long."""

import sys

import pexpect

SCRIPT = """
import os, sys
from moeoff import console
console.LOADING_DELAY, console.LOADING_INTERVAL = {delay}, 0
null = os.open(os.devnull, os.O_WRONLY)
with console.loading_bar("demo.gguf", 1 << 30) as update:
    kept = os.dup(1), os.dup(2)
    os.dup2(null, 1), os.dup2(null, 2)
    update(0.0)
    update(0.25)
    update(0.5)
    os.dup2(kept[0], 1), os.dup2(kept[1], 2)
print("bar" if "rich" in sys.modules else "no bar")
"""


def run(delay: float) -> str:
    child = pexpect.spawn(sys.executable, ["-c", SCRIPT.format(delay=delay)], encoding="utf-8", dimensions=(24, 120), timeout=20)
    child.expect(pexpect.EOF)
    return child.before


def test_slow_load_shows_bytes_and_rate():
    output = run(0)
    assert "loading demo.gguf" in output and "0.5/1.0 GiB" in output.replace("512.0 MiB", "0.5") and "B/s" in output
    assert output.rstrip().endswith("bar") and "no bar" not in output


def test_fast_load_shows_nothing():
    assert run(3600).strip() == "no bar"
