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

from helpers.files import COMMAND, DEMO, PROSE, SMALL_TRACE
from helpers.refusals import has_words, refusals
from moeoff.cli.main import main

M = str(DEMO)
# what a line of text cannot hold
ODD = [
    (f"run -p '{'word ' * 300}'", 1, "tokens, expected fewer than the context's 256"),
    (f"simulate {__file__}", 1, "is not a trace of moeoff"),
    (
        "inspect '\udcff.gguf' --probe off",
        1,
        "expected a path in UTF-8; rename the file or its folder",
    ),
]


@pytest.mark.parametrize("typed, code, words", [*refusals("moeoff"), *ODD])
def test_mistakes(typed, code, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words_typed = shlex.split(typed.replace("MODEL", M).replace("TEXT", str(PROSE)))
    done = CliRunner().invoke(main, words_typed, prog_name="moeoff")
    assert done.exit_code == int(code) and has_words(done.output, words), done.output
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
    """Characters that the terminal lacks are printed as "?"."""
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
