"""Damaged files: whatever a GGUF, a companion, a profile, settings, a trace, a plan say, there is an answer or one sentence.

usage: damaged.py [--no-named] [--headers N] [--runs N] [--beside N] [--seed N] [--json FILE]

named: what has ended processes elsewhere (no layers, too many, layers for drafts, tensors that overlap, F64, huge strings, hostile chat templates), each
through `inspect`, `run`, `convert` and `serve`.
headers: so many GGUF headers of which one field says something else are read in one process, as every command reads them first
(layout, preflight, what `inspect` says). runs: so many of those that this does not refuse go through `run`, `convert` and `inspect` in a child each,
with --memory, in 8 GiB of address space, and under a deadline; some through `serve`. beside: so many damaged files beside a model are read.
A child that is ended by a signal, that takes more memory than its budget, that says more than a sentence, or hangs, is a finding; so is
any exception that is not the library's own. Exit code 1 if there is one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import click
from common import DEMO, HELP, ResultsFile, Table, commit, is_sentence
from mutants import MARK, Mutant, fields, mutate, mutate_header, named_mutants

DEADLINE = 60  # seconds of a child
ADDRESS_SPACE = 8 << 30
MEMORY = 300 << 20
OPTIONS = ["-c", "64", "--no-warm", "--no-profile", "--no-experts", "-t", "1", "--memory", str(MEMORY)]


class Damaged:
    """A model in a folder of its own whose header is another one each time."""

    def __init__(self, folder: Path, seed: int):
        from moeoff.gguf.file import ModelFile

        self.path, self.rng = folder / "model.gguf", random.Random(seed)
        shutil.copy(DEMO, self.path)
        with ModelFile(DEMO) as model:
            self.header = model.header()
        self.rest = Path(DEMO).read_bytes()[len(self.header) :]
        self.places = fields(self.header)
        self._plain = True

    def next(self) -> Mutant:
        return mutate_header(self.header, self.places, self.rng)

    def write(self, mutant: Mutant) -> None:
        """Where nothing moves, only what differs is written."""
        if len(mutant.data) == mutant.n_removed and mutant.rest is None and self._plain:
            with open(self.path, "r+b", buffering=0) as file:
                file.seek(mutant.at)
                file.write(mutant.data)
            return
        with open(self.path, "wb") as file:
            file.write(mutant.apply(self.header))
            file.write(self.rest if mutant.rest is None else mutant.rest)
        self._plain = False

    def restore(self, mutant: Mutant) -> None:
        if self._plain:
            with open(self.path, "r+b", buffering=0) as file:
                file.seek(mutant.at)
                file.write(self.header[mutant.at : mutant.at + mutant.n_removed])
        else:
            self.path.write_bytes(self.header + self.rest)
            self._plain = True


def check_headers(damaged: Damaged, count: int, keep: int) -> tuple[Counter[str], list[str], list[Mutant]]:
    """What became of each kind, what is wrong, and a sample of what was accepted."""
    from moeoff.errors import MoeoffError
    from moeoff.gguf.layout import Layout
    from moeoff.gguf.preflight import preflight

    kinds, problems, accepted = Counter(), [], []
    for n in range(count):
        mutant = damaged.next()
        damaged.write(mutant)
        faulthandler.dump_traceback_later(DEADLINE, exit=True)
        try:
            layout = Layout.read(str(damaged.path))
            layout.require_experts()
            preflight(layout)
            kinds["accepted"] += 1
            if len(accepted) < keep:
                accepted.append(mutant)
            elif (at := damaged.rng.randrange(n + 1)) < keep:
                accepted[at] = mutant
        except MoeoffError as error:
            kinds["refused"] += 1
            if not is_sentence(str(error).replace(str(damaged.path), "model")):
                problems.append(f"{mutant.what}: no sentence: {str(error)[:300]!r}")
        except Exception as error:
            problems.append(f"{mutant.what}, {mutant.data[:16].hex()} at {mutant.at}: {type(error).__name__}: {str(error)[:300]}")
        damaged.restore(mutant)
    faulthandler.cancel_dump_traceback_later()
    return kinds, problems, accepted


# --- children ---


def forked(body: Callable[[], object], folder: Path) -> tuple[int, str, int]:
    """(exit code, what was written to standard error, peak of its memory) of a child that does this in a folder; a signal is a negative code."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 0
        try:
            os.dup2(writer, 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.close(reader)
            os.chdir(folder)
            resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(DEADLINE)
            body()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1
        except BaseException:
            traceback.print_exc()
            code = 99
        sys.stderr.flush()
        os._exit(code)
    os.close(writer)
    with open(reader, errors="replace") as pipe:
        text = pipe.read()
    _, status, usage = os.wait4(pid, 0)
    return os.waitstatus_to_exitcode(status), text, usage.ru_maxrss << 10


def command(args: list[str]) -> None:
    from moeoff.cli.main import main

    main(args)


def serve(path: Path) -> None:
    """Starts a server, asks it twice if it starts, and stops it."""
    import moeoff

    try:
        with moeoff.Server(str(path), port=0, memory=MEMORY, n_ctx=256, parallel=1, warm=False) as server:
            for text in ("Hi", "now"):
                body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 2}).encode()
                request = urllib.request.Request(f"{server.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
                with contextlib.suppress(urllib.error.HTTPError):
                    urllib.request.urlopen(request, timeout=30).read()
            urllib.request.urlopen(f"{server.url}/health", timeout=30).read()
    except moeoff.MoeoffError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(1)


def verdict(code: int, text: str, peak: int, *, bounded: bool, quiet: bool = True) -> str:
    """What is wrong; empty: nothing."""
    lines = [line for line in text.splitlines() if line.strip()]
    if code not in (0, 1):
        return f"exit code {code}: {text[-600:]}"
    if bounded and peak > MEMORY:
        return f"{peak >> 20} MiB of {MEMORY >> 20}"
    if code == 1 and quiet and not (lines and lines[-1].startswith("Error: ") and sum(line.startswith("Error: ") for line in lines) == 1):
        return f"no sentence: {text[-600:]!r}"
    return ""


def check_runs(damaged: Damaged, mutants: Iterable[Mutant], *, all_commands: bool = False) -> Iterator[tuple[str, int, str]]:
    """(command, exit code, what is wrong) of each run; of most mutants `run` alone."""
    out, mark = damaged.path.with_name("model.experts.gguf"), damaged.path.with_name(MARK)
    for n, mutant in enumerate(mutants):
        damaged.write(mutant)
        said = f"{mutant.what}, {mutant.data[:16].hex()} at {mutant.at}"
        mutant = replace(mutant, data=mutant.data[: mutant.n_removed], rest=None)  # a child begins with the memory of this process
        commands = {"run": ["run", "-m", str(damaged.path), "-p", "Hi", "-n", "2", *OPTIONS]}
        if all_commands or n % 8 == 0:
            commands["inspect"] = ["inspect", str(damaged.path), "--no-probe"]
            commands["convert"] = ["convert", str(damaged.path), "--tiers", "keep,Q4_0", "-o", str(out), "--force"]
        bodies = {name: functools.partial(command, args) for name, args in commands.items()}
        if all_commands or n % 16 == 0:
            bodies["serve"] = functools.partial(serve, damaged.path)
        for name, body in bodies.items():
            code, text, peak = forked(body, mark.parent)
            wrong = verdict(code, text, peak, bounded=name in ("run", "serve"), quiet=name != "serve")
            if mark.exists():
                mark.unlink()
                wrong += " the template has run code"
            yield name, code, wrong and f"{name}, {said}: {wrong}"
        damaged.restore(mutant)


# --- beside a model ---


def files_beside(folder: Path, model: str) -> dict[str, tuple[Path, Callable[[Path], object]]]:
    """A whole file of each kind, and what reads it."""
    import gguf
    import numpy as np

    from moeoff.companion.convert import convert
    from moeoff.companion.file import Companion
    from moeoff.companion.profile import Profile
    from moeoff.companion.settings import Choice, Settings, Tuning
    from moeoff.companion.tiers import read_plan
    from moeoff.companion.verify import verify
    from moeoff.gguf.imatrix import Imatrix
    from moeoff.gguf.layout import Layout
    from moeoff.simulate.trace import Trace

    layout = Layout.read(model)
    companion, profile, settings, plan, imatrix = (folder / name for name in ("m.experts.gguf", "m.profile.npz", "m.moeoff.json", "plan.json", "imatrix.gguf"))
    convert(model, tiers="keep,Q4_0", output=companion)
    Profile.write(profile, layout, {"popularity": {"counts": np.arange(384).reshape(12, 32)}, "precision": {"bits": np.arange(3.0)}})
    Settings.write(settings, layout, Tuning(1 << 30, "a machine", "2026-01-01", {"strategy": Choice("lru", "fast")}))
    plan.write_text(json.dumps({"default": "Q4_0", "layers": {"0": {"0": "Q8_0", "1": "keep"}, "3": "F16"}}))
    writer = gguf.GGUFWriter(imatrix, "imatrix")
    writer.add_string("general.type", "imatrix")
    for name, span in list(layout.experts.items())[:4]:
        writer.add_tensor(f"{name}.in_sum2", np.ones((span.shape[2], span.shape[0]), np.float32))
        writer.add_tensor(f"{name}.counts", np.ones((span.shape[2], 1), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    trace = Path(DEMO).parents[2] / "tests" / "data" / "small.trace"

    def read_companion(path: Path) -> None:
        found = Companion(path)
        found.check_belongs(layout)
        for span in layout.experts.values():
            list(found.sources(span, "keep"))

    return {
        "companion": (companion, read_companion),
        "companion, verify": (companion, lambda path: verify(path, model=model)),
        "profile": (profile, lambda path: Profile.read(path, layout)),
        "settings": (settings, lambda path: Settings.read(path, layout).best(1 << 30, "a machine")),
        "plan": (plan, lambda path: read_plan(path, layout.experts)),
        "importance matrix": (imatrix, lambda path: Imatrix.read(path)),
        "trace": (trace, lambda path: Trace.read(path).counts()),
    }


DEEP = [
    b"[" * 100000,
    b'{"a":' * 100000,
    b'{"default": ' + b"[" * 100000,
    b"\xff\xfe",
    b"",
    b"null",
    b"[]",
    b"{}",
    b'"x"',
    b"1e999",
    b"NaN",
    b'{"layers": {"0": {"0": 7}}}',
]


def check_beside(count: int, rng: random.Random) -> Iterator[tuple[str, bool, str]]:
    """(kind, whether it was accepted, what is wrong)."""
    from moeoff.errors import MoeoffError

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = shutil.copy(DEMO, folder / "m.gguf")
        bad = folder / "bad"
        for kind, (path, read) in files_beside(folder, str(model)).items():
            whole = path.read_bytes()
            for n in range(max(count // 10, 1) if "verify" in kind else count):
                data = DEEP[n] if n < len(DEEP) and path.suffix == ".json" else mutate(whole, rng)
                bad.write_bytes(data)
                faulthandler.dump_traceback_later(DEADLINE, exit=True)
                try:
                    read(bad)
                    yield kind, True, ""
                except MoeoffError as error:
                    yield kind, False, "" if is_sentence(str(error).replace(str(bad), "bad")) else f"{kind}: no sentence: {str(error)[:300]!r}"
                except Exception as error:
                    yield kind, False, f"{kind}: {type(error).__name__}: {str(error)[:300]}"
    faulthandler.cancel_dump_traceback_later()


def tell_runs(table: Table, what: str, runs: Iterable[tuple[str, int, str]]) -> list[str]:
    """A row for each command; what is wrong."""
    counted: dict[str, Counter[str]] = {}
    wrong = []
    for name, code, problem in runs:
        counted.setdefault(name, Counter())[str(code)] += 1
        counted[name]["problems"] += bool(problem)
        wrong += [problem] * bool(problem)
    for name, codes in counted.items():
        table.row(f"{what}, {name}", str(codes.total() - codes["problems"]), str(codes["1"]), str(codes["0"]), str(codes["problems"]))
    return wrong


@click.command()
@click.option("--named/--no-named", default=True, show_default=True)
@click.option("--headers", default=100_000, show_default=True)
@click.option("--runs", default=2000, show_default=True)
@click.option("--beside", default=2000, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(named: bool, headers: int, runs: int, beside: int, seed: int, json_file: str | None) -> None:
    import moeoff.cli.main
    import moeoff.engine.open  # noqa: F401  # what takes time is imported once, before the children

    wrong: list[str] = []
    with ResultsFile(json_file) as results, tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        damaged = Damaged(Path(name), seed)
        table = results.table("damaged", f"damaged files, at {commit()}, seed {seed}", ["what", "files", "refused in one sentence", "accepted", "problems"])
        if named:
            wrong += tell_runs(table, "named damage", check_runs(damaged, named_mutants(DEMO), all_commands=True))
        if headers:
            started = time.monotonic()
            kinds, problems, accepted = check_headers(damaged, headers, runs)
            table.row("GGUF headers", str(headers), str(kinds["refused"]), str(kinds["accepted"]), str(len(problems)))
            print(f"{headers / (time.monotonic() - started):.0f} headers/s", file=sys.stderr)
            wrong += problems
            wrong += tell_runs(table, "accepted headers", check_runs(damaged, accepted))
        found: dict[str, Counter[str]] = {}
        for kind, accepted_, problem in check_beside(beside, random.Random(seed)) if beside else ():
            found.setdefault(kind, Counter())["accepted" if accepted_ else "refused"] += 1
            found[kind]["problems"] += bool(problem)
            wrong += [problem] * bool(problem)
        for kind, counts in found.items():
            table.row(
                kind, str(counts["accepted"] + counts["refused"]), str(counts["refused"] - counts["problems"]), str(counts["accepted"]), str(counts["problems"])
            )
    for text, n in Counter(wrong).most_common(40):
        print(f"{n} x {text}", file=sys.stderr)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
