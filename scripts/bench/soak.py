"""A server under mixed clients for as long as wanted: nothing may leak, hang, exceed
the budget or be answered wrongly.

usage: soak.py -m MODEL [--minutes 10] [--memory 160M] [--clients 8] [--think SECONDS] [--json FILE]

The server runs in a memory cgroup of the budget, where one can be made. Clients ask
without end:
chats of several turns, answers that are read whole, in any slot or in one that is busy,
streams, streams that are given up, prompts that are too long, bodies that are no JSON,
connections that are cut before the answer. The budget moves up and down meanwhile,
between the smallest and the one where all experts fit, and half of the moves are
interrupted at any moment, as by Ctrl-C. Memory is said without what experts take, which
moves with it. Afterwards every different answer is read by the model alone: each of its
tokens must be the best one there, or within rounding of the best, since kernels round
differently with neighbours in a batch and with the tokens that a batch holds. SIGINT
ends it before its time. Exit code 1 if anything is not as it should be.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

sys.path[:0] = [
    str(Path(__file__).resolve().parents[1]),
    str(Path(__file__).resolve().parents[2] / "tests"),
]

import httpx
from rich.console import Console

from helpers.processes import status_bytes
from helpers.slot_stress import check_answers
from moeoff.system.cgroup import memory_cgroup, unavailable
from moeoff.system.memory import format_size, parse_size
from results import HELP, ResultsFile, commit

N_TOKENS = 48  # of an answer
PATIENCE = 600  # seconds: an answer may take long on a machine that does other things
# times the memory of the beginning, and minutes after which that can be said
FLAT, LEAST = 1.02, 5.0
# of the way from the smallest budget to the one where all experts fit
SHARES = (0.5, 0.05, 1.0, 0.2, 0.8, 0.0)
PROMPTS = [f"{name} has {n} {thing} and buys {n + 3} more. How many {thing} has {name}?" for name in ("Tom", "Ida", "Ben") for n, thing in
           ((3, "apples"), (8, "books"), (14, "coins"), (21, "stamps"))]  # fmt: skip
FOLLOW_UP = ("And if two are lost?", "Say it in one word.", "How many would be twice as many?")
SERVER = """
import json, random, signal, sys, time
import moeoff
from moeoff.system.memory import rss
options, moving, interrupts, took = json.loads(sys.argv[2]), False, 0, 0.01
def interrupted(*_):
    global moving, interrupts
    if moving:  # once a try
        moving, interrupts = False, interrupts + 1
        raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupted)
with moeoff.Server(sys.argv[1], port=0, **options) as server:
    parts = server.engine
    experts, least = parts.buffer.arena_full, parts.plan.fixed + parts.buffer.arena_floor
    print(server.url, flush=True)
    for line in sys.stdin:
        stats = parts.buffer.stats()
        said = {"rss": rss(), "experts": stats.arena_committed, "budget": parts.plan.budget, "misses": stats.demand_misses, "rows": stats.row_misses, "interrupts": interrupts}
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 2 * took))
        while True:
            try:
                moving, began = True, time.perf_counter()
                try:
                    server.set_memory(min(least + int(float(line) * experts), options["memory"]))
                    moving, took = False, time.perf_counter() - began
                    break
                except moeoff.BudgetError as error:  # what the smallest budget is changes with what the process needs beside the model
                    moving = False
                    least = error.hint["memory"] + (1 << 20)
            except KeyboardInterrupt:  # the budget is the old one or the new one, and is moved again
                pass
        print(json.dumps(said), flush=True)
"""


@dataclass
class Soak:
    """The record of a run's answers and faults so far."""

    url: str
    ends: float
    think: float
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def client(self, seed: int) -> None:
        chance = random.Random(seed)
        kinds = [
            self.chat,
            self.whole,
            self.pinned,
            self.stream,
            self.given_up,
            self.too_long,
            self.no_json,
            self.cut,
        ]
        while (left := self.ends - time.monotonic()) > 0:
            if self.think:
                time.sleep(min(chance.expovariate(1 / self.think), left))
            kind = chance.choices(kinds, (5, 2, 2, 3, 2, 1, 1, 1))[0]
            try:
                kind(chance)
            except Exception as error:  # whatever it is, it is what this program looks for
                self.problem(f"{kind.__name__}: {type(error).__name__}: {error}")
            with self.lock:
                self.kinds[kind.__name__] += 1

    def problem(self, text: str) -> None:
        with self.lock:
            self.wrong.append(text)

    def _body(self, chance: random.Random, **more: Any) -> dict[str, Any]:
        return {
            "prompt": chance.choice(PROMPTS),
            "n_predict": N_TOKENS,
            "temperature": 0,
            "return_tokens": True,
        } | more

    def answered(self, prompt: str, tokens: list[int], started: float) -> None:
        with self.lock:
            self.seconds.append(time.monotonic() - started)
            self.answers[prompt, json.dumps(tokens)] += 1

    def chat(self, chance: random.Random) -> None:
        """One to three turns, each with what was said before."""
        messages = [{"role": "user", "content": chance.choice(PROMPTS)}]
        for turn in range(chance.randint(1, 3)):
            if turn:
                messages.append(
                    {"role": "user", "content": FOLLOW_UP[chance.randrange(len(FOLLOW_UP))]}
                )
            body, started = (
                {"messages": messages, "max_tokens": N_TOKENS, "temperature": 0, "logprobs": True},
                time.monotonic(),
            )
            answer = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=PATIENCE)
            if answer.status_code != 200:
                return self.problem(f"chat: {answer.status_code} {answer.text[:200]}")
            choice = answer.json()["choices"][0]
            prompt = httpx.post(
                f"{self.url}/apply-template", json={"messages": messages}, timeout=PATIENCE
            ).json()["prompt"]
            self.answered(prompt, [piece["id"] for piece in choice["logprobs"]["content"]], started)
            messages.append({"role": "assistant", "content": choice["message"]["content"]})

    def whole(self, chance: random.Random, **more: Any) -> None:
        body, started = self._body(chance, **more), time.monotonic()
        answer = httpx.post(f"{self.url}/completion", json=body, timeout=PATIENCE)
        if answer.status_code != 200:
            return self.problem(f"whole: {answer.status_code} {answer.text[:200]}")
        self.answered(body["prompt"], answer.json()["tokens"], started)

    def pinned(self, chance: random.Random) -> None:
        """Asks for a slot that is most often busy."""
        self.whole(chance, id_slot=0)

    def stream(self, chance: random.Random, read: int | None = None) -> None:
        body, tokens, started = self._body(chance, stream=True), [], time.monotonic()
        with httpx.stream("POST", f"{self.url}/completion", json=body, timeout=PATIENCE) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    piece = json.loads(line[6:])
                    tokens += piece["tokens"]
                    if piece.get("stop"):
                        return self.answered(body["prompt"], tokens, started)
                    if read is not None and len(tokens) >= read:
                        return
        self.problem("stream: it had no end")

    def given_up(self, chance: random.Random) -> None:
        self.stream(chance, chance.randint(0, N_TOKENS // 2))

    def too_long(self, chance: random.Random) -> None:
        answer = httpx.post(
            f"{self.url}/completion",
            json=self._body(chance, prompt="word " * 20000),
            timeout=PATIENCE,
        )
        if answer.status_code != 400:
            self.problem(f"too long: {answer.status_code}")

    def no_json(self, chance: random.Random) -> None:
        answer = httpx.post(
            f"{self.url}/v1/chat/completions",
            content=b'{"messages": [' * chance.randint(1, 50),
            timeout=PATIENCE,
        )
        if answer.status_code not in (400, 500):
            self.problem(f"no json: {answer.status_code}")

    def cut(self, chance: random.Random) -> None:
        host, port = self.url.removeprefix("http://").split(":")
        body = json.dumps(self._body(chance, n_predict=2000, ignore_eos=True))
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(
                "POST /completion HTTP/1.1\r\nHost: x\r\nContent-Type:"
                f" application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
            )
            time.sleep(chance.uniform(0, 0.2))


def move_budget(
    process: subprocess.Popen[str], soak: Soak, seconds: float, console: Console
) -> list[dict[str, int]]:
    """Until the end of the soak; what was held before each move."""
    held, told = [], time.monotonic()
    while (left := soak.ends - time.monotonic()) > 0:
        time.sleep(min(seconds, left))
        process.stdin.write(f"{SHARES[len(held) % len(SHARES)]}\n")
        process.stdin.flush()
        if not (line := process.stdout.readline()):
            soak.problem("the server has ended")
            break
        held.append(json.loads(line))
        if time.monotonic() > told + min(300, seconds * 5):
            told = time.monotonic()
            console.print(
                f"{left / 60:.0f} minutes left, {soak.kinds.total()} requests, {len(soak.wrong)}"
                f" wrong, {held[-1]}",
                style="dim",
            )
    return held


def growth(held: list[dict[str, int]]) -> tuple[int, int]:
    """Bytes without experts in the second quarter and in the last; each has all the
    budgets.
    """
    sizes = [one["rss"] - one["experts"] for one in held]
    quarter = max(len(sizes) // 4, 1)
    return int(statistics.mean(sizes[quarter : 2 * quarter] or sizes)), int(
        statistics.mean(sizes[-quarter:])
    )


@click.command()
@click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--minutes", default=10.0, show_default=True)
@click.option(
    "--memory",
    default="160M",
    show_default=True,
    help="The largest budget; what is more than all experts need is not used.",
)
@click.option("--clients", default=8, show_default=True)
@click.option("--parallel", default=4, show_default=True)
@click.option(
    "--think", default=0.0, show_default=True, help="Mean seconds of a client between two requests."
)
@click.option(
    "--move",
    default=5.0,
    show_default=True,
    help="Seconds between two budgets, of a run of minutes.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(
    model: str,
    minutes: float,
    memory: str,
    clients: int,
    parallel: int,
    think: float,
    move: float,
    json_file: str | None,
) -> None:
    console, budget = Console(stderr=True), parse_size(memory)
    options = json.dumps(
        {"memory": budget, "parallel": parallel, "n_ctx": 256 * parallel, "n_batch": 128}
    )
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-c", SERVER, model, options]
        # page cache counts there, too
        enter = (
            None if unavailable() else stack.enter_context(memory_cgroup(int(budget / 0.95))).enter
        )
        process = stack.enter_context(
            subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=enter
            )
        )
        url = process.stdout.readline().strip()
        if not url:
            raise click.ClickException("the server did not start")
        began = time.monotonic()
        soak = Soak(url, began + 60 * minutes, think)
        signal.signal(signal.SIGINT, lambda *_: setattr(soak, "ends", time.monotonic()))
        threads = [
            threading.Thread(target=soak.client, args=(seed,), daemon=True)
            for seed in range(clients)
        ]
        for thread in threads:
            thread.start()
        held = move_budget(process, soak, min(move, 60 * minutes / 50), console)
        for thread in threads:
            thread.join(PATIENCE)
        seconds = time.monotonic() - began
        hung = sum(thread.is_alive() for thread in threads)
        peak, stopped = (
            status_bytes("VmHWM", process.pid) if process.poll() is None else 0,
            time.monotonic(),
        )
        process.stdin.close()
        code = process.wait(30)
    console.print(f"ended with {code} after {time.monotonic() - stopped:.1f} s", style="dim")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    load = (used.ru_utime + used.ru_stime) / seconds / (os.cpu_count() or 1)
    before, after = growth(held)
    wrong = [
        *soak.wrong,
        *check_answers(model, list(soak.answers), lambda text: console.print(text, style="dim")),
    ]
    wrong += (
        [f"{hung} clients hung"] * bool(hung)
        + [f"exit code {code}"] * bool(code)
        + ["over the budget"] * (peak > budget)
    )
    wrong += [f"memory without experts grew from {format_size(before)} to {format_size(after)}"] * (
        after > FLAT * before and minutes >= LEAST
    )
    for name, read in (("misses", "expert"), ("rows", "row of a table on disk")):
        wrong += [f"no {read} was ever missing"] * (not held or not held[-1][name])
    soak.seconds.sort()
    with ResultsFile(json_file) as results:
        title = (
            f"{seconds / 60:.4g} minutes, {clients} clients that think {think:g} s between"
            f" requests, {memory} at most, at {commit()}"
        )
        p50, p99 = (
            f"{soak.seconds[int(p * (len(soak.seconds) - 1))]:.2f}" if soak.seconds else "-"
            for p in (0.5, 0.99)
        )
        cells = {
            "requests": soak.kinds.total(),
            "answers": soak.answers.total(),
            "different": len(soak.answers),
            "budgets": len(held),
            "interrupted": held[-1]["interrupts"] if held else 0,
            "processors busy": f"{load:.0%}",
            "p50 s": p50,
            "p99 s": p99,
            "largest": format_size(peak),
            "without experts, second quarter and last": (
                f"{before / 2**20:.1f} and {after / 2**20:.1f} MiB"
            ),
            "wrong": len(wrong),
        }
        results.table("soak", title, list(cells)).row(*map(str, cells.values()))
        kinds = results.table("soak-kinds", "what was asked", ["what", "requests"])
        for name, n in soak.kinds.most_common():
            kinds.row(name.replace("_", " "), str(n))
    for text in wrong[:20]:
        console.print(text, style="red")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
