"""Ordinary mistakes of somebody's first hour: what was typed, the exit code, and the
sentence. No traceback, no word of Python, one way out.
"""

import os
import pwd
import shlex
import subprocess
import tempfile

import pytest
from click.testing import CliRunner

from helpers.files import COMMAND, DEMO, SMALL_TRACE
from moeoff.cli.main import main

M = str(DEMO)
MISTAKES = [
    # the model
    (f"run {M} -m {M} -p x", 1, "give MODEL or -m, not both"),
    (f"run {M} -hf a/b -p x", 1, "give -m or -hf, not both"),
    ("run -hf nonsense -p x", 1, "expected ORG/REPO"),
    (f"run {M}", 1, "expected a prompt: give it with -p, with -f"),
    ("inspect", 2, "Missing MODEL: the GGUF, as MODEL or -m MODEL"),
    ("calibrate", 2, "Missing MODEL"),
    ("convert", 2, "Missing MODEL"),
    (f"convert {M} -o /nowhere/x.gguf", 1, "there is no such folder"),
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
    ("run -p x --memory 50M", 1, " for experts: give --memory "),
    ("run -p x --expert-memory 1K", 1, "needs at least 0.09 MiB: give --expert-memory 1M"),
    ("run -p x --memory 1G --expert-memory 1G", 1, "give --memory or --expert-memory, not both"),
    (f"bench {M} --memory soon", 2, "not a size"),
    (f"inspect {M} --memory 6 --probe off", 1, "was 6G meant?"),
    (
        "run -p x --vram 2G",
        1,
        "--vram has no effect while no layer goes to the GPU: give --n-gpu-layers N",
    ),
    ("run -p x -ngl 1 --vram 1G", 1, "no GPU backend"),
    # the context
    ("run -p x -c -1", 1, "-c: expected at least 0, got -1"),
    ("run -p x -c 3000000000", 1, "-c: expected 0 to 2147483647"),
    (f"bench {M} -p 512 -c 64", 1, "too small for a test of 512"),
    # options
    ("run -p x --magic", 1, "--magic: neither moeoff run nor llama-cli has such an option"),
    ("run -p x --strategy magic", 1, "unknown strategy 'magic', expected one of auto"),
    ("run -p x -t 0", 1, "-t: expected at least 1, got 0"),
    ("run -p x -fa maybe", 1, "-fa: expected on or off, got 'maybe'"),
    ("run -p x -ctk q9", 1, "-ctk: expected one of f32"),
    ("run -p x --warm maybe", 1, "--warm: expected on or off"),
    ("run -p x --io-threads 0", 1, "--io-threads: expected 1 to 64, got 0"),
    ("run -p x --top-p 2", 1, "--top-p: expected 0 to 1, got 2"),
    ("run -p x --temp hot", 1, "--temp: expected a number, got 'hot'"),
    ("run -p x -n 0", 1, "expected at least 1 token"),
    ("run -p x --repeat-penalty 0", 1, "--repeat-penalty: must be greater than 0"),
    ("run -p x --stop ''", 1, "--stop: expected a text, got an empty one"),
    ("run -p x --rpc host", 1, "llama.cpp's RPC backend"),
    ("run -p x --grammar x", 1, "failed to parse grammar"),
    ("run -p x --port 1", 1, "--port: moeoff serve takes it"),
    ("run -p x --chat-template llama3", 1, "expected a Jinja template or chatml, got 'llama3'"),
    ("run -p x --raw --system y", 1, "--system: has no effect with --raw"),
    # the prompt and files
    (f"run -p '{'word ' * 300}'", 1, "tokens, expected fewer than the context's 256"),
    ("run -p x -f y", 1, "give -p or -f, not both"),
    ("run -f missing.txt", 1, "missing.txt: cannot be read"),
    (f"run -f {M}", 1, "is not UTF-8"),
    ("run -p x --stats-json /nowhere/s.json", 1, "there is no such folder"),
    ("run -p x --stats-json /tmp", 2, "is a directory"),
    ("run -p x --trace /nowhere/t", 1, "there is no such folder"),
    ("run -p x --stats-json /nowhere/x", 1, "there is no such folder"),
    ("run -p x --profile missing.npz", 1, "missing.npz"),
    # lower precision
    ("run -p x --max-loss 1%", 1, "moeoff calibrate"),
    ("run -p x --tier Q2_K", 1, "--tiers Q2_K makes one"),
    ("run -p x --t1 0.5", 1, "as Q2_K: give --low-tier NAME"),
    (f"eval {M}", 2, "Missing option '--text'"),
    (f"eval {M} --text missing.txt", 1, "missing.txt"),
    ("simulate missing.trace", 2, "'missing.trace' does not exist"),
    (f"bench {M} -p 0 -n 0", 1, "nothing to measure: give -p or -n"),
    ("serve missing.gguf", 1, "missing.gguf: cannot be read"),
    (f"serve {M} --port 99999", 1, "--port: expected 0 to 65535"),
    (f"serve {M} --parallel 300", 1, "--parallel: expected 1 to 256, got 300"),
    (f"serve {M} -c 2000000000", 1, "for the KV cache at 2000000000 tokens"),
    (f"serve {M} --memory 1M", 1, "too small"),
    (f"serve {M} --expert-memory 1K", 1, "too small"),
    ("doctor missing.gguf", 1, "does not exist"),
    ("sing", 2, "No such command"),
    # the order of words
    (f"{M} run", 2, "expected a command first, e.g. moeoff run "),
    (f"-m {M} -p x", 2, "-m: expected a command first, e.g. moeoff run -m ..."),
    ("missing.gguf", 2, "expected a command first"),
    ("RUN -p x", 2, "Did you mean moeoff run?"),
    ("chat", 2, "No such command 'chat'. Did you mean moeoff run?"),
    ("server", 2, "Did you mean moeoff serve?"),
    ("pull org/repo", 2, "Did you mean moeoff run -hf ORG/REPO?"),
    ("help", 2, "Did you mean moeoff --help?"),
    ("run 'What is 2 + 3?'", 1, "What is 2 + 3?: no such file; give a prompt with -p"),
    (
        f"run {M} 'how many?' now",
        2,
        "'how many?' now: unexpected argument: quote a path with spaces, give a prompt with -p",
    ),
    (f"run {M} ''", 2, "'': unexpected argument"),
    (f"inspect {M} {M}", 2, "unexpected argument: quote a path with spaces"),
    ("verify a.experts.gguf b.experts.gguf", 2, "b.experts.gguf: unexpected argument"),
    # dashes, and ~
    ("run \u2014-p x", 2, "\u2014-p: begins with a long dash, expected - or --"),
    (f"bench {M} \u2013p 8", 2, "\u2013p: begins with a long dash"),
    ("serve \u2014-port 8081", 2, "\u2014-port: begins with a long dash"),
    ("run -memory 6G -p x", 2, "-memory: did you mean --memory?"),
    (f"run {M} -prompt x", 2, "-prompt: did you mean --prompt?"),
    ("run -temp=0.5 -p x", 2, "-temp: did you mean --temp?"),
    (
        "run --model=~/m.gguf -p x",
        1,
        (
            "~/m.gguf: cannot be read: No such file or directory (the shell does not expand ~ in"
            " quotes"
        ),
    ),
    ("inspect '~/m.gguf'", 1, "write $HOME)"),
    # files of another kind
    (f"run -p x --profile {M}", 1, "is no profile: name another file, or move it away"),
    ("run -p x --profile .", 1, "cannot be read: Is a directory"),
    ("run -p x --profile tuned", 1, "tuned: cannot be read: No such file"),
    (f"calibrate {M} --text {M} -o p.npz", 1, "is not UTF-8 text"),
    (
        f"calibrate {M} --text /dev/null -o p.npz",
        1,
        "/dev/null: cannot be read: a device, expected a file",
    ),
    (f"calibrate {M} --text missing.txt -o p.npz", 1, "missing.txt: cannot be read: No such file"),
    (f"simulate {__file__}", 1, "is not a trace of moeoff"),
    (
        "inspect '\udcff.gguf' --probe off",
        1,
        "expected a path in UTF-8; rename the file or its folder",
    ),
    ("verify /dev/null", 1, "/dev/null: cannot be read: a device, expected a file"),
    ("run -p x --chat-template '{{ bad'", 1, "--chat-template: the template cannot be read: "),
    # numbers and units
    ("run -p x --memory 6,5G", 1, "--memory: not a size: '6,5G'; write for example 6G"),
    ("run -p x --memory 0.8", 1, "--memory: 0.8 is a number of bytes: was 0.8G meant?"),
    ("run -p x --memory 99999999999999999999G", 1, "is more than any machine has"),
    ("run -p x -c 4k", 1, "-c: expected a whole number, got '4k'"),
    (
        "run -p x --max-loss 1",
        1,
        "--max-loss: expected an increase of perplexity, e.g. 1%, got '1'",
    ),
    (f"serve {M} --host nowhere.invalid --port 0", 1, "cannot listen on nowhere.invalid:0"),
    (
        f"serve {M} --port 0 --bogus",
        1,
        "--bogus: neither moeoff serve nor llama-server has such an option",
    ),
    (f"convert {M} -o {M}", 1, "lies in moeoff's own package"),
    (f"convert {M} --tier Q9", 2, "No such option '--tier'. Did you mean '--tiers'?"),
    ("run -p ''", 1, "the prompt is empty"),
    ("run -p", 2, "Option '-p' requires an argument"),
    ("shell-completion tcsh", 2, "'tcsh' is not one of 'bash', 'zsh', 'fish'"),
]


@pytest.mark.parametrize("typed, code, words", MISTAKES, ids=[f"{i}" for i in range(len(MISTAKES))])
def test_mistakes(typed, code, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    done = CliRunner().invoke(main, shlex.split(typed), prog_name="moeoff")
    assert done.exit_code == code and words in done.output, done.output
    assert "Traceback" not in done.output and "`" not in done.output and "=..." not in done.output
    # nothing is left behind but in caches
    assert [name for name in os.listdir(tmp_path) if name not in ("moeoff", "matplotlib")] == []


@pytest.mark.parametrize(
    "begins, words",
    [
        (
            "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
            "fetch the file with git lfs pull",
        ),
        ("<!DOCTYPE html><html>Sign in", "it looks like a web page"),
        ('\x10\0\0\0\0\0\0\0{"__metadata__":', "convert_hf_to_gguf.py"),
        ("", "not a GGUF file: it is empty"),
    ],
    ids=["lfs", "page", "safetensors", "empty"],
)
def test_what_a_download_left(begins, words, tmp_path):
    (tmp_path / "model.gguf").write_text(begins)
    done = CliRunner().invoke(main, ["inspect", str(tmp_path / "model.gguf")], prog_name="moeoff")
    assert done.exit_code == 1 and words in done.output and "b'" not in done.output, done.output


@pytest.mark.parametrize(
    "typed", ["run -p x -n 4", f"inspect {M} --probe off", f"simulate {SMALL_TRACE}"]
)
def test_a_terminal_that_is_not_utf8(moeoff_command, typed):
    """What it has no sign for is a ?, whatever is printed."""
    done = moeoff_command(*shlex.split(typed), env=os.environ | {"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and done.stdout.isascii() and "Traceback" not in done.stderr, (
        done.stderr
    )


ANYWHERE = (f"inspect {M} --probe off", "run -p x -n 2", "bench -p 8 -n 0 -r 1 --no-warmup")


def unknown_user(monkeypatch, folder):
    def no_entry(_uid):
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.setattr(pwd, "getpwuid", no_entry)


def home_is_a_file(monkeypatch, folder):
    (folder / "file").touch()
    monkeypatch.setenv("HOME", str(folder / "file"))


def no_temporary_folder(monkeypatch, folder):
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(folder / "none")])
    monkeypatch.setattr(tempfile, "tempdir", None)


@pytest.mark.parametrize(
    "machine, lacks", [(unknown_user, ()), (home_is_a_file, ()), (no_temporary_folder, ("bench",))]
)
def test_no_folder_of_the_users(machine, lacks, monkeypatch, tmp_path):
    """Nothing is saved for the next time, and the answer comes all the same; what
    cannot be done without one is one sentence.
    """
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    machine(monkeypatch, tmp_path)
    for typed in ANYWHERE:
        done = CliRunner().invoke(main, shlex.split(typed), prog_name="moeoff")
        if typed.split()[0] in lacks:
            assert done.exit_code == 1 and done.output.endswith(
                f"Error: No usable temporary directory found in ['{tmp_path}/none']\n"
            ), done.output
        else:
            assert done.exit_code == 0 and "Traceback" not in done.output, (
                typed,
                done.output,
                done.exception,
            )


# as containers have them: what is mounted where, and the commands that cannot do their
# work there
MACHINES = {
    "read-only": (
        (
            "mount -o remount,ro,bind / && mount -t tmpfs -o ro none /tmp && mount -t tmpfs -o ro"
            " none /dev/shm"
        ),
        ("bench",),
    ),
    "small shared memory": (
        "mount -t tmpfs -o size=64k none /dev/shm; head -c 64K /dev/zero > /dev/shm/full",
        (),
    ),
    "full disk": (
        (
            "mount -t tmpfs -o size=64k none /tmp; head -c 64K /dev/zero > /tmp/full; export"
            " XDG_CACHE_HOME=/tmp"
        ),
        (),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("machine", MACHINES)
def test_small_machines(machine):
    mounts, lacks = MACHINES[machine]
    if subprocess.run(
        ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt"], capture_output=True
    ).returncode:
        pytest.skip("nothing can be mounted here")
    for typed in (*ANYWHERE, f"doctor -m {M}", f"simulate {SMALL_TRACE}"):
        done = subprocess.run(
            ["unshare", "-m", "sh", "-c", f"{mounts}; {COMMAND} {typed}"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        expected = 1 if typed.split()[0] in lacks else 0
        assert (
            done.returncode == expected
            and "Traceback" not in done.stderr
            and "[Errno" not in done.stderr
        ), (typed, done.stdout, done.stderr)


@pytest.mark.parametrize("columns", ["1", "40"])
def test_a_narrow_terminal(invoke, columns, monkeypatch):
    """Words stay whole: the terminal breaks lines that are too long."""
    monkeypatch.setenv("COLUMNS", columns)
    for typed in (f"inspect {M} --probe off --memory 6G", f"simulate {SMALL_TRACE}"):
        done = invoke(*shlex.split(typed))
        assert done.returncode == 0 and (
            "smallest --memory" in done.stdout or "belady" in done.stdout
        ), done.stdout
