"""Damaged models: whatever a GGUF says, there is an answer or one sentence, within the memory that was given.

usage: damaged.py [--no-named] [--no-values] [--headers N] [--first N] [--runs N] [--seed N ...] [--json FILE]

named: what has ended processes elsewhere (no layers, too many, layers for drafts, tensors that overlap, F64, huge strings, hostile chat templates), each
through `inspect`, `run`, `convert` and `serve`.
values: each hyperparameter and token that is one number says another one, through `run`.
headers: so many GGUF headers, of which a field says something else, or several numbers that are multiplied, or the vocabulary, or which hold what is legal and
huge. What every command reads first reads them (model_index, preflight), and what that does not refuse is opened, reads a text and answers, many models in
one process. runs: so many of those go through `run`, `convert` and `inspect` in a child each, with --memory, in 8 GiB of address space, and under a deadline;
some through `serve`.
A case that is ended by a signal, that takes more memory than its budget, that says more than a sentence, or hangs, is a finding; so is
any exception that is not the library's own. Exit code 1 if there is one. Each header is chance of its own, made of the seed and its number:
`--first N --headers 1` does it again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from common import (
    ADDRESS_SPACE,
    DEADLINE,
    Case,
    Child,
    case_rng,
    findings_by_seed,
    import_all,
    in_workers,
    json_option,
    judged,
    open_model,
    seeds_option,
    tell_all,
    verdict,
    write_small_model,
)
from moeoff.gguf.file import ModelFile
from mutants import MARK, RECIPES, TEXTS, Header, Mutant, named_mutants, value_mutants

MEMORY = 300 << 20
OPTIONS = ["-c", "64", "--warm", "off", "--profile", "none", "--experts", "none", "-t", "1", "--memory", str(MEMORY)]
OPENED = {"n_threads": 1, "n_ctx": 64}


# --- headers, many in one process ---


class Damaged:
    """A model in a folder of its own whose header is another one each time."""

    def __init__(self, folder: Path, model: str, seed: int):
        self.path, self._seed = folder / "model.gguf", seed
        shutil.copy(model, self.path)
        with ModelFile(model) as file:
            self.header = Header(file.header())
        self.rest = Path(model).read_bytes()[len(self.header.whole) :]
        self._plain = True

    def recipe(self, n: int) -> str:
        return case_rng(self._seed, n, "recipe").choices(list(RECIPES), [share for share, _ in RECIPES.values()])[0]

    def mutant(self, n: int) -> Mutant:
        return RECIPES[self.recipe(n)][1](self.header, case_rng(self._seed, n))

    def write(self, mutant: Mutant) -> None:
        """Where nothing moves, only what differs is written."""
        if mutant.in_place and self._plain:
            with open(self.path, "r+b", buffering=0) as file:
                file.seek(mutant.at)
                file.write(mutant.data)
            return
        mutant.write(self.path, self.header.whole, self.rest)
        self._plain = False

    def restore(self, mutant: Mutant) -> None:
        if self._plain:
            with open(self.path, "r+b", buffering=0) as file:
                file.seek(mutant.at)
                file.write(self.header.whole[mutant.at : mutant.at + mutant.n_removed])
        else:
            self.path.write_bytes(self.header.whole + self.rest)
            self._plain = True


def read_header(path: str) -> None:
    from moeoff.gguf.model_index import ModelIndex
    from moeoff.gguf.preflight import preflight

    model_index = ModelIndex.read(path)
    model_index.require_experts()
    preflight(model_index)


def open_and_answer(path: str) -> None:
    """As `run` does it: texts become tokens, and tokens text."""
    from moeoff.engine.prompt import Template, prompt_tokens

    with open_model(path, **OPENED, expert_memory=None, memory=MEMORY) as llm:
        tokens = [token for text in TEXTS for token in prompt_tokens(llm, text, add_bos=True)]
        llm.detokenize(tokens)
        if "tokenizer.chat_template" in llm.metadata:
            Template(llm)
        llm.create_completion(tokens[:8] or [0], max_tokens=2, temperature=0.0)


def header_worker(model: str, seed: int) -> Callable[[int], tuple[str, str]]:
    folder = tempfile.mkdtemp(dir=os.environ["XDG_CACHE_HOME"])
    damaged = Damaged(Path(folder), model, seed)

    def check(n: int) -> tuple[str, str]:
        mutant = damaged.mutant(n)
        damaged.write(mutant)
        path = str(damaged.path)
        outcome, problem = judged(lambda: read_header(path), path)
        if outcome == "accepted":
            outcome, problem = judged(lambda: open_and_answer(path), path)
        damaged.restore(mutant)
        return outcome, problem and f"{mutant.what[:200]}: {problem}"

    return check


# --- children ---


OUTCOMES = {0: "accepted", 1: "refused"}


def confined(body: Callable[[], object], folder: Path) -> None:
    os.chdir(folder)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    body()


def command(args: list[str]) -> None:
    from moeoff.cli.main import main

    main(args)


def serve(path: Path, **options: Any) -> None:
    """Starts a server, asks it twice if it starts, and stops it."""
    import moeoff

    try:
        with moeoff.Server(str(path), port=0, memory=MEMORY, n_ctx=256, parallel=1, warm=False, **options) as server:
            for text in ("Hi", "now"):
                body = json.dumps({"messages": [{"role": "user", "content": text}], "max_tokens": 2}).encode()
                request = urllib.request.Request(f"{server.url}/v1/chat/completions", body, {"Content-Type": "application/json"})
                with contextlib.suppress(urllib.error.HTTPError):
                    urllib.request.urlopen(request, timeout=DEADLINE).read()
            urllib.request.urlopen(f"{server.url}/health", timeout=DEADLINE).read()
    except moeoff.MoeoffError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(1)


def check_runs(damaged: Damaged, mutants: Iterable[Mutant], *, all_commands: bool = False) -> Iterator[tuple[str, Case]]:
    """The command and what became of each run; of most mutants `run` alone."""
    out, mark = damaged.path.with_name("model.experts.gguf"), damaged.path.with_name(MARK)
    for n, mutant in enumerate(mutants):
        damaged.write(mutant)
        said = f"{mutant.what[:200]}, {mutant.data[:16].hex()} at {mutant.at}"
        mutant = replace(mutant, data=b"", tail=b"", rest=None)  # a child begins with the memory of this process
        commands = {"run": ["run", "-m", str(damaged.path), "-p", "Hi", "-n", "2", *OPTIONS]}
        if all_commands or n % 8 == 0:
            commands["inspect"] = ["inspect", str(damaged.path), "--probe", "off"]
            commands["convert"] = ["convert", str(damaged.path), "--tiers", "original,Q4_0", "-o", str(out), "--force"]
        bodies = {name: functools.partial(command, args) for name, args in commands.items()}
        if all_commands or n % 16 == 0:
            bodies["serve"] = functools.partial(serve, damaged.path)
        for name, body in bodies.items():
            child = Child(functools.partial(confined, body, mark.parent))
            code = child.wait(DEADLINE)
            wrong = verdict(code, child.errors, peak=child.peak, memory=MEMORY * (name in ("run", "serve")), quiet=name != "serve")
            if mark.exists():
                mark.unlink()
                wrong += " the template has run code"
            yield name, Case(n, OUTCOMES.get(code, "ended"), wrong and f"{said}: {wrong}")
        damaged.restore(mutant)


def check_headers(damaged: Damaged, model: str, seed: int, numbers: Iterable[int], runs: int, accepted: list[int]) -> Iterator[tuple[str, Case]]:
    """Into `accepted` goes a sample of those that were."""
    rng = random.Random(seed)
    for case in in_workers(functools.partial(header_worker, model, seed), numbers, memory=MEMORY, life=1000):
        if case.outcome == "accepted" and len(accepted) < runs:
            accepted.append(case.n)
        elif case.outcome == "accepted" and runs:
            accepted[rng.randrange(runs)] = case.n
        yield damaged.recipe(case.n), case


@click.command()
@click.option("--named/--no-named", default=True, show_default=True)
@click.option("--values/--no-values", default=True, show_default=True)
@click.option("--headers", default=100_000, show_default=True)
@click.option("--runs", default=2000, show_default=True)
@click.option("--first", default=0, show_default=True, help="Number of the first header.")
@seeds_option
@json_option
def main(named: bool, values: bool, headers: int, runs: int, first: int, seeds: tuple[int, ...], json_file: str | None) -> None:
    import_all()
    columns = ["what", "files", "refused in one sentence", "accepted", "problems"]
    with findings_by_seed(json_file, "damaged", "damaged files", columns, seeds) as (tables, wrong), tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        model = f"{name}/small.gguf"
        write_small_model(model)
        for seed, table in tables:
            again, damaged = f"--no-named --no-values --seed {seed}", Damaged(Path(name), model, seed)
            if seed == seeds[0]:  # where nothing is left to chance
                if named:
                    wrong += tell_all(table, "named damage, ", check_runs(damaged, named_mutants(model), all_commands=True), again)
                if values:
                    wrong += tell_all(table, "numbers, ", check_runs(damaged, value_mutants(model)), again)
            accepted: list[int] = []
            if headers:
                wrong += tell_all(table, "GGUF headers, ", check_headers(damaged, model, seed, range(first, first + headers), runs, accepted), again)
            if accepted:
                wrong += tell_all(table, "accepted headers, ", check_runs(damaged, map(damaged.mutant, accepted)), again)


if __name__ == "__main__":
    main()
