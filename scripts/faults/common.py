"""A child and what became of it, faults on purpose, a table of problems, and a model:
the pieces that the scripts of this folder are made of.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import faulthandler
import functools
import gc
import json
import os
import random
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import click

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

from helpers.processes import status_bytes
from results import HELP, ResultsFile, Table

DEMO = str(ROOT / "moeoff" / "data" / "demo-moe-q8_0.gguf")
PROMPT = "Tom has 3 apples and buys 4 more. How many apples has Tom?"


@click.group()
def main() -> None:
    """Break one thing at a time, and check what must hold."""


def options_of(names: Iterable[str], *, seeds: bool = False) -> Callable[[Any], Any]:
    """--only of these, --json, and --seed where there is chance."""

    def decorate(function: Any) -> Any:
        function = click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)(
            function
        )
        function = click.option("--only", multiple=True, type=click.Choice(list(names)))(function)
        again = click.option(
            "--seed",
            "seeds",
            type=int,
            multiple=True,
            default=(1,),
            show_default=True,
            help="May be repeated: all is done with each.",
        )
        return again(function) if seeds else function

    return decorate


LONGEST = 2000  # characters of a sentence: what a file holds is not told whole


def is_sentence(text: str) -> bool:
    """One line that can be read, no traceback."""
    return (
        0 < len(text.strip()) <= LONGEST
        and "\n" not in text.strip()
        and not re.search(r"Traceback|0x[0-9a-f]{8}", text)
    )


def verdict(
    code: int | None, text: str, *, peak: int = 0, memory: int = 0, quiet: bool = True
) -> str:
    """Return the problem with a command's end, or an empty string.

    Args:
        code: Exit code as `Child` has it.
        text: The command's standard error.
        peak: Most memory that it used.
        memory: Its memory limit; 0: none.
        quiet: Whether an error must be one sentence, at the end.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    if code is None:
        return f"hangs: {text[-600:]}"
    if code not in (0, 1):
        return f"exit code {code}: {text[-600:]}"
    if memory and peak > memory:
        return f"{peak >> 20} MiB of {memory >> 20}"
    if "Traceback" in text:
        return f"traceback: {text[-600:]}"
    errors = [line for line in lines if line.startswith("Error: ")]
    if (
        code
        and quiet
        and not (len(errors) == 1 and lines[-1] == errors[0] and is_sentence(errors[0]))
    ):
        return f"no sentence: {text[:300]!r} ... {text[-300:]!r}"
    return ""


@contextlib.contextmanager
def findings(
    json_file: str | None, name: str, title: str, columns: Sequence[str]
) -> Iterator[tuple[Table, list[str]]]:
    """A table, which is kept with --json, and a list for problems: they are told in the
    end, and the exit code is 1 if there is one.
    """
    with findings_by_seed(json_file, name, title, columns, ()) as (tables, problems):
        yield next(tables)[1], problems


@contextlib.contextmanager
def findings_by_seed(
    json_file: str | None, name: str, title: str, columns: Sequence[str], seeds: Sequence[int]
) -> Iterator[tuple[Iterator[tuple[int, Table]], list[str]]]:
    """The same with a table for each seed, in one file."""
    problems: list[str] = []
    with ResultsFile(json_file) as results:
        titles = [(seed, f"{title}, seed {seed}") for seed in seeds] or [(0, title)]
        yield (
            (
                (seed, results.table(f"{name}-{i}" if i else name, text, columns))
                for i, (seed, text) in enumerate(titles)
            ),
            problems,
        )
    for text, n in Counter(problems).most_common(40):
        print(f"{n} x {text}", file=sys.stderr)
    if problems:
        sys.exit(1)


# --- children ---


def import_all() -> None:
    """Import slow modules once, before the children."""
    import moeoff.cli.main

    moeoff.Llama  # noqa: B018


class Child:
    """A fork of this process that does one thing and ends with the exit code that the
    command would have; what it says goes to files.

    Attributes:
        code: a signal's is negative; None as long as it runs, and if it did not end in
            time.
        peak: bytes of memory, once it has ended.
    """

    def __init__(self, body: Callable[[], object]):
        self._files = [tempfile.TemporaryFile() for _ in range(2)]
        self.code: int | None = None
        self.peak = 0
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            self._run(body)

    def _run(self, body: Callable[[], object]) -> NoReturn:
        code = 99
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            for fd, file in enumerate(
                (os.open(os.devnull, os.O_RDWR), *(file.fileno() for file in self._files))
            ):
                os.dup2(file, fd)
            body()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except KeyboardInterrupt:
            code = 130
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def ended(self) -> bool:
        if not self.pid:
            return True
        pid, status, usage = os.wait4(self.pid, os.WNOHANG)
        if pid:
            self.pid, self.code, self.peak = (
                0,
                os.waitstatus_to_exitcode(status),
                usage.ru_maxrss << 10,
            )
        return bool(pid)

    def wait(self, seconds: float = float("inf")) -> int | None:
        """Return the exit code. Kill the child and return None if it does not end in time."""
        end = time.monotonic() + seconds
        while not self.ended() and time.monotonic() < end:
            time.sleep(0.002)
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self.pid = 0
        return self.code

    @property
    def output(self) -> str:
        return os.pread(self._files[0].fileno(), 1 << 26, 0).decode(errors="replace")

    @property
    def errors(self) -> str:
        return os.pread(self._files[1].fileno(), 1 << 26, 0).decode(errors="replace")


# --- cases ---

DEADLINE = 300  # seconds of a case, on a machine that is busy
CPU_DEADLINE = 20  # seconds of computing, which a busy machine does not lengthen
ADDRESS_SPACE = 8 << 30


class Case(NamedTuple):
    """A case's number, a word for how it ended, and the problem or an empty string."""

    n: int
    outcome: str
    problem: str


def case_rng(seed: int, n: int, *kind: str) -> random.Random:
    """Chance of its own for each case: any of them can be had again without those
    before it.
    """
    return random.Random(":".join((str(seed), str(n), *kind)))


def reset_peak() -> None:
    """From now on VmHWM is the peak since now."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def judged(
    action: Callable[[], object], *paths: str, allowed: tuple[type[Exception], ...] = ()
) -> tuple[str, str]:
    """Run an action, and return "accepted" or "refused", and the problem.

    Args:
        paths: Paths that the error may name, however long they are.
        allowed: Errors, in addition to the library's own, that may end the action with
            any message.
    """
    from moeoff.errors import MoeoffError

    try:
        action()
    except MoeoffError as error:
        text = str(error)
        for path in paths:
            text = text.replace(path, "file")
        return "refused", (
            "" if is_sentence(text) else f"no sentence: {text[:300]!r} ... ({len(text)} characters)"
        )
    except allowed:
        return "refused", ""  # in words of its own
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return (
            "raised",
            (
                f"{type(error).__name__} in {Path(where.filename).name}:{where.lineno}:"
                f" {str(error)[:300]}"
            ),
        )
    return "accepted", ""


def in_workers(
    make: Callable[[], Callable[[int], tuple[str, str]]],
    cases: Iterable[int],
    *,
    memory: int = 0,
    life: int = 2000,
    deadline: float = DEADLINE,
) -> Iterator[Case]:
    """Checks cases in a child that goes on as long as it can: where one ends it or
    hangs, that is what became of the case, and another goes on behind it.

    Args:
        make: called at the beginning of each child; gives what checks a case.
        memory: bytes that no case may go beyond.
        life: cases of one child.
    """
    left = list(cases)
    while left:
        reader, writer = os.pipe()
        child = Child(functools.partial(_work, make, left[:life], writer, memory, deadline))
        os.close(writer)
        begun = n_done = 0
        for line in _lines(reader, child):
            n, *result = json.loads(line)
            begun += not result
            if result:
                n_done += 1
                yield Case(n, *result)
        if child.wait(deadline) == 0:
            left = left[n_done:]
            continue
        how = (
            "hangs"
            if child.code in (None, -signal.SIGPROF) or "Timeout (" in child.errors
            else f"the process ended with {child.code}"
        )
        if not begun:
            raise click.ClickException(f"{how} before the first case: {child.errors[-2000:]}")
        yield Case(
            left[begun - 1], "ended", f"{how}: {child.errors[:600]} ... {child.errors[-900:]}"
        )
        left = left[begun:]


def _work(
    make: Callable[[], Callable[[int], tuple[str, str]]],
    cases: Sequence[int],
    writer: int,
    memory: int,
    deadline: float,
) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    faulthandler.enable()
    faulthandler.register(signal.SIGPROF, chain=True)  # which ends the process
    faulthandler.dump_traceback_later(deadline, exit=True)
    check = make()
    gc.freeze()  # what all cases share is not looked at after each
    for n in cases:
        os.write(writer, f"[{n}]\n".encode())
        faulthandler.dump_traceback_later(deadline, exit=True)
        signal.setitimer(signal.ITIMER_PROF, CPU_DEADLINE)
        gc.collect()  # what a case leaves is not the next one's
        if memory:
            reset_peak()
        outcome, problem = check(n)
        if memory and not problem and (peak := status_bytes("VmHWM")) > memory:
            problem = f"{peak >> 20} MiB of {memory >> 20}"
        os.write(writer, json.dumps([n, outcome, problem]).encode() + b"\n")
        sys.stderr.flush()
    signal.setitimer(signal.ITIMER_PROF, 0)
    faulthandler.cancel_dump_traceback_later()


def _lines(fd: int, child: Child) -> Iterator[bytes]:
    """Whole lines until the child has ended, whoever else may hold the pipe open."""
    rest = b""
    with open(fd, "rb", buffering=0) as pipe:
        while True:
            over = child.ended()
            if select.select([pipe], [], [], 0 if over else 0.05)[0] and (
                data := pipe.read(1 << 16)
            ):
                *whole, rest = (rest + data).split(b"\n")
                yield from whole
            elif over:
                return


def tell_all(table: Table, cases: Iterable[tuple[str, Case]], again: str) -> list[str]:
    """A row for each kind of case: how many there were, and how they ended. Returned is
    what is wrong, which is told at once, too.

    Args:
        again: options with which `--first` does a case again.
    """
    counted: dict[str, Counter[str]] = {}
    wrong = []
    for kind, case in cases:
        counts = counted.setdefault(kind, Counter())
        counts[case.outcome] += 1
        if case.problem:
            counts["problems"] += 1
            wrong.append(f"{kind}: {case.problem} ({again} --first {case.n})")
            print(wrong[-1][:1500], file=sys.stderr, flush=True)
    for kind, counts in counted.items():
        table.row(
            kind,
            str(counts.total() - counts["problems"]),
            str(counts["refused"]),
            str(counts["accepted"]),
            str(counts["problems"]),
        )
    return wrong


# --- faults ---


class Call(IntEnum):
    """The calls that fail, in the order of faults.c."""

    OPEN = 0
    STAT = 1
    READ = 2
    MAP = 3
    ADVISE = 4
    THREAD = 5
    ALLOC = 6
    WRITE = 7
    SYNC = 8
    RENAME = 9


class Kind(IntEnum):
    """How: an errno, half of what was asked for, EINTR, nothing more to read, other
    bytes, no end until the fault is closed; or a delay instead of a fault.
    """

    ERROR = 0
    SHORT = 1
    INTERRUPTED = 2
    END = 3
    WRONG = 4
    DELAY = 5
    HANG = 6


NATIVE = "libggml-cpu"  # the library with the expert buffer
READS = [
    (Call.READ, Kind.ERROR, errno.EIO),
    (Call.READ, Kind.SHORT, 0),
    (Call.READ, Kind.INTERRUPTED, 0),
    (Call.READ, Kind.END, 0),
]
FIRST = [(Call.OPEN, Kind.ERROR, errno.EMFILE), (Call.STAT, Kind.ERROR, errno.EIO), *READS]
NATIVE_FAULTS = [
    *FIRST,
    (Call.READ, Kind.ERROR, errno.EINVAL),  # what NFS says of direct reads
    (Call.MAP, Kind.ERROR, errno.ENOMEM),
    (Call.ADVISE, Kind.ERROR, errno.EINVAL),
    (Call.THREAD, Kind.ERROR, errno.EAGAIN),
    (Call.ALLOC, Kind.ERROR, errno.ENOMEM),
]
DECODE_FAULTS = [*NATIVE_FAULTS, (Call.READ, Kind.HANG, 0)]
FILE_FAULTS = [
    *FIRST,
    (Call.MAP, Kind.ERROR, errno.ENOMEM),
    (Call.WRITE, Kind.ERROR, errno.ENOSPC),
    (Call.WRITE, Kind.SHORT, 0),
    (Call.WRITE, Kind.INTERRUPTED, 0),
    (Call.SYNC, Kind.ERROR, errno.EIO),
    (Call.RENAME, Kind.ERROR, errno.EIO),
]


def preload() -> None:
    """Compiles faults.c and begins this program anew with it, unless it has been."""
    if hasattr(ctypes.CDLL(None), "faults_arm"):
        return
    library = Path(tempfile.mkdtemp(prefix="moeoff-faults-")) / "faults.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-fexceptions"]
    subprocess.run(
        [
            os.environ.get("CC", "cc"),
            *flags,
            str(Path(__file__).with_name("faults.c")),
            "-o",
            str(library),
            "-ldl",
        ],
        check=True,
    )
    os.execve(sys.executable, sys.orig_argv, os.environ | {"LD_PRELOAD": str(library)})


class Fault:
    """While open, the n-th call of a process with `preload` fails; 0: every call. Of
    this library's calls, and on files below this path, if either is given.

    Attributes:
        seen: such calls, after it was closed.
        fired: those that failed.
    """

    def __init__(
        self, call: Call, kind: Kind, value: int, nth: int, *, of: str = "", below: str = ""
    ):
        self._arguments = (
            int(call),
            int(kind),
            value,
            ctypes.c_long(nth),
            of.encode(),
            os.fsencode(below),
        )
        self.seen = self.fired = 0

    def __enter__(self) -> Fault:
        if not ctypes.CDLL(None).faults_arm(*self._arguments):
            raise RuntimeError(f"the library {self._arguments[4].decode()} is not loaded")
        return self

    @property
    def has_fired(self) -> bool:
        """Return whether a call has failed so far. The fault must be open."""
        return bool(ctypes.CDLL(None).faults_fired())

    def __exit__(self, *_: object) -> None:
        seen, fired = ctypes.c_long(), ctypes.c_long()
        ctypes.CDLL(None).faults_disarm(ctypes.byref(seen), ctypes.byref(fired))
        self.seen, self.fired = seen.value, fired.value


# --- a model ---


def open_model(path: str, **options):
    import moeoff

    return moeoff.Llama(
        path,
        **{
            "expert_memory": "1M",
            "n_ctx": 128,
            "n_threads": 2,
            "warm": False,
            "profile": False,
            "experts": False,
        }
        | options,
    )


def answer(llm) -> list[int]:
    """Tokens of a greedy answer, from an empty context."""
    llm.reset()
    llm.clear_context()
    tokens = []
    for token in llm.generate(llm.tokenize(PROMPT.encode()), top_k=1, temp=0.0):
        tokens.append(token)
        if len(tokens) == 6:
            break
    return tokens


def write_small_model(path: str | os.PathLike[str]) -> None:
    """The demo model with 2 layers and 6 experts: what makes a thousand calls into the
    system there, makes a hundred here, so that each can fail once.

    Its text means nothing, but it is always the same.
    """
    import gguf

    numbers = {
        "qwen2moe.block_count": 2,
        "qwen2moe.expert_count": 6,
        "qwen2moe.expert_used_count": 2,
    }
    reader, writer = gguf.GGUFReader(DEMO), gguf.GGUFWriter(path, "qwen2moe")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(
                field.name,
                numbers.get(field.name, field.contents()),
                field.types[0],
                field.types[-1] if len(field.types) > 1 else None,
            )
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < 2:
            data = (
                tensor.data[:6]
                if "_exps." in tensor.name or ".ffn_gate_inp." in tensor.name
                else tensor.data
            )
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
