"""A child and what became of it, faults on purpose, the table of what was found, and a model: the pieces that the scripts of this folder are made of."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

import click

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from results import HELP, ResultsFile, Table

__all__ = [
    "DEMO", "FILE_FAULTS", "NATIVE", "NATIVE_FAULTS", "PROMPT", "READS", "ROOT", "Call", "Child", "Fault", "Kind", "answer", "findings", "import_all",
    "is_sentence", "json_option", "open_model", "preload", "status_bytes", "write_small_model",
]  # fmt: skip

DEMO = str(ROOT / "moeoff" / "data" / "demo-moe-q8_0.gguf")
PROMPT = "Tom has 3 apples and buys 4 more. How many apples has Tom?"
json_option = click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)


def is_sentence(text: str) -> bool:
    """One line, no traceback."""
    return bool(text.strip()) and "\n" not in text.strip() and not re.search(r"Traceback|0x[0-9a-f]{8}", text)


def status_bytes(name: str = "VmRSS", pid: int | str = "self") -> int:
    """A size that the kernel tells of a process."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


@contextlib.contextmanager
def findings(json_file: str | None, name: str, title: str, columns: Sequence[str]) -> Iterator[tuple[Table, list[str]]]:
    """A table, which is kept with --json, and a list for problems: they are told in the end, and the exit code is 1 if there is one."""
    problems: list[str] = []
    with ResultsFile(json_file) as results:
        yield results.table(name, title, columns), problems
    for text, n in Counter(problems).most_common(40):
        print(f"{n} x {text}", file=sys.stderr)
    if problems:
        sys.exit(1)


# --- children ---


def import_all() -> None:
    """What takes time is imported once, before the children."""
    import moeoff.cli.main

    moeoff.Llama  # noqa: B018


class Child:
    """A fork of this process that does one thing and ends with the exit code that the command would have; what it says goes to files.

    Attributes:
        code: a signal's is negative; None as long as it runs, and if it did not end in time.
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
            for fd, given in enumerate((os.open(os.devnull, os.O_RDWR), *(file.fileno() for file in self._files))):
                os.dup2(given, fd)
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
            self.pid, self.code, self.peak = 0, os.waitstatus_to_exitcode(status), usage.ru_maxrss << 10
        return bool(pid)

    def wait(self, seconds: float = float("inf")) -> int | None:
        """Its exit code; None if it did not end in time, and then it is killed."""
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


# --- faults ---


class Call(IntEnum):
    """What fails, in the order of faults.c."""

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
    """How: an errno, half of what was asked for, EINTR, nothing more to read, other bytes; or a delay instead of a fault."""

    ERROR = 0
    SHORT = 1
    INTERRUPTED = 2
    END = 3
    WRONG = 4
    DELAY = 5


NATIVE = "libggml-cpu"  # the library with the expert buffer
READS = [(Call.READ, Kind.ERROR, errno.EIO), (Call.READ, Kind.SHORT, 0), (Call.READ, Kind.INTERRUPTED, 0), (Call.READ, Kind.END, 0)]
FIRST = [(Call.OPEN, Kind.ERROR, errno.EMFILE), (Call.STAT, Kind.ERROR, errno.EIO), *READS]
NATIVE_FAULTS = [
    *FIRST,
    (Call.READ, Kind.ERROR, errno.EINVAL),  # what NFS says of direct reads
    (Call.MAP, Kind.ERROR, errno.ENOMEM),
    (Call.ADVISE, Kind.ERROR, errno.EINVAL),
    (Call.THREAD, Kind.ERROR, errno.EAGAIN),
    (Call.ALLOC, Kind.ERROR, errno.ENOMEM),
]
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
    subprocess.run([os.environ.get("CC", "cc"), *flags, str(Path(__file__).with_name("faults.c")), "-o", str(library), "-ldl"], check=True)
    os.execve(sys.executable, sys.orig_argv, os.environ | {"LD_PRELOAD": str(library)})


class Fault:
    """While open, the n-th call of a process with `preload` fails; 0: every call. Of this library's calls, and on files below this path, if either is given.

    Attributes:
        seen: such calls, after it was closed.
        fired: those that failed.
    """

    def __init__(self, call: Call, kind: Kind, value: int, nth: int, *, of: str = "", below: str = ""):
        self._given = (int(call), int(kind), value, ctypes.c_long(nth), of.encode(), os.fsencode(below))
        self.seen = self.fired = 0

    def __enter__(self) -> Fault:
        if not ctypes.CDLL(None).faults_arm(*self._given):
            raise RuntimeError(f"the library {self._given[4].decode()} is not loaded")
        return self

    def __exit__(self, *_: object) -> None:
        seen, fired = ctypes.c_long(), ctypes.c_long()
        ctypes.CDLL(None).faults_disarm(ctypes.byref(seen), ctypes.byref(fired))
        self.seen, self.fired = seen.value, fired.value


# --- a model ---


def open_model(path: str, **options):
    import moeoff

    return moeoff.Llama(path, **{"expert_memory": "1M", "n_ctx": 128, "n_threads": 2, "warm": False, "profile": False, "experts": False} | options)


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
    """The demo model with 2 layers and 6 experts: what makes a thousand calls into the system there, makes a hundred here, so that each can fail once.

    Its text means nothing, but it is always the same.
    """
    import gguf

    numbers = {"qwen2moe.block_count": 2, "qwen2moe.expert_count": 6, "qwen2moe.expert_used_count": 2}
    reader, writer = gguf.GGUFReader(DEMO), gguf.GGUFWriter(path, "qwen2moe")
    for field in reader.fields.values():
        if not field.name.startswith("GGUF.") and field.name != "general.architecture":
            writer.add_key_value(field.name, numbers.get(field.name, field.contents()), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        if not tensor.name.startswith("blk.") or int(tensor.name.split(".")[1]) < 2:
            data = tensor.data[:6] if "_exps." in tensor.name or ".ffn_gate_inp." in tensor.name else tensor.data
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
