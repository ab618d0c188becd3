"""A model object in the hands of a program: whatever is done with it, and wherever that
is interrupted, the next answer is the one of a fresh process.

interrupt: an exception at any function call or return of Python's, or by a signal at
any time, while a model answers, is opened, moves its budget, ... abandon: an answer is
left in its middle, or cancelled from another thread. threads: several work with one
object, and one of them may close it. (Callbacks that raise, forks, calls after close()
and objects without it: tests/run/test_model_lock.py.)

Each case is chance of its own, made of the seed and its number: `--first N --count 1`
does it again. Cases follow each other in one process, on one model object, as long as
neither ends. A signal, a hang, another exception than the one that was thrown or the
library's own, a wrong next answer, descriptors or threads that stay are findings.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from common import (
    DEADLINE,
    PROMPT,
    Child,
    case_rng,
    findings_by_seed,
    import_all,
    in_workers,
    is_sentence,
    main,
    open_model,
    options_of,
    status_bytes,
    tell_all,
    write_small_model,
)
from helpers.interrupts import Interrupt, at_event, at_time
from moeoff.errors import BudgetError

N_TOKENS = 8
STAYS = 400  # cases with one variant before the next
VARIANTS: list[dict[str, Any]] = [  # room: beyond what the process takes, for a budget
    {"strategy": "auto", "n_threads": 1, "room": 64 << 20},
    {"strategy": "lru", "n_threads": 1},
    {"strategy": "auto", "n_threads": 2, "n_batch": 16, "n_ubatch": 8},
    {"strategy": "lru", "n_threads": 1, "flash_attn": False},
    {"strategy": "hobbit", "n_threads": 1, "logits_all": True},
    {"strategy": "lru", "n_threads": 1, "embedding": True},
    {"strategy": "fate", "n_threads": 1, "room": 64 << 20},
]
PROMPTS = [
    PROMPT,
    PROMPT + " Ann has none, and Bob has two more than Tom.",
    "Tom",
    "Once upon a time there was a house on a hill. " * 2,
]


def open_variant(model: str, variant: int) -> Any:
    options = dict(VARIANTS[variant])
    if room := options.pop("room", 0):
        options |= {"memory": status_bytes() + room, "expert_memory": None}
    return open_model(model, **options)


class Subject:
    """A model that is open, and what it must answer."""

    def __init__(self, model: str, seed: int, expected: list[list[list[int]]]):
        self.model, self.seed, self.expected = model, seed, expected
        self.variant = -1
        self.latest = 0  # prompt
        self.llm: Any = None

    def open(self, variant: int) -> None:
        if self.llm is None or variant != self.variant:
            if self.llm is not None:
                self.llm.close()
            self.llm, self.variant = open_variant(self.model, variant), variant
            self.prompts = [self.llm.tokenize(text.encode()) for text in PROMPTS]

    def drop(self) -> None:
        """The next case opens a new one."""
        llm, self.llm = self.llm, None
        if llm is not None:
            llm.close()

    def begin(self, rng: random.Random) -> None:
        """Reset the model to a random beginning: an empty context, or one prompt."""
        self.llm.clear_context()
        if rng.random() < 0.5:
            self.answer(rng.randrange(len(PROMPTS)))

    def answer(self, which: int) -> list[int]:
        return first_tokens(self.llm.generate(self.prompts[which], top_k=1, temp=0.0))

    def check(self, which: int, way: int) -> str:
        """Return the problem with the next answer, or an empty string."""
        expected = self.expected[self.variant][which]
        try:
            if way:
                reply = self.llm.create_completion(
                    PROMPTS[which], max_tokens=N_TOKENS, temperature=0.0
                )["choices"][0]["text"]
                expected = self.llm.detokenize(expected).decode(errors="ignore")
                # an end token is in the one, and not in the other
                if reply.strip() and expected.startswith(reply.rstrip("\ufffd")):
                    reply = expected
            else:
                reply = self.answer(which)
        except BaseException as error:
            return f"the next answer: {type(error).__name__}: {error}"
        if reply != expected:
            return f"the next answer is {reply}, expected {expected}"
        planned, held = (
            sum(self.llm.engine.sizer.arenas),
            self.llm.engine.buffer.stats().cache_bytes,
        )
        return (
            ""
            if planned == held or not self.llm.engine.plan.budget
            else f"the arenas have {held} bytes, planned {planned}"
        )


def first_tokens(tokens: Iterator[int]) -> list[int]:
    with contextlib.closing(tokens):
        return list(itertools.islice(tokens, N_TOKENS))


# --- what is done ---


def actions(subject: Subject, rng: random.Random) -> dict[str, Callable[[], object]]:
    """Anything that a program may do with a model."""
    llm, which = subject.llm, rng.randrange(len(PROMPTS))
    subject.latest = which
    text, tokens = PROMPTS[which], subject.prompts[which]

    def states() -> None:
        state = llm.save_state()
        subject.answer(which)
        llm.load_state(state)

    def memory() -> None:
        plan = llm.engine.plan
        # what the smallest one is changes with what the process needs beside the model
        with contextlib.suppress(BudgetError):
            if not plan.budget:
                llm.engine.buffer.set_cache_bytes(
                    rng.choice((llm.engine.buffer.arena_floor, llm.engine.buffer.arena_full))
                )
                return
            llm.set_memory(
                rng.choice(
                    (plan.floor, plan.floor + (1 << 20), plan.fixed + plan.arena_full, plan.budget)
                )
            )

    by_name: dict[str, Callable[[], object]] = {
        "generate": lambda: subject.answer(which),
        "complete": lambda: llm.create_completion(text, max_tokens=N_TOKENS, temperature=0.0),
        "stream": lambda: list(
            llm.create_completion(text, max_tokens=N_TOKENS, temperature=0.8, stream=True)
        ),
        "chat": lambda: llm.create_chat_completion(
            [{"role": "user", "content": text}], max_tokens=N_TOKENS
        ),
        "eval": lambda: (llm.reset(), llm.eval(tokens), llm.sample(temp=0.0)),
        "batch": lambda: (
            llm.clear_context(),
            llm.decode_batch(tokens[:4], 0, len(tokens[:4]) - 1),
            llm.clear_context(),
        ),
        "states": states,
        "tokens": lambda: llm.detokenize(llm.tokenize(text.encode())),
        "memory": memory,
        "statistics": lambda: (llm.stats(), llm.reset_stats()),
        "open": lambda: open_and_close(subject.model, rng),
    }
    if VARIANTS[subject.variant].get("embedding"):
        by_name["embed"] = lambda: llm.embed(text)
    return by_name


WEIGHTS = {"generate": 8, "complete": 6, "stream": 4, "chat": 3, "open": 2, "memory": 3, "embed": 4}


def chosen(subject: Subject, rng: random.Random, *without: str) -> tuple[str, Callable[[], object]]:
    by_name = {
        name: action for name, action in actions(subject, rng).items() if name not in without
    }
    name = rng.choices(list(by_name), [WEIGHTS.get(name, 1) for name in by_name])[0]
    return name, by_name[name]


def open_and_close(model: str, rng: random.Random) -> None:
    with open_model(model, strategy=rng.choice(("lru", "auto")), warm=rng.random() < 0.5) as llm:
        first_tokens(llm.generate([1, 2, 3], top_k=1, temp=0.0))


# --- interrupts ---


def ended_with(action: Callable[[], object], *thrown: type[BaseException]) -> tuple[str, str]:
    """Run an action into which an exception is thrown, and return how it ended."""
    from moeoff.errors import MoeoffError

    try:
        action()
        return "accepted", ""  # it had ended before, or nobody was told
    except thrown:
        return "refused", ""
    except MoeoffError as error:
        return "refused", "" if is_sentence(str(error)) else f"no sentence: {error!r}"
    except BaseException as error:
        return "raised", f"{type(error).__name__}: {error}"


class Costs:
    """The number of places and the seconds of each action, as far as known."""

    def __init__(self) -> None:
        self.places: dict[str, int] = {}
        self.seconds: dict[str, float] = {}

    def measure(self, name: str, action: Callable[[], object], begin: Callable[[], None]) -> None:
        if name not in self.places:
            begin()
            started = time.perf_counter()
            action()
            self.seconds[name] = time.perf_counter() - started
            begin()
            with at_event(0) as counted:
                action()
            self.places[name] = counted.places


def interrupted(subject: Subject, rng: random.Random, costs: Costs) -> tuple[str, str]:
    name, action = chosen(subject, rng)
    costs.measure(f"{subject.variant}{name}", action, subject.llm.clear_context)
    subject.begin(rng)
    if rng.random() < 0.6:
        interrupt = at_event(
            rng.randrange(1, int(1.05 * costs.places[f"{subject.variant}{name}"]) + 2)
        )
    else:
        interrupt = at_time(
            max(rng.uniform(0, 1.05 * costs.seconds[f"{subject.variant}{name}"]), 1e-6)
        )

    def body() -> None:
        with interrupt:
            action()

    outcome, problem = ended_with(body, Interrupt)
    return outcome, problem and f"{name}: {problem}"


def abandoned(subject: Subject, rng: random.Random, _costs: Costs) -> tuple[str, str]:
    """Left in its middle, and closed, kept or forgotten; or cancelled."""
    llm, n = subject.llm, rng.randrange(N_TOKENS)
    if rng.random() < 0.5:
        tokens = rng.choice(subject.prompts)
        answer: Any = llm.generate(tokens, top_k=1, temp=0.0)
    else:
        answer = llm.create_completion(rng.choice(PROMPTS), max_tokens=N_TOKENS, stream=True)
    cancels = threading.Timer(rng.uniform(0, 0.03), llm.cancel) if rng.random() < 0.4 else None

    def body() -> None:
        if cancels:
            cancels.start()
        for _, _token in zip(range(n + 20 * bool(cancels)), answer):
            pass
        if rng.random() < 0.5:
            answer.close()

    outcome, problem = ended_with(body)
    if cancels:
        cancels.join()
    return outcome, problem


# --- threads ---


def threaded(subject: Subject, rng: random.Random, _costs: Costs) -> tuple[str, str]:
    from moeoff.errors import MoeoffError

    closes = rng.random() < 0.4
    problems: list[str] = []

    def work(rng: random.Random, closer: bool) -> None:
        try:
            for _ in range(3):
                if closer:
                    time.sleep(rng.uniform(0, 0.05))
                    subject.llm.close()
                elif rng.random() < 0.15:
                    subject.llm.cancel()
                elif rng.random() < 0.5:
                    which = rng.randrange(len(PROMPTS))
                    if (tokens := subject.answer(which)) != subject.expected[subject.variant][
                        which
                    ]:
                        problems.append(f"an answer among threads is {tokens}")
                else:
                    chosen(subject, rng, "memory")[1]()
        except MoeoffError as error:
            if not is_sentence(str(error)):
                problems.append(f"no sentence: {error!r}")
        except BaseException as error:
            problems.append(f"{type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=work, args=(random.Random(rng.random()), closes and i == 0))
        for i in range(rng.randrange(2, 4))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if closes:
        subject.drop()
    return "refused" if closes else "accepted", problems[0] if problems else ""


# each with its share of the cases
KINDS: dict[str, tuple[int, Callable[[Subject, random.Random, Costs], tuple[str, str]]]] = {
    "interrupt": (60, interrupted),
    "abandon": (10, abandoned),
    "threads": (8, threaded),
}


def reference(model: str, variant: int, which: int) -> list[int]:
    """An answer of a fresh process."""

    def body() -> None:
        with open_variant(model, variant) as llm:
            print(
                json.dumps(
                    first_tokens(
                        llm.generate(llm.tokenize(PROMPTS[which].encode()), top_k=1, temp=0.0)
                    )
                )
            )

    child = Child(body)
    if child.wait(DEADLINE) != 0:
        raise click.ClickException(f"no answer to compare with: {child.errors[-1000:]}")
    return json.loads(child.output.strip().splitlines()[-1])


@contextlib.contextmanager
def folder_of_parent() -> Iterator[str]:
    """A folder that forks of this process, which run what is registered for their end,
    do not remove as a TemporaryDirectory's would.
    """
    made = tempfile.mkdtemp(prefix="moeoff-objects-")
    try:
        yield made
    finally:
        shutil.rmtree(made)


def kind_of(n: int, seed: int, only: tuple[str, ...]) -> str:
    names = [name for name in KINDS if name in (only or KINDS)]
    return case_rng(seed, n, "kind").choices(names, [KINDS[name][0] for name in names])[0]


def worker(
    model: str, seed: int, only: tuple[str, ...], expected: list[list[list[int]]]
) -> Callable[[int], tuple[str, str]]:
    subject, costs = Subject(model, seed, expected), Costs()

    def check(n: int) -> tuple[str, str]:
        rng, kind = case_rng(seed, n), kind_of(n, seed, only)
        subject.open(n // STAYS % len(VARIANTS))
        outcome, problem = KINDS[kind][1](subject, rng, costs)
        if subject.llm is None:
            subject.open(subject.variant)
        wrong = subject.check(
            subject.latest if rng.random() < 0.6 else rng.randrange(len(PROMPTS)), rng.randrange(2)
        )
        if wrong:
            with contextlib.suppress(BaseException):
                subject.drop()
            subject.llm = None
        return outcome, ": ".join(filter(None, (problem, wrong)))

    return check


@main.command("objects", help=__doc__)
@click.option("--count", default=10_000, show_default=True, help="Cases.")
@click.option("--first", default=0, show_default=True, help="Number of the first.")
@options_of(KINDS, seeds=True)
def check_objects(
    count: int, first: int, seeds: tuple[int, ...], only: tuple[str, ...], json_file: str | None
) -> None:
    import_all()
    columns = [
        "what",
        "cases",
        "ended by what was thrown, or in one sentence",
        "went through",
        "problems",
    ]
    with (
        findings_by_seed(json_file, "objects", "a model object", columns, seeds) as (
            tables,
            problems,
        ),
        folder_of_parent() as made,
    ):
        os.environ["XDG_CACHE_HOME"] = made
        model = str(Path(made) / "model.gguf")
        write_small_model(model)
        expected = [
            [reference(model, variant, which) for which in range(len(PROMPTS))]
            for variant in range(len(VARIANTS))
        ]
        for seed, table in tables:
            again = f"--seed {seed}" + "".join(f" --only {name}" for name in only)
            cases = in_workers(
                partial(worker, model, seed, only, expected),
                range(first, first + count),
                deadline=DEADLINE,
            )
            problems += tell_all(
                table, ((kind_of(case.n, seed, only), case) for case in cases), again
            )  # noqa: B023  # it is read in this turn
