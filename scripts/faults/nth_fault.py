"""The n-th fault: for each kind of call of the native code, the first fails, then the
second, and so on until a run has no fault.

Each time there must be success with the right tokens, or one sentence, which for a read
names file and offset; then the same is asked again without a fault and must be right;
no descriptor and no thread may stay. Every step has a deadline. A process that ends is
a finding, and the next one goes on behind the fault that ended it.

Faults are those of the library with the expert buffer (libggml-cpu: the buffer's and
ggml's CPU backend), and where Python works with files itself (convert, calibrate,
closing, a trace), those on files in the folder of the run. The model is a small one, so
that whole sweeps take minutes.
"""

from __future__ import annotations

import contextlib
import errno
import faulthandler
import gc
import json
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import click

from common import (
    DECODE_FAULTS,
    FILE_FAULTS,
    NATIVE,
    NATIVE_FAULTS,
    PROMPT,
    READS,
    Call,
    Child,
    Fault,
    Kind,
    answer,
    findings,
    import_all,
    is_sentence,
    main,
    open_model,
    options_of,
    preload,
    status_bytes,
    write_small_model,
)
from helpers.leaks import held

DEADLINE = 300  # seconds for one step, on a machine that is busy
ROOM = "200K"  # for experts: a third of them
DEMAND = 2  # level of a read that an op waits for (moeoff.h)


@dataclass
class Scenario:
    """An action that meets faults, and the checks after it.

    Attributes:
        attempt: Action with a fault; returns the result to compare.
        again: Action without a fault.
        native: Whether faults are those of native code, else those on files in the
            folder.
        failed_reads: Returns the urgency of each failed read of an expert since the
            last call. A read that an op waited for is an error, which names file and
            offset; an earlier one is read again when an op needs it.
        below: Prefix of the files with faults.
        result: Returns the result to compare after an attempt that may have failed,
            instead of the attempt's own.
        prepare: Called before each fault.
        cancel: Ends an attempt that hangs.
    """

    attempt: Callable[[], object]
    again: Callable[[], object] | None = None
    native: bool = True
    failed_reads: Callable[[], list[int]] | None = None
    below: str = ""
    result: Callable[[], object] | None = None
    close: Callable[[], None] = field(default=lambda: None)
    prepare: Callable[[], None] = field(default=lambda: None)
    cancel: Callable[[], None] = field(default=lambda: None)


def made(path: Path) -> tuple[object, ...]:
    """A file's content, and what else lies beside it, but for traces and texts."""
    return hash(path.read_bytes()), *sorted(p.name for p in path.parent.iterdir() if not p.is_dir())


# --- scenarios: each is given a folder with the model in it ---


def loading(folder: Path) -> Scenario:
    model = str(folder / "model.gguf")

    def attempt() -> object:
        with open_model(model, expert_memory=ROOM) as llm:
            return answer(llm)

    return Scenario(attempt)


def with_open_model(
    *, moved: bool = False, below: bool = False, **options
) -> Callable[[Path], Scenario]:
    """A model that is open all the time."""

    def make(folder: Path) -> Scenario:
        model = str(folder / "model.gguf")
        if options.get("verify_reads"):
            from moeoff.experts.convert import convert

            options["experts"] = convert(
                model, tiers="original", output=folder / "model.experts.gguf", force=True
            ).path
        llm = open_model(model, expert_memory=ROOM, **options)
        buffer = llm.engine.buffer

        def attempt() -> object:
            if moved:
                for share in (0.5, 0.1, 0.9):
                    buffer.set_cache_bytes(max(int(share * buffer.arena_full), buffer.arena_floor))
                    tokens = answer(llm)
                return tokens
            buffer.clear()
            return answer(llm)

        def failed_reads() -> list[int]:
            return [read["level"] for read in buffer.take_reads() if read["result"]]

        buffer.log_reads()
        path = str(folder / "model.experts.gguf") if below else ""
        return Scenario(
            attempt, failed_reads=failed_reads, below=path, close=llm.close, cancel=llm.cancel
        )

    return make


def just_loaded(folder: Path) -> Scenario:
    """The first answer of a model, which reads rows of its tables on disk, too."""
    models: list[Any] = []

    def open_anew() -> None:
        close()
        models.append(open_model(str(folder / "model.gguf"), expert_memory=ROOM))
        assert models[0].stats().row_table_bytes > 0

    def close() -> None:
        while models:
            models.pop().close()

    def again() -> object:
        open_anew()
        try:
            return answer(models[0])
        finally:
            close()

    def cancel() -> None:
        models[0].cancel()

    return Scenario(lambda: answer(models[0]), again, prepare=open_anew, close=close, cancel=cancel)


def closing(folder: Path) -> Scenario:
    """The warm-start file and the trace are written; what is there before stays
    readable.
    """
    from moeoff.routing.trace import Trace

    model, trace = str(folder / "model.gguf"), str(folder / "run.trace")

    def attempt() -> object:
        with open_model(model, expert_memory=ROOM, warm=True, trace=trace) as llm:
            return answer(llm)

    def again() -> object:
        tokens = attempt()
        list(Trace.read(trace).events)
        Path(trace).unlink()
        return tokens

    return Scenario(attempt, again, native=False)


def converting(folder: Path) -> Scenario:
    from moeoff.experts.convert import convert

    model, out = str(folder / "model.gguf"), folder / "model.experts.gguf"

    def attempt() -> object:
        convert(model, tiers="original,Q4_0", output=out, force=True, threads=2)

    return Scenario(attempt, native=False, result=lambda: made(out))


def calibrating(folder: Path) -> Scenario:
    """In the end all that was measured is written into the profile, which another
    section is in before.
    """
    from moeoff.experts.profile import Profile, profile_path
    from moeoff.gguf.model_index import ModelIndex
    from moeoff.measure.profile_fit import calibrate

    model, text = str(folder / "model.gguf"), folder / "text.txt"
    text.write_text((PROMPT + "\n") * 200)
    path = Path(profile_path(model))

    def attempt() -> object:
        calibrate(model, text=[str(text)], tokens=512, hidden=0, only={"popularity"}, memory="2G")

    def result() -> object:
        Profile.read(path, ModelIndex.read(model))
        return made(path)[1:]  # its header has a date

    return Scenario(attempt, native=False, result=result)


# each with the kinds of its faults
SCENARIOS: dict[str, tuple[list[tuple[Call, Kind, int]], Callable[[Path], Scenario]]] = {
    "load": (NATIVE_FAULTS, loading),
    "rows": ([(Call.READ, Kind.HANG, 0)], just_loaded),
    "decode": (DECODE_FAULTS, with_open_model(strategy="lru")),
    "decode-verified": (
        [(Call.READ, Kind.WRONG, 0), *READS],
        with_open_model(below=True, strategy="lru", verify_reads=True),
    ),
    "prefetch": (DECODE_FAULTS, with_open_model(strategy="auto")),
    "resize": (NATIVE_FAULTS, with_open_model(moved=True, strategy="lru")),
    "close": (FILE_FAULTS, closing),
    "convert": (FILE_FAULTS, converting),
    "calibrate": (FILE_FAULTS, calibrating),
}


# --- one child ---


@contextlib.contextmanager
def cancelled(scenario: Scenario, fault: Fault) -> Iterator[None]:
    """Cancel the attempt in the block once its fault has fired."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(0.01):
            if fault.has_fired:
                scenario.cancel()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def left(before: tuple[int, int]) -> str:
    """Return the leak of threads and descriptors since then, or an empty string.

    One more thread is allowed, because OpenMP keeps one or not.
    """
    now = held()
    return (
        f"threads and descriptors were {before}, are {now}"
        if now[0] > before[0] + 1 or now[1] != before[1]
        else ""
    )


def run(name: str, most: int, first: int, start: int) -> None:
    """A scenario from its fault number `first` on, whose first n is `start`; a line of
    JSON before each step, and one after it.
    """
    import moeoff

    def say(**line: object) -> None:
        print(json.dumps(line), flush=True)

    faulthandler.enable()
    # has a thread of its own from now on
    faulthandler.dump_traceback_later(10 * DEADLINE, exit=True)
    faults, make = SCENARIOS[name]
    with tempfile.TemporaryDirectory(prefix="moeoff-nth-") as made:
        folder = Path(made)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        write_small_model(folder / "model.gguf")
        scenario = make(folder)

        def again() -> object:
            answer = (scenario.again or scenario.attempt)()
            return scenario.result() if scenario.result else answer

        expected = again()
        for _ in range(5):
            again()  # what is made once and stays has been made
        gc.collect()
        before = held()
        for index, (call, kind, value) in enumerate(faults):
            if index < first:
                continue
            for n in range(start if index == first else 1, most + 1):
                say(at=index, n=n)
                faulthandler.dump_traceback_later(DEADLINE, exit=True)
                where = (
                    {"of": NATIVE, "below": scenario.below}
                    if scenario.native
                    else {"below": str(folder)}
                )
                problem, text = "", ""
                fault = Fault(call, kind, value, n, **where)
                scenario.prepare()
                if scenario.failed_reads:
                    scenario.failed_reads()
                try:
                    hangs = kind == Kind.HANG
                    with fault, cancelled(scenario, fault) if hangs else contextlib.nullcontext():
                        answer = scenario.attempt()
                    if (scenario.result() if scenario.result else answer) != expected:
                        problem = "wrong result"
                except (moeoff.MoeoffError, OSError, MemoryError) as error:
                    text = str(error)
                    if not is_sentence(text):
                        problem = f"no sentence: {text!r}"
                    elif isinstance(error, OSError) and not isinstance(error, moeoff.MoeoffError):
                        problem = f"{type(error).__name__} instead of an error of ours: {text}"
                    elif hangs:
                        pass  # it was cancelled
                    elif (
                        scenario.failed_reads
                        and call == Call.READ
                        and not ("model" in text and "offset" in text)
                    ):
                        problem = f"does not name file and offset: {text}"
                except Exception as error:
                    problem = f"{type(error).__name__}: {error}"
                fails = (
                    call == Call.READ
                    and kind in (Kind.ERROR, Kind.END, Kind.WRONG)
                    and value != errno.EINVAL
                )
                if fault.fired and fails and not text and not problem and scenario.failed_reads:
                    levels = scenario.failed_reads()
                    if not levels or DEMAND in levels:
                        problem = f"the failed read was not told, of level {levels}"
                try:
                    if text and not problem and scenario.result and scenario.result() != expected:
                        problem = "what was there before the failure has changed"
                    if again() != expected:
                        problem = problem or "the next request was answered wrongly"
                except Exception as error:
                    problem = f"{problem}; the next request: {type(error).__name__}: {error}"
                gc.collect()
                deadline = time.monotonic() + 60
                while left(before) and time.monotonic() < deadline:
                    time.sleep(0.01)
                if stays := left(before):
                    problem, before = problem or stays, held()
                say(
                    at=index, n=n, fired=fault.fired, said=text, problem=problem, rss=status_bytes()
                )
                if not fault.fired:
                    break
        faulthandler.cancel_dump_traceback_later()
        scenario.close()


# --- the program ---


@dataclass
class Outcome:
    """The results of one kind of fault in one scenario."""

    fired: int = 0
    told: int = 0
    complete: bool = False
    problems: list[str] = field(default_factory=list)


def sweep(name: str, most: int) -> tuple[list[Outcome], Counter[str], list[int]]:
    """Children until every fault has been tried: what each kind did, the sentences, and
    sizes of memory.
    """
    faults = SCENARIOS[name][0]
    outcomes, sentences, sizes = [Outcome() for _ in faults], Counter(), []
    first, start = 0, 1
    while first < len(faults):
        child = Child(partial(run, name, most, first, start))
        code = child.wait()
        begun = None
        for line in child.output.splitlines():
            if not line.startswith('{"at"'):
                continue  # what an abort prints
            begun = data = json.loads(line)
            if "fired" not in data:
                continue
            begun = None
            outcome = outcomes[data["at"]]
            outcome.fired += data["fired"]
            outcome.told += bool(data["said"])
            outcome.complete |= not data["fired"]
            sizes.append(data["rss"])
            if data["said"]:
                sentences[data["said"]] += 1
            if data["problem"]:
                outcome.problems.append(f"n = {data['n']}: {data['problem']}")
        if code == 0:
            break
        if begun is None:
            raise click.ClickException(
                f"{name}: the process ended with {code} outside of a step: {child.errors[-2000:]}"
            )
        first, start = begun["at"], begun["n"] + 1
        outcomes[first].problems.append(
            f"n = {begun['n']}: the process ended with {code}: {child.errors[-1500:]}"
        )
        outcomes[first].fired += 1
        if len(outcomes[first].problems) >= 10:
            first, start = first + 1, 1
    return outcomes, sentences, sizes


@main.command("nth", help=__doc__)
@click.option("--most", default=1 << 30, help="No n beyond this.")
@options_of(SCENARIOS)
def check_nth(only: tuple[str, ...], most: int, json_file: str | None) -> None:
    preload()
    import_all()
    columns = [
        "while",
        "call",
        "fault",
        "faults",
        "ended in one sentence",
        "until a run had none",
        "problems",
    ]
    with findings(json_file, "nth-fault", "the n-th fault", columns) as (table, problems):
        for name in only or SCENARIOS:
            outcomes, sentences, sizes = sweep(name, most)
            for (call, kind, value), outcome in zip(SCENARIOS[name][0], outcomes):
                what = errno.errorcode[value] if kind == Kind.ERROR else kind.name.lower()
                table.row(
                    name,
                    call.name.lower(),
                    what,
                    str(outcome.fired),
                    str(outcome.told),
                    "yes" if outcome.complete else "no",
                    str(len(outcome.problems)),
                )
                problems += [
                    f"{name}, {call.name.lower()} {what}, {text}" for text in outcome.problems
                ]
            if sizes:
                quarter = max(len(sizes) // 4, 1)
                print(
                    f"{name}: memory {max(sizes[:quarter]) >> 20} MiB in the first quarter,"
                    f" {max(sizes[-quarter:]) >> 20} MiB in the last",
                    file=sys.stderr,
                )
            for text, n in sentences.most_common(8):
                print(f"  {n} x {text}", file=sys.stderr)
