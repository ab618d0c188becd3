"""Kills: convert, calibrate, runs that write traces and warm-start files, and servers are ended at random moments.

usage: kill.py [--kills N] [--seed N] [--only NAME ...] [--json FILE]

Each is ended by SIGKILL or SIGINT somewhere in the time that it takes. Afterwards every file is whole, the old one or the new one (of a
trace: all that was written before the end), nothing is left behind an interrupt, and the next start works. Exit code 1 if something is not so.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
from common import DEMO, HELP, ResultsFile, commit

DEADLINE = 90  # seconds until what was interrupted must have ended
OPTIONS = ["-c", "128", "-t", "2", "--expert-memory", "2M"]
PROMPT = "Tom has 3 apples and buys 4 more. How many apples has Tom?"


@dataclass
class Program:
    """What is killed.

    Attributes:
        start: in a child.
        check: what is wrong with the files; empty: nothing. Told which signal it was.
        prepare: before each start.
    """

    start: Callable[[], None]
    check: Callable[[int], str]
    prepare: Callable[[], None] = lambda: None


def fork(start: Callable[[], None], said: Path) -> int:
    """A child that runs it, with the exit code that the command would have; what it says on standard error is in a file."""
    pid = os.fork()
    if pid == 0:
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            nothing, errors = os.open(os.devnull, os.O_RDWR), os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for fd, given in enumerate((nothing, nothing, errors)):
                os.dup2(given, fd)
            start()
        except SystemExit as end:
            os._exit(end.code if isinstance(end.code, int) else 1)
        except KeyboardInterrupt:
            os._exit(130)
        except BaseException:
            os._exit(99)
        os._exit(0)
    return pid


def ended(pid: int, seconds: float) -> int | None:
    """Its exit code, or None if it has not ended in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    return None


def command(*args: str) -> Callable[[], None]:
    def start() -> None:
        from moeoff.cli.main import main

        main(list(args))

    return start


# --- programs, each in a folder with a model ---


def converting(folder: Path, resume: bool = False) -> Program:
    from moeoff.companion.convert import convert

    model, out = str(folder / "model.gguf"), folder / "model.experts.gguf"
    old = Path(convert(model, tiers="keep", output=out).path).read_bytes()
    new = Path(convert(model, tiers="keep,Q4_0,Q5_0", output=folder / "whole.gguf").path).read_bytes()
    args = ["convert", model, "--tiers", "keep,Q4_0,Q5_0", "-o", str(out), "--force", "--threads", "2", *(["--resume"] if resume else [])]

    def check(number: int) -> str:
        found = out.read_bytes()
        if found not in (old, new):
            return "the companion is neither the old one nor the new one"
        left = [path.name for path in folder.iterdir() if ".part" in path.name]
        return f"left {left}" if number == signal.SIGINT and not resume and left else ""

    def prepare() -> None:
        out.write_bytes(old)
        if not resume:  # what SIGKILL has left is not what an interrupt leaves
            for path in folder.glob(".*.part*"):
                path.unlink()

    return Program(command(*args), check, prepare)


def calibrating(folder: Path) -> Program:
    import numpy as np

    from moeoff.calibrate.profile_fit import calibrate
    from moeoff.companion.profile import Profile, profile_path
    from moeoff.gguf.layout import Layout

    model, text = str(folder / "model.gguf"), folder / "text.txt"
    text.write_text((PROMPT + "\n") * 300)
    layout, path = Layout.read(model), profile_path(model)
    Profile.write(path, layout, {"precision": {"bits": np.arange(3)}})

    def check(_number: int) -> str:
        sections = Profile.read(path, layout).sections
        return "" if "precision" in sections else f"the profile has lost a section: {sections}"

    def start() -> None:
        calibrate(model, text=[str(text)], tokens=512, hidden=0, only={"popularity"}, memory="2G")

    return Program(start, check)


def running(folder: Path) -> Program:
    """A trace grows with each gate, and the warm-start file is written at the end."""
    import numpy as np

    from moeoff.simulate.trace import Trace

    model, trace = str(folder / "model.gguf"), folder / "run.trace"

    def check(_number: int) -> str:
        if trace.exists() and trace.stat().st_size:
            before = trace.stat().st_size
            n = len(Trace.read(trace).events)
            if before > 1 << 22:
                trace.unlink()
            elif before > 1 << 16 and not n:
                return "the trace has no event"
        for path in (folder / "cache").rglob("*.npz"):
            with np.load(path) as saved:
                saved["residency"]
        return ""

    return Program(command("run", "-m", model, "-p", PROMPT, "-n", "24", "--trace", str(trace), *OPTIONS), check)


def serving(folder: Path) -> Program:
    model = str(folder / "model.gguf")

    def start() -> None:
        import json
        import urllib.request

        import moeoff

        with moeoff.Server(model, port=0, expert_memory="2M", n_ctx=256, parallel=1) as server:
            body = json.dumps({"prompt": PROMPT, "n_predict": 16, "temperature": 0}).encode()
            urllib.request.urlopen(urllib.request.Request(f"{server.url}/completion", body, {"Content-Type": "application/json"}), timeout=60).read()

    return Program(start, running(folder).check)


PROGRAMS: dict[str, Callable[[Path], Program]] = {
    "convert": converting,
    "convert --resume": lambda folder: converting(folder, resume=True),
    "calibrate": calibrating,
    "run --trace": running,
    "serve": serving,
}
SHARES = {"convert": 4, "convert --resume": 4, "calibrate": 2, "run --trace": 4, "serve": 2}


def kill(name: str, count: int, rng: random.Random) -> tuple[Counter[str], list[str], float]:
    """Outcomes, problems, and how long a whole run takes."""
    counts, problems = Counter(), []
    with tempfile.TemporaryDirectory(prefix="moeoff-kill-") as made:
        folder, said = Path(made), Path(made) / "said"
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        shutil.copy(DEMO, folder / "model.gguf")
        program = PROGRAMS[name](folder)
        seconds = 0.0
        for _ in range(2):  # the first one is slower
            program.prepare()
            started = time.monotonic()
            code = ended(fork(program.start, said), DEADLINE)
            seconds = time.monotonic() - started
            if code != 0:
                raise click.ClickException(f"{name}: exit code {code} before anything was killed")
        for n in range(count):
            program.prepare()
            number = rng.choice((signal.SIGKILL, signal.SIGINT))
            pid = fork(program.start, said)
            time.sleep(rng.uniform(0, 1.05 * seconds))
            os.kill(pid, number)
            code = ended(pid, DEADLINE)
            if code is None:
                problems.append(f"{name}: hangs after {number.name}")
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                continue
            counts["killed" if code == -signal.SIGKILL else "interrupted" if code in (130, -signal.SIGINT) else "had ended" if code == 0 else "other"] += 1
            words = said.read_text(errors="replace").strip() if said.exists() else ""
            aborted = code == 1 and words.endswith("Aborted!")  # click's word for an interrupt before the command has begun
            if code not in (0, 130, -signal.SIGKILL, -signal.SIGINT) and not aborted:
                problems.append(f"{name}: exit code {code} after {number.name}: {words[-200:]}")
            try:
                if wrong := program.check(number):
                    problems.append(f"{name}: {wrong}, after {number.name}")
            except Exception as error:
                problems.append(f"{name}: after {number.name}: {type(error).__name__}: {error}")
            if n % 10 == 9 or n == count - 1:
                if (code := ended(fork(program.start, said), DEADLINE)) != 0:
                    problems.append(f"{name}: the next start ends with {code}")
                counts["next starts"] += 1
    return counts, problems, seconds


@click.command()
@click.option("--kills", default=1000, show_default=True)
@click.option("--only", multiple=True, type=click.Choice(list(PROGRAMS)))
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(kills: int, only: tuple[str, ...], seed: int, json_file: str | None) -> None:
    import moeoff.cli.main
    import moeoff.engine.open  # noqa: F401  # what takes time is imported once, before the children

    names, rng, problems = list(only or PROGRAMS), random.Random(seed), []
    with ResultsFile(json_file) as results:
        columns = ["what", "seconds it takes", "ended by SIGKILL", "by SIGINT", "had ended", "whole starts afterwards", "problems"]
        table = results.table("kill", f"killed at random moments, at {commit()}, seed {seed}", columns)
        for name in names:
            count = max(round(kills * SHARES[name] / sum(SHARES[n] for n in names)), 1)
            counts, found, seconds = kill(name, count, rng)
            outcomes = [str(counts[key]) for key in ("killed", "interrupted", "had ended", "next starts")]
            table.row(f"`{name}`", f"{seconds:.2f}", *outcomes, str(len(found)))
            problems += found
    for text, n in Counter(problems).most_common(40):
        print(f"{n} x {text}", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
