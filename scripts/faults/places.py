"""Whatever stands where a command expects a file: FIFOs, devices, folders, links that lead nowhere, the model itself; and descriptors that are closed.

Each option of each command that names a file is given each of these, in a child with a deadline and a bound of memory: there is an answer or one sentence,
and the model is what it was. A server that starts is stopped again. Then each command but that one is started anew with standard input, output and error
closed, full or left by their reader. Options are found in the commands themselves and in the table of llama-server's: a new one there is tried without a word
here, a new command is not.
"""

from __future__ import annotations

import fcntl
import functools
import itertools
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from common import PROMPT, Case, Child, findings, import_all, main, open_model, options_of, tell_all, verdict, write_small_model
from damaged import command, confined
from moeoff.server.arguments import FILES

DEADLINE = 120
MEMORY = 300 << 20  # of commands that have a budget
DEVICES = {"null": 3, "zero": 5, "full": 7}  # minor numbers, on Linux
UNBOUNDED = 700 << 20  # of the others: they read small files
OUTCOMES = {0: "accepted", 1: "refused"}
COMMANDS = ("run", "inspect", "convert", "verify", "eval", "calibrate", "simulate", "report", "doctor", "bench", "serve")
_RUNS = ["-t", "1", "--memory", str(MEMORY)]


@dataclass(frozen=True)
class Command:
    """How a command is called, and the options of it that name a file."""

    args: list[str]
    options: dict[str, int]  # name of the option, and where its value stands in `args`; -1: nowhere

    def given(self, option: str, value: str) -> list[str]:
        at, value = self.options[option], f"{value}:0.5" if option.endswith("-scaled") else value
        return [*self.args[:at], value, *self.args[at + 1 :]] if at >= 0 else [*self.args, option, value]


def prepare(folder: Path) -> None:
    """A model, a sidecar, a trace and a text."""
    from moeoff.experts.convert import convert

    write_small_model(folder / "m.gguf")
    convert(folder / "m.gguf", tiers="original", output=folder / "m.experts.gguf")
    (folder / "text.txt").write_text((PROMPT + "\n") * 60)
    (folder / "prompt.txt").write_text("Hi")
    with open_model(str(folder / "m.gguf"), trace=str(folder / "run.trace")) as llm:
        for _, _token in zip(range(4), llm.generate([1, 2, 3], temp=0.0)):
            pass


def commands(folder: Path) -> dict[str, Command]:
    from moeoff.cli.main import main as moeoff

    model, text, prompt, out = (str(folder / name) for name in ("m.gguf", "text.txt", "prompt.txt", "out"))
    lines = {
        "run": ["-m", model, "-f", prompt, "-n", "2", "-c", "64", *_RUNS],
        "inspect": [model, "--probe", "off"],
        "convert": [model, "--tiers", "original,Q4_0", "-o", out, "--force"],
        "verify": [str(folder / "m.experts.gguf"), "-m", model],
        "eval": ["-m", model, "--text", text, "--ctx", "32", "--chunks", "1", *_RUNS],
        "calibrate": [model, "--text", text, "--tokens", "512", "-o", out, *_RUNS],
        "simulate": [str(folder / "run.trace"), "--strategy", "lru"],
        "report": ["-m", model, "-o", out, "-p", "8", "-n", "8", *_RUNS],
        "doctor": ["-m", model],
        "bench": ["-m", model, "-p", "8", "-n", "4", "-r", "1", "--text", text, *_RUNS],
        "serve": ["-m", model, "--port", "0", "-np", "1", "-c", "256", "--warm", "off", *_RUNS],
    }
    found = {}
    for name, args in lines.items():
        options = {}
        for param in moeoff.commands[name].params:
            is_file = isinstance(param.type, click.Path) or getattr(getattr(param.type, "_line", None), "is_file", False)
            if not is_file:
                continue
            flags = [flag for flag in param.opts if flag in args]
            if isinstance(param, click.Argument):
                if param.nargs == -1 or args[0] != "-m":
                    options[param.name] = 0
            else:
                options[max(param.opts, key=len)] = args.index(flags[0]) + 1 if flags else -1
        if name == "serve":
            options |= dict.fromkeys(FILES, -1)  # passed on to llama-server
        found[name] = Command([name, *args], {option: at + 1 if at >= 0 else -1 for option, at in options.items()})
    return found


def carried_out(args: list[str]) -> None:
    """A command; a server that has started is not waited for, which ends it."""
    from moeoff.server.server import Server

    wait = Server.wait
    Server.wait = lambda self, timeout=None: wait(self, 0)
    command(args)


# --- what stands there ---


def devices(folder: Path) -> dict[str, str]:
    """Who may replace the system's own devices by files gets others."""
    if os.geteuid() != 0:
        return {name: f"/dev/{name}" for name in DEVICES}
    for name, minor in DEVICES.items():
        os.mknod(folder / name, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    return {name: str(folder / name) for name in DEVICES}


def places(folder: Path) -> dict[str, str]:
    """Names of things that are no ordinary files; made anew where a command may have removed or changed them."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    os.mkfifo(folder / "fifo")  # whose writer does not come; a reader is there
    (folder / "folder").mkdir()
    (folder / "nowhere").symlink_to(folder / "missing" / "file")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "empty").touch()
    (folder / "two\nlines\x1b[31m").write_bytes(b"GGUF")
    found = devices(folder)
    (folder / "link to null").symlink_to(found["null"])
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(folder)  # the name of a socket may be 108 bytes long
        server.bind("socket")
        os.chdir(here)
    made = {name: str(folder / name) for name in ("fifo", "folder", "nowhere", "loop", "empty", "two\nlines\x1b[31m", "link to null", "socket")}
    return (
        made
        | found
        | {
            "own memory": "/proc/self/mem",
            "of /proc": "/proc/self/status",
            "in a file": str(folder / "empty" / "below"),
            "in no folder": str(folder / "missing" / "file"),
            "nothing": "",
            "a long name": str(folder / ("x" * 300)),
            "the model": str(folder.parent / "m.gguf"),
            "the text": str(folder.parent / "text.txt"),
        }
    )


INPUTS = ("m.gguf", "text.txt", "prompt.txt", "run.trace", "m.experts.gguf")


def written(folder: Path, whole: dict[str, bytes], name: str, value: str, args: list[str]) -> str:
    """The first of the files that a command was to read alone and has written to; they are whole again. convert --force may write the sidecar anew."""
    found = ""
    for path, data in whole.items():
        if not (folder / path).is_file() or (folder / path).read_bytes() != data:
            (folder / path).unlink(missing_ok=True)
            (folder / path).write_bytes(data)
            given_to_write = str(folder / path) == value and args.count(value) == 1
            found = found or ("" if given_to_write or (name == "convert" and path == "m.experts.gguf") else path)
    return found


def check_places(folder: Path, only: tuple[str, ...], every: int) -> Iterator[tuple[str, Case]]:
    whole, n = {name: (folder / name).read_bytes() for name in INPUTS}, 0
    for name, line in commands(folder).items():
        if only and name not in only:
            continue
        for option in line.options:
            for place in places(folder / "places"):
                n += 1
                if n % every:
                    continue
                value = places(folder / "places")[place]
                args = line.given(option, value)
                reader = os.open(folder / "places" / "fifo", os.O_RDONLY | os.O_NONBLOCK)
                fcntl.fcntl(reader, fcntl.F_SETPIPE_SZ, 1 << 20)
                child = Child(functools.partial(confined, functools.partial(carried_out, args), folder))
                code = child.wait(DEADLINE)
                os.close(reader)
                # doctor's sentence is a line of its table, and bench goes on with its other configurations
                wrong = verdict(code, child.errors, peak=child.peak, memory=MEMORY if "--memory" in line.args else UNBOUNDED,
                                quiet=name not in ("doctor", "bench"), usage=True)  # fmt: skip
                if path := written(folder, whole, name, value, args):
                    wrong = wrong or f"it wrote over {path}"
                yield name, Case(n, OUTCOMES.get(code, "refused" if code == 2 else "ended"), wrong and f"{option} {place!r}: {wrong}")


# --- descriptors ---

DESCRIPTORS = {
    "no standard input": "<&-",
    "no standard output": ">&-",
    "no standard error": "2>&-",
    "none of the three": "<&- >&- 2>&-",
    "standard output is full": ">/dev/full",
    "standard error is full": "2>/dev/full",
    "both are full": ">/dev/full 2>/dev/full",
    "standard input is a folder": "</",
    "nobody reads": "| true",
}


def check_descriptors(folder: Path, only: tuple[str, ...], every: int) -> Iterator[tuple[str, Case]]:
    n = 0
    for name, line in commands(folder).items():
        if name == "serve" or (only and name not in only):
            continue
        for what, redirected in DESCRIPTORS.items():
            n += 1
            if n % every:
                continue
            script = f'"$@" {redirected}' if redirected.startswith("|") else f'exec "$@" {redirected}'
            process = subprocess.Popen(
                ["sh", "-c", script, "sh", sys.executable, "-m", "moeoff.cli", *line.args], cwd=folder, text=True, errors="replace",
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            )  # fmt: skip
            try:
                _, errors = process.communicate(timeout=2 * DEADLINE)
                wrong = verdict(process.returncode, errors, quiet=False, usage=True)
                if not wrong and "Exception ignored" in errors:
                    wrong = f"Python's own words: {errors[-300:]}"
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                wrong = "hangs"
            outcome = OUTCOMES.get(process.returncode, "ended")
            yield "descriptors", Case(n, outcome, wrong and f"{name}, {what}: {wrong}")


@main.command("places", help=__doc__)
@click.option("--every", default=1, show_default=True, help="Only each so manyth case.")
@options_of(COMMANDS)
def check(only: tuple[str, ...], every: int, json_file: str | None) -> None:
    import_all()
    columns = ["command", "cases", "refused in one sentence", "went through", "problems"]
    with findings(json_file, "places", "no ordinary files", columns) as (table, problems), tempfile.TemporaryDirectory(prefix="moeoff-places-") as made:
        os.environ["XDG_CACHE_HOME"] = f"{made}/cache"
        folder = Path(made)
        child = Child(functools.partial(prepare, folder))
        if child.wait(10 * DEADLINE) != 0:
            raise click.ClickException(f"the files cannot be made: {child.errors[-2000:]}")
        cases = itertools.chain(check_places(folder, only, every), check_descriptors(folder, only, every))
        problems += tell_all(table, "", cases, "")
