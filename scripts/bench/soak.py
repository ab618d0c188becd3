"""A server under mixed clients for as long as wanted: nothing may leak, hang, exceed the budget or be answered wrongly.

usage: soak.py -m MODEL [--minutes 10] [--memory 160M] [--clients 8] [--json FILE]

The server runs in a memory cgroup of the budget, where one can be made. Clients ask without end: answers that are read whole, streams, streams that
are given up, prompts that are too long, bodies that are no JSON, connections that are cut before the answer. The budget moves up and down meanwhile.
Afterwards every different answer is read by the model alone: each of its tokens must be the best one there, or within rounding of the best, since
kernels round differently with neighbours in a batch. Exit code 1 if anything is not as it should be.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import click
import httpx
import numpy as np
from rich.console import Console

import moeoff
from cgroup import memory_cgroup, unavailable
from moeoff.memory import format_size, parse_size
from results_file import HELP, ResultsFile

N_TOKENS = 48  # of an answer
NEAR = 0.2  # logits: what batches of different shapes round apart
FLAT, LEAST = 1.02, 5.0  # times the memory of the beginning, and minutes after which that can be said: the arena has filled
PROMPTS = [f"{name} has {n} {thing} and buys {n + 3} more. How many {thing} has {name}?" for name in ("Tom", "Ida", "Ben") for n, thing in
           ((3, "apples"), (8, "books"), (14, "coins"), (21, "stamps"))]  # fmt: skip
SERVER = """
import json, sys
import moeoff
options = json.loads(sys.argv[2])
with moeoff.Server(sys.argv[1], port=0, **options) as server:
    print(server.url, flush=True)
    for line in sys.stdin:
        server.set_memory(int(line))
        print("moved", flush=True)
"""


@dataclass
class Soak:
    """What has happened so far."""

    url: str
    ends: float
    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def client(self, seed: int) -> None:
        chance = random.Random(seed)
        kinds = [self.whole, self.stream, self.given_up, self.too_long, self.no_json, self.cut]
        while time.monotonic() < self.ends:
            kind = chance.choices(kinds, (5, 5, 2, 1, 1, 1))[0]
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
        return {"prompt": chance.choice(PROMPTS), "n_predict": N_TOKENS, "temperature": 0, "return_tokens": True} | more

    def whole(self, chance: random.Random) -> None:
        body, started = self._body(chance), time.monotonic()
        answer = httpx.post(f"{self.url}/completion", json=body, timeout=120)
        if answer.status_code != 200:
            return self.problem(f"whole: {answer.status_code} {answer.text[:200]}")
        with self.lock:
            self.seconds.append(time.monotonic() - started)
            self.answers[body["prompt"], json.dumps(answer.json()["tokens"])] += 1

    def stream(self, chance: random.Random, read: int | None = None) -> None:
        body, tokens = self._body(chance, stream=True), []
        with httpx.stream("POST", f"{self.url}/completion", json=body, timeout=120) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: "):
                    piece = json.loads(line[6:])
                    tokens += piece["tokens"]
                    if piece.get("stop"):
                        with self.lock:
                            self.answers[body["prompt"], json.dumps(tokens)] += 1
                        return
                    if read is not None and len(tokens) >= read:
                        return
        self.problem("stream: it had no end")

    def given_up(self, chance: random.Random) -> None:
        self.stream(chance, chance.randint(0, N_TOKENS // 2))

    def too_long(self, chance: random.Random) -> None:
        answer = httpx.post(f"{self.url}/completion", json=self._body(chance, prompt="word " * 20000), timeout=120)
        if answer.status_code != 400:
            self.problem(f"too long: {answer.status_code}")

    def no_json(self, chance: random.Random) -> None:
        answer = httpx.post(f"{self.url}/v1/chat/completions", content=b'{"messages": [' * chance.randint(1, 50), timeout=120)
        if answer.status_code not in (400, 500):
            self.problem(f"no json: {answer.status_code}")

    def cut(self, chance: random.Random) -> None:
        host, port = self.url.removeprefix("http://").split(":")
        body = json.dumps(self._body(chance, n_predict=2000, ignore_eos=True))
        with socket.create_connection((host, int(port)), timeout=30) as connection:
            connection.sendall(f"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
            time.sleep(chance.uniform(0, 0.2))


def check_answers(model: str, answers: Counter[tuple[str, str]]) -> list[str]:
    """Answers in which a token is plainly not the best one."""
    wrong = []
    with moeoff.Llama(model, expert_memory="2G", n_ctx=1024, logits_all=True, flash_attn=True) as llm:
        for prompt, tokens in answers:
            asked, said = llm.tokenize(prompt.encode(), add_bos=True, special=True), json.loads(tokens)
            llm.reset()
            llm.eval(asked + said)
            logits = np.asarray(llm.scores[len(asked) - 1 : len(asked) + len(said) - 1])
            behind = logits.max(axis=1) - logits[np.arange(len(said)), said]
            if behind.max(initial=0) > NEAR:
                at = int(behind.argmax())
                wrong.append(f"{prompt!r}: token {at} of {llm.detokenize(said)!r} is {behind[at]:.2f} behind the best one")
    return wrong


def rss(pid: int, name: str = "VmRSS") -> int:
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(name))


@click.command()
@click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--minutes", default=10.0, show_default=True)
@click.option("--memory", default="160M", show_default=True)
@click.option("--clients", default=8, show_default=True)
@click.option("--parallel", default=4, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(model: str, minutes: float, memory: str, clients: int, parallel: int, json_file: str | None) -> None:
    console, budget = Console(stderr=True), parse_size(memory)
    options = json.dumps({"memory": budget, "parallel": parallel, "n_ctx": 1024, "n_batch": 128})
    with contextlib.ExitStack() as stack:
        command = [sys.executable, "-c", SERVER, model, options]
        enter = None if unavailable() else stack.enter_context(memory_cgroup(int(budget / 0.95))).enter  # page cache counts there, too
        process = stack.enter_context(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=enter))
        url = process.stdout.readline().strip()
        if not url:
            raise click.ClickException("the server did not start")
        soak = Soak(url, time.monotonic() + 60 * minutes)
        threads = [threading.Thread(target=soak.client, args=(seed,), daemon=True) for seed in range(clients)]
        for thread in threads:
            thread.start()
        sizes = []
        while time.monotonic() < soak.ends:
            time.sleep(min(2.0, 60 * minutes / 50))
            sizes.append(rss(process.pid))
            process.stdin.write(f"{budget if len(sizes) % 2 else int(0.9 * budget)}\n")
            process.stdin.flush()
            process.stdout.readline()
        for thread in threads:
            thread.join(60)
        hung = sum(thread.is_alive() for thread in threads)
        peak, started = rss(process.pid, "VmHWM"), time.monotonic()
        process.stdin.close()
        code = process.wait(30)
    console.print(f"ended with {code} after {time.monotonic() - started:.1f} s", style="dim")
    quarter = max(len(sizes) // 4, 1)
    before, after = statistics.median(sizes[quarter : 2 * quarter]), statistics.median(sizes[-quarter:])
    wrong = [*soak.wrong, *check_answers(model, soak.answers)]
    wrong += [f"{hung} clients hung"] * bool(hung) + [f"exit code {code}"] * bool(code) + ["over the budget"] * (peak > budget)
    wrong += [f"memory grew from {format_size(int(before))} to {format_size(int(after))}"] * (after > FLAT * before and minutes >= LEAST)
    soak.seconds.sort()
    with ResultsFile(json_file) as results:
        table = results.table(
            "soak", f"{minutes:g} minutes, {clients} clients, {memory}", ["requests", "answers", "different", "p50 s", "p99 s", "peak", "wrong"]
        )
        at = [f"{soak.seconds[int(p * (len(soak.seconds) - 1))]:.2f}" if soak.seconds else "-" for p in (0.5, 0.99)]
        table.row(str(soak.kinds.total()), str(soak.answers.total()), str(len(soak.answers)), *at, format_size(peak), str(len(wrong)))
    for text in wrong[:20]:
        console.print(text, style="red")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
