"""Ordinary mistakes of somebody's first hour: what was typed, the exit code, and the sentence. No traceback, no word of Python, one way out."""

import os

import pytest
from click.testing import CliRunner

from helpers.files import DEMO
from moeoff.cli.main import main

M = str(DEMO)
MISTAKES = [
    # the model
    ("run missing.gguf -p x", 1, "missing.gguf: cannot be read: No such file"),
    ("run . -p x", 1, "cannot be read: Is a directory"),
    (f"run {__file__} -p x", 1, "not a GGUF file"),
    (f"run {M} -m {M} -p x", 1, "give MODEL or -m, not both"),
    (f"run {M} -hf a/b -p x", 1, "give -m or -hf, not both"),
    ("run -hf nonsense -p x", 1, "expected ORG/REPO"),
    ("run --live -p x", 1, "standard output must be a terminal"),
    (f"run {M}", 1, "give a prompt with -p, with -f or on standard input"),
    ("inspect", 2, "Missing MODEL: the GGUF, as MODEL or -m MODEL"),
    ("calibrate", 2, "Missing MODEL"),
    ("convert", 2, "Missing MODEL"),
    ("merge", 2, "Missing MODEL"),
    (f"merge {M} -o /nowhere/x.gguf", 1, "nothing to merge"),
    (f"calibrate {M} -o {M}.npz", 1, "lies in moeoff's own package"),
    ("verify missing.experts.gguf", 1, "cannot be read"),
    (f"verify {M}", 1, "sidecar"),
    # memory
    ("run -p x --memory 6", 1, "--memory: 6 is a number of bytes: was 6G meant?"),
    ("run -p x --memory soon", 1, "--memory: not a size: 'soon'; write for example 6G"),
    ("run -p x --memory 6X", 1, "write for example 6G"),
    ("run -p x --memory -1G", 1, "not a size"),
    ("run -p x --memory 0", 1, "must be positive"),
    ("run -p x --memory 150%", 1, "between 0% and 100%"),
    ("run -p x --memory 50M", 1, "a budget of 50 MiB is too small: this model needs"),
    ("run -p x --memory 50M", 1, "; that is: "),
    ("run -p x --expert-memory 1K", 1, "needs at least 0.09 MiB: give --expert-memory 1M"),
    ("run -p x --memory 1G --expert-memory 1G", 1, "give --memory or --expert-memory, not both"),
    ("report --memory 50M -o /tmp/x.html", 1, "this model needs"),
    (f"bench {M} --memory soon", 2, "not a size"),
    (f"inspect {M} --memory 6 --probe off", 1, "was 6G meant?"),
    ("run -p x --vram 2G", 1, "--vram has no effect while no layer goes to the GPU: give --n-gpu-layers N"),
    ("run -p x --vram 0%", 1, "between 0% and 100%"),
    ("run -p x --vram-mode fast", 1, "--vram-mode: one of cooperative"),
    # the context
    ("run -p x -c 7", 1, "-c: at least 8 tokens"),
    ("run -p x -c -1", 1, "-c: at least 0, not -1"),
    ("run -p x -c many", 1, "-c: a whole number, not 'many'"),
    ("run -p x -c 3000000000", 1, "-c: 0 to 2147483647"),
    (f"bench {M} -p 512 -c 64", 1, "too small for a test of 512"),
    # options
    ("run -p x --magic", 2, "No such option"),
    ("run -p x --strategy magic", 1, "unknown strategy 'magic'; there are: auto"),
    ("run -p x -t 0", 1, "-t: at least 1, not 0"),
    ("run -p x -t all", 1, "-t: a whole number, not 'all'"),
    ("run -p x -fa maybe", 1, "-fa: on or off, not 'maybe'"),
    ("run -p x -ctk q9", 1, "-ctk: one of f32"),
    ("run -p x -ctv q4_0 -fa off", 1, "-ctv q4_0: quantized values need flash attention"),
    ("run -p x --warm maybe", 1, "--warm: on or off"),
    ("run -p x --io-threads 0", 1, "--io-threads: 1 to 64, not 0"),
    ("run -p x --keep 4", 1, "--keep has no effect without --context-shift"),
    ("run -p x --top-p 2", 1, "--top-p: 0 to 1, not 2"),
    ("run -p x --temp hot", 1, "--temp: a number, not 'hot'"),
    ("run -p x -n 0", 1, "at least 1 token"),
    ("run -p x --repeat-penalty 0", 1, "--repeat-penalty: more than 0"),
    ("run -p x --rpc host", 1, "llama.cpp's RPC server"),
    ("run -p x --mlock", 2, "--mlock: experts come and go"),
    ("run -p x --grammar x", 2, "moeoff serve takes it"),
    ("run -p x --chat-template llama3", 1, "a Jinja template or chatml, not 'llama3'"),
    ("run -p x --raw --system y", 1, "--system: without a chat template"),
    # the prompt and files
    ("run -p x -f y", 1, "give -p or -f, not both"),
    ("run -f missing.txt", 1, "missing.txt: cannot be read"),
    (f"run -f {M}", 1, "is not UTF-8"),
    ("run -p x --stats-json /nowhere/s.json", 1, "there is no such folder"),
    ("run -p x --stats-json /tmp", 2, "is a directory"),
    ("run -p x --trace /nowhere/t", 1, "there is no such folder"),
    ("run -p x --prompt-cache-ro", 1, "give one"),
    ("run -p x --profile missing.npz", 1, "missing.npz"),
    # lower precision
    ("run -p x --max-loss much", 1, "--max-loss: not a loss: 'much'; write for example 1%"),
    ("run -p x --max-loss 1%", 1, "moeoff calibrate"),
    ("run -p x --tier Q2_K", 1, "which moeoff convert makes: give --experts FILE"),
    ("run -p x --t1 0.5", 1, "as Q2_K: give --low-tier NAME"),
    (f"eval {M}", 2, "Missing option '--text'"),
    (f"eval {M} --text missing.txt", 1, "missing.txt"),
    ("simulate missing.trace", 2, "'missing.trace' does not exist"),
    (f"bench {M} -p 0 -n 0", 1, "there is nothing to measure: give -p, -n or -pg"),
    ("serve missing.gguf", 1, "missing.gguf: cannot be read"),
    (f"serve {M} --port 99999", 1, "--port: 0 to 65535"),
    ("doctor missing.gguf", 1, "does not exist"),
    ("sing", 2, "No such command"),
]


@pytest.mark.parametrize("typed, code, words", MISTAKES, ids=[f"{i}" for i in range(len(MISTAKES))])
def test_mistakes(typed, code, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = CliRunner().invoke(main, typed.split(), prog_name="moeoff")
    assert done.exit_code == code and words in done.output, done.output
    assert "Traceback" not in done.output and "`" not in done.output and "=..." not in done.output
    assert [name for name in os.listdir(tmp_path) if name != "moeoff"] == []  # nothing is left behind
