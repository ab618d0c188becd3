"""Kills: convert, calibrate, runs that write traces and warm-start files, and servers
are ended at random moments.

Each is ended by SIGKILL or SIGINT somewhere in the time that it takes. Afterwards every
file is whole, the old one or the new one (of a trace: all that was written before the
end), nothing is left behind an interrupt, and the next start works.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from common import DEMO, PROMPT, Child, findings, import_all, main, options_of

DEADLINE = 300  # seconds until what was interrupted must have ended
OPTIONS = ["-c", "128", "-t", "2", "--expert-memory", "2M"]


@dataclass
class Program:
    """A program that is killed.

    Attributes:
        start: Function that runs it in a child.
        check: Function of the signal that returns the problem with the files, or an
            empty string.
        prepare: Function that is called before each start.
    """

    start: Callable[[], object]
    check: Callable[[int], str]
    prepare: Callable[[], None] = lambda: None


def command(*args: str) -> Callable[[], object]:
    from moeoff.cli.main import main as moeoff_main

    return partial(moeoff_main, list(args))


# --- programs, each in a folder with a model ---


def converting(folder: Path, resume: bool = False) -> Program:
    from moeoff.experts.convert import convert

    model, out = str(folder / "model.gguf"), folder / "model.experts.gguf"
    old = Path(convert(model, tiers="original", output=out).path).read_bytes()
    new = Path(
        convert(model, tiers="original,Q4_0,Q5_0", output=folder / "whole.gguf").path
    ).read_bytes()
    args = [
        "convert",
        model,
        "--tiers",
        "original,Q4_0,Q5_0",
        "-o",
        str(out),
        "--force",
        "--threads",
        "2",
        *(["--resume"] if resume else []),
    ]

    def check(number: int) -> str:
        if out.read_bytes() not in (old, new):
            return "the sidecar is neither the old one nor the new one"
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

    from moeoff.experts.profile import Profile, profile_path
    from moeoff.gguf.model_index import ModelIndex
    from moeoff.measure.profile_fit import calibrate

    model, text = str(folder / "model.gguf"), folder / "text.txt"
    text.write_text((PROMPT + "\n") * 300)
    model_index, path = ModelIndex.read(model), profile_path(model)
    Profile.write(path, model_index, {"precision": {"bits": np.arange(3)}})

    def check(_number: int) -> str:
        sections = Profile.read(path, model_index).sections
        return "" if "precision" in sections else f"the profile has lost a section: {sections}"

    return Program(
        lambda: calibrate(
            model, text=[str(text)], tokens=512, hidden=0, only={"popularity"}, memory="2G"
        ),
        check,
    )


def running(folder: Path) -> Program:
    """A trace grows with each gate, and the warm-start file is written at the end."""
    import numpy as np

    from moeoff.routing.trace import Trace

    model, trace = str(folder / "model.gguf"), folder / "run.trace"

    def check(_number: int) -> str:
        if trace.exists() and (size := trace.stat().st_size):
            n = len(Trace.read(trace).events)
            if size > 1 << 22:
                trace.unlink()
            elif size > 1 << 16 and not n:
                return "the trace has no event"
        for path in (folder / "cache").rglob("*.npz"):
            with np.load(path) as saved:
                saved["high"]
        return ""

    return Program(
        command("run", "-m", model, "-p", PROMPT, "-n", "24", "--trace", str(trace), *OPTIONS),
        check,
    )


def serving(folder: Path) -> Program:
    def start() -> None:
        import moeoff

        with moeoff.Server(
            str(folder / "model.gguf"), port=0, expert_memory="2M", n_ctx=256, parallel=1
        ) as server:
            body = json.dumps({"prompt": PROMPT, "n_predict": 16, "temperature": 0}).encode()
            urllib.request.urlopen(
                urllib.request.Request(
                    f"{server.url}/completion", body, {"Content-Type": "application/json"}
                ),
                timeout=DEADLINE,
            ).read()

    return Program(start, running(folder).check)


# each with its share of the kills
PROGRAMS: dict[str, tuple[int, Callable[[Path], Program]]] = {
    "convert": (4, converting),
    "convert --resume": (4, partial(converting, resume=True)),
    "calibrate": (2, calibrating),
    "run --trace": (4, running),
    "serve": (2, serving),
}


def kill(name: str, count: int, rng: random.Random) -> tuple[Counter[str], list[str], float]:
    """Outcomes, problems, and how long a whole run takes."""
    counts, problems = Counter(), []
    with tempfile.TemporaryDirectory(prefix="moeoff-kill-") as made:
        folder = Path(made)
        os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
        shutil.copy(DEMO, folder / "model.gguf")
        program = PROGRAMS[name][1](folder)
        for _ in range(2):
            program.prepare()
            started = time.monotonic()
            child = Child(program.start)
            code, seconds = child.wait(DEADLINE), time.monotonic() - started
            if code != 0:
                raise click.ClickException(
                    f"{name}: exit code {code} before anything was killed: {child.errors[-500:]}"
                )
        for n in range(count):
            program.prepare()
            number = rng.choice((signal.SIGKILL, signal.SIGINT))
            child = Child(program.start)
            time.sleep(rng.uniform(0, 1.05 * seconds))
            os.kill(child.pid, number)
            code, words = child.wait(DEADLINE), child.errors.strip()
            if code is None:
                problems.append(f"{name}: hangs after {number.name}")
                continue
            counts[
                "killed"
                if code == -signal.SIGKILL
                else "interrupted"
                if code in (130, -signal.SIGINT)
                else "had ended"
                if code == 0
                else "other"
            ] += 1
            # click's word for an interrupt before the command has begun
            aborted = code == 1 and words.endswith("Aborted!")
            if code not in (0, 130, -signal.SIGKILL, -signal.SIGINT) and not aborted:
                problems.append(f"{name}: exit code {code} after {number.name}: {words[-200:]}")
            try:
                if wrong := program.check(number):
                    problems.append(f"{name}: {wrong}, after {number.name}")
            except Exception as error:
                problems.append(f"{name}: after {number.name}: {type(error).__name__}: {error}")
            if n % 10 == 9 or n == count - 1:
                if (code := Child(program.start).wait(DEADLINE)) != 0:
                    problems.append(f"{name}: the next start ends with {code}")
                counts["next starts"] += 1
    return counts, problems, seconds


@main.command("kill", help=__doc__)
@click.option("--kills", default=1000, show_default=True)
@click.option("--seed", default=1, show_default=True)
@options_of(PROGRAMS)
def check_kills(kills: int, only: tuple[str, ...], seed: int, json_file: str | None) -> None:
    import_all()
    rng = random.Random(seed)
    shares = {name: share for name, (share, _) in PROGRAMS.items() if name in (only or PROGRAMS)}
    columns = [
        "what",
        "seconds it takes",
        "ended by SIGKILL",
        "by SIGINT",
        "had ended",
        "whole starts afterwards",
        "problems",
    ]
    with findings(json_file, "kill", f"killed at random moments, seed {seed}", columns) as (
        table,
        problems,
    ):
        for name, share in shares.items():
            counts, wrong, seconds = kill(
                name, max(round(kills * share / sum(shares.values())), 1), rng
            )
            table.row(
                f"`{name}`",
                f"{seconds:.2f}",
                *(
                    str(counts[key])
                    for key in ("killed", "interrupted", "had ended", "next starts")
                ),
                str(len(wrong)),
            )
            problems += wrong
