"""The server under one client and several: tokens per second of all together, and stock
llama-server beside it.

usage: bench_server.py -m MODEL --text FILE [--memory 1100M | --expert-memory 4M] [--clients 1,4] [--rounds 5] [--stock] [--json FILE]
       bench_server.py -m MODEL --text FILE --turns 6656 [--stock] [--json FILE]     in a memory cgroup of so many MiB (root)

Each server is a process of its own. Clients ask for tokens of different prompts at the
same time; what counts is the time in which all of them are answered, from the last
one's first token to the first one's last. *alone* is `moeoff.Llama` in a process, on
the first client's prompt. Each has had some seconds to load in the background, and has
given one answer of as many tokens to another prompt before. `--stock` runs llama-server
of the same build beside it, with plain kernels (`--no-repack`), without its memory map
and without a memory limit: for budgets that hold everything; once with a context that
all answers share, which is its default and ours, once with one divided among them.

`--turns` measures something else: a conversation of ten turns of 20 to 4,000 new
tokens, before each of them a short question of somebody else under the same system
prompt, then the server's end and a new one, and one more turn: what of each is
computed, and when its first token comes. --memory is 5 % below the cgroup's limit.
`--stock` runs llama-server after it, with its defaults but for a prompt cache of 1 GiB,
without a limit and without its memory map: the file is in memory.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

import httpx
from rich.console import Console

from helpers.servers import llama_server
from moeoff.gguf.model_index import ModelIndex
from moeoff.system.cgroup import memory_cgroup, unavailable
from results import HELP, ResultsFile, spread

N_PROMPT = 64  # tokens, about
# new tokens; the last turn is a new server's
TURNS = (60, 150, 20, 300, 40, 4000, 20, 800, 500, 60, 20)
N_SYSTEM, N_ANSWER = 40, 24
OURS, THEIRS = r"on (http://\S+)/v1", r"listening on (http://\S+)"  # what servers say
LOADING = 5.0  # seconds, for what is loaded in the background
ALONE = """
import json, sys, time
import moeoff
model, prompt, n, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
with moeoff.Llama(model, warm=True, **options) as llm:
    time.sleep(float(sys.argv[5]))
    bias = {llm.token_eos(): -1e9}
    for text in (prompt[::-1], prompt):
        times = [time.perf_counter() for _ in llm.create_completion(text, max_tokens=n, temperature=0, stream=True, logit_bias=bias)]
print((len(times) - 2) / (times[-2] - times[0]))
"""


@contextlib.contextmanager
def served(
    command: list[str], pattern: str, enter: Callable[[], None] | None = None
) -> Iterator[str]:
    """The URL of a server that says it on its standard error. enter: what the process
    calls first.
    """
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=enter,
    ) as process:
        lines = []
        try:
            for line in process.stderr:
                lines.append(line)
                if match := re.search(pattern, line):
                    break
            else:
                raise click.ClickException("".join(lines[-5:]))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield match[1]
        finally:
            process.terminate()
            process.wait(30)


def ask(url: str, prompt: str, n: int) -> list[float]:
    """When each token came."""
    body = {
        "prompt": prompt,
        "n_predict": n,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "cache_prompt": False,
    }
    times = []
    with httpx.stream("POST", f"{url}/completion", json=body, timeout=600) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: ") and not json.loads(line[6:]).get("stop"):
                times.append(time.perf_counter())
    return times


def itself(url: str, prompt: str, n: int) -> float:
    """Tokens per second of one answer as the server counts them, with nobody beside it
    who reads a stream.
    """
    body = {
        "prompt": prompt,
        "n_predict": n,
        "temperature": 0,
        "ignore_eos": True,
        "cache_prompt": False,
    }
    return float(
        httpx.post(f"{url}/completion", json=body, timeout=600).json()["timings"][
            "predicted_per_second"
        ]
    )


def together(url: str, prompts: list[str], n: int) -> float:
    """Tokens per second of all, while all of them are answered."""
    all_times: list[list[float]] = [[] for _ in prompts]

    def one(i: int) -> None:
        all_times[i] = ask(url, prompts[i], n)

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, last = max(times[0] for times in all_times), min(times[-1] for times in all_times)
    return sum(first < t <= last for times in all_times for t in times) / (last - first)


@dataclass(frozen=True)
class Turn:
    """One answer in a conversation: its tokens, those of the prompt that were computed
    for it, and seconds to its first.
    """

    tokens: list[int]
    n_computed: int
    first: float


def turn(url: str, prompt: list[int], n: int) -> Turn:
    body = {
        "prompt": prompt,
        "n_predict": n,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_tokens": True,
    }
    asked, first, tokens, timings = time.perf_counter(), 0.0, [], {}
    with httpx.stream("POST", f"{url}/completion", json=body, timeout=1200) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                tokens += event.get("tokens", [])
                first = first or (time.perf_counter() - asked if tokens else 0.0)
                timings = event.get("timings", timings)
    return Turn(tokens, timings["prompt_n"], first)


def conversation(
    server: Callable[[], contextlib.AbstractContextManager[str]], words: str
) -> list[Turn]:
    """Return the conversation's turns, in a first server and after its restart."""
    turns: list[Turn] = []
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(ready(server()))
        tokens = itertools.cycle(
            httpx.post(f"{url}/tokenize", json={"content": words}, timeout=60).json()["tokens"]
        )
        texts = [list(itertools.islice(tokens, n)) for n in (N_SYSTEM, *TURNS, *[12] * len(TURNS))]
        # another one each time: of an earlier run prompts may be on disk
        system = random.sample(texts[0], N_SYSTEM)
        talk = list(system)
        for index in range(len(TURNS)):
            if index == len(TURNS) - 1:
                stack.close()
                url = stack.enter_context(ready(server()))
            else:
                turn(url, system + texts[1 + len(TURNS) + index], 8)
            talk += texts[1 + index]
            turns.append(turn(url, talk, N_ANSWER))
            talk += turns[-1].tokens
            Console(stderr=True).print(
                f"turn {index + 1}: {turns[-1].n_computed} computed, {turns[-1].first:.1f} s",
                style="dim",
            )
    return turns


@contextlib.contextmanager
def ready(server: contextlib.AbstractContextManager[str]) -> Iterator[str]:
    """The server, when it answers and has loaded in the background."""
    with server as url:
        while httpx.get(f"{url}/health", timeout=60).status_code != 200:
            time.sleep(0.2)
        time.sleep(LOADING)
        yield url


def measure_turns(
    model: str, words: str, limit: int, threads: int, stock: bool, json_file: str | None
) -> None:
    if why := unavailable():
        raise click.ClickException(why)
    common = ["-m", model, "-c", "8192", "-t", str(threads), "--port"]
    with memory_cgroup(limit << 20) as group:
        ours = [
            os.path.join(os.path.dirname(sys.executable), "moeoff"),
            "serve",
            *common,
            "0",
            "--memory",
            f"{int(0.95 * limit)}M",
        ]
        contenders = {"moeoff": conversation(lambda: served(ours, OURS, group.enter), words)}
    if stock:
        theirs = [
            llama_server(),
            *common,
            "18080",
            "--load-mode",
            "none",
            "--cache-ram",
            "1024",
            "-lv",
            "4",
        ]
        contenders["llama-server"] = conversation(lambda: served(theirs, THEIRS), words)
    with ResultsFile(json_file) as results:
        columns = [
            text
            for name in contenders
            for text in (f"{name}: computed", f"{name}: first token (s)")
        ]
        table = results.table(
            "turns",
            f"Ten turns, others' questions between them, and one after a restart; {limit} MiB",
            ["turn", "new tokens", *columns],
        )
        for index, n in enumerate(TURNS):
            cells = [
                cell
                for turns in contenders.values()
                for cell in (str(turns[index].n_computed), f"{turns[index].first:.1f}")
            ]
            table.row(
                str(index + 1) if index < len(TURNS) - 1 else "after a restart", str(n), *cells
            )


@click.command()
@click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--text", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--memory", default="1100M", show_default=True)
@click.option("--expert-memory", help="Bound the experts' memory, not the process's.")
@click.option("--clients", default="1,4", show_default=True)
@click.option("--n-decode", default=96, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("-t", "--threads", default=0, help="Compute threads. Default: every core.")
@click.option("--stock", is_flag=True)
@click.option(
    "--turns",
    "limit",
    type=int,
    metavar="MIB",
    help="Measure a conversation's turns in so much memory, and nothing else.",
)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(
    model: str,
    text: str,
    memory: str,
    expert_memory: str | None,
    clients: str,
    n_decode: int,
    rounds: int,
    threads: int,
    stock: bool,
    limit: int | None,
    json_file: str | None,
) -> None:
    threads = threads or len(os.sched_getaffinity(0))
    words = Path(text).read_text()
    if limit is not None:
        return measure_turns(model, words, limit, threads, stock, json_file)
    console = Console(stderr=True)
    counts = [int(n) for n in clients.split(",")]
    step = len(words) // max(counts)
    if step < 4 * N_PROMPT:
        raise click.UsageError(f"{text} is too short for prompts of {max(counts)} clients")
    pieces = [words[i * step :][: 4 * N_PROMPT] for i in range(max(counts))]
    n_ctx = max(counts) * (2 * N_PROMPT + n_decode)
    architecture = ModelIndex.read(model).architecture
    # the reference model was trained on 256 tokens
    longer = ["--override-kv", f"{architecture}.context_length=int:{n_ctx}"]
    common = ["-m", model, "-c", str(n_ctx), "-t", str(threads), "-np", str(max(counts)), "--port"]
    bound = {"expert_memory": expert_memory} if expert_memory else {"memory": memory}
    bounds = [
        word for name, size in bound.items() for word in (f"--{name.replace('_', '-')}", size)
    ]
    ours = [os.path.join(os.path.dirname(sys.executable), "moeoff"), "serve", *common, "0", *bounds]
    contenders = {"moeoff serve": ([*ours, "--", *longer], OURS)}
    if stock:
        program = [
            llama_server(),
            *common,
            "18080",
            "--no-repack",
            "--load-mode",
            "none",
            "-fa",
            "on",
            "-lv",
            "4",
            "--cache-ram",
            "0",
            *longer,
        ]
        contenders["llama-server"] = ([*program, "--kv-unified"], THEIRS)
        contenders["llama-server, context divided"] = (program, THEIRS)
    speeds: dict[str, dict[str, list[float]]] = {name: {} for name in [*contenders, "alone"]}
    for index in range(rounds):
        console.print(f"round {index + 1}: alone", style="dim")
        options = json.dumps({**bound, "n_ctx": n_ctx, "n_threads": threads})
        done = subprocess.run(
            [sys.executable, "-c", ALONE, model, pieces[0], str(n_decode), options, str(LOADING)],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise click.ClickException(done.stderr[-500:])
        speeds["alone"].setdefault("1", []).append(float(done.stdout))
        for name, (command, pattern) in (
            contenders.items() if index % 2 == 0 else reversed(list(contenders.items()))
        ):
            console.print(f"round {index + 1}: {name}", style="dim")
            with served(command, pattern) as url:
                time.sleep(LOADING)
                ask(url, pieces[0][::-1], n_decode)
                speeds[name].setdefault("itself", []).append(itself(url, pieces[0], n_decode))
                for n in counts if index % 2 == 0 else reversed(counts):
                    speeds[name].setdefault(str(n), []).append(together(url, pieces[:n], n_decode))
    with ResultsFile(json_file) as results:
        table = results.table(
            "clients",
            f"Tokens per second of all clients, {expert_memory or memory}",
            [
                "",
                "1 client, not streamed",
                *(f"{n} client{'s' * (n > 1)}" for n in counts),
                "last over first",
            ],
        )
        for name, rates in speeds.items():
            cells = [spread(rates.get("itself", rates.get("1", [])), "{:.1f}")]
            cells += [
                spread(rates[str(n)], "{:.1f}") if str(n) in rates and name != "alone" else ""
                for n in counts
            ]
            ends = [rates.get(str(n)) for n in (counts[0], counts[-1])]
            table.row(
                name,
                *cells,
                (
                    spread([b / a for a, b in zip(*ends, strict=True)])
                    if all(ends) and len(ends) > 1
                    else ""
                ),
            )


if __name__ == "__main__":
    main()
