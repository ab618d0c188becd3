"""The server under one client and several: tokens per second of all together, and stock llama-server beside it.

usage: bench_server.py -m MODEL --text FILE [--memory 1100M] [--clients 1,4] [--rounds 5] [--stock] [--json FILE]
       bench_server.py -m MODEL --text FILE [--memory 1045M] --strangers 5 [--rounds 3] [--json FILE]

Each server is a process of its own. Clients ask for tokens of different prompts at the same time; what counts is the time in which all of them
are answered, from the last one's first token to the first one's last. *alone* is `moeoff.Llama` in a process, on the first client's prompt. Each has
had some seconds to load in the background, and has given one answer of as many tokens to another prompt before.
`--stock` runs llama-server of the same build beside it, with plain kernels (`--no-repack`), without its memory map and without a memory limit: for
budgets that hold everything; once with a context that all answers share, which is its default and ours, once with one divided among them.

`--strangers` measures something else: two turns of a long conversation, then so many people who ask something short under the same system prompt, one after
the other, then the third turn. How much of it is computed, and when its first token comes, is compared with what is new in it; once with the defaults, and once
as llama-server chooses slots (a similarity of 0.1, no prompt cache of ours).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import httpx
from rich.console import Console

from moeoff.gguf.model_index import ModelIndex
from results import HELP, ResultsFile

ROOT = Path(__file__).resolve().parents[2]
N_PROMPT = 64  # tokens, about
N_LONG, N_ANSWER = 500, 32  # tokens of a long conversation's first message, about, and of each answer
LOADING = 5.0  # seconds, for what is loaded in the background
ALONE = """
import json, sys, time
import moeoff
model, prompt, n, options = sys.argv[1], sys.argv[2], int(sys.argv[3]), json.loads(sys.argv[4])
with moeoff.Llama(model, flash_attn=True, warm=True, **options) as llm:
    time.sleep(float(sys.argv[5]))
    bias = {llm.token_eos(): -1e9}
    for text in (prompt[::-1], prompt):
        times = [time.perf_counter() for _ in llm.create_completion(text, max_tokens=n, temperature=0, stream=True, logit_bias=bias)]
print((len(times) - 2) / (times[-2] - times[0]))
"""


@contextlib.contextmanager
def served(command: list[str], pattern: str) -> Iterator[str]:
    """The URL of a server that says it on its standard error."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace") as process:
        said = []
        try:
            for line in process.stderr:
                said.append(line)
                if found := re.search(pattern, line):
                    break
            else:
                raise click.ClickException("".join(said[-5:]))
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield found[1]
        finally:
            process.terminate()
            process.wait(30)


def ask(url: str, prompt: str, n: int) -> list[float]:
    """When each token came."""
    body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, "stream": True, "cache_prompt": False}
    times = []
    with httpx.stream("POST", f"{url}/completion", json=body, timeout=600) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: ") and not json.loads(line[6:]).get("stop"):
                times.append(time.perf_counter())
    return times


def itself(url: str, prompt: str, n: int) -> float:
    """Tokens per second of one answer as the server counts them, with nobody beside it who reads a stream."""
    body = {"prompt": prompt, "n_predict": n, "temperature": 0, "ignore_eos": True, "cache_prompt": False}
    return float(httpx.post(f"{url}/completion", json=body, timeout=600).json()["timings"]["predicted_per_second"])


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
    """One answer in a conversation: its text, tokens of the whole prompt, of what was computed of it and of the answer, and seconds to the first token."""

    text: str
    n_prompt: int
    n_computed: int
    n_answer: int
    first: float


def turn(url: str, messages: list[dict[str, str]], n: int) -> Turn:
    body = {"messages": messages, "max_tokens": n, "temperature": 0, "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    asked, first, text, usage, timings = time.perf_counter(), 0.0, "", {}, {}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            usage, timings = event.get("usage") or usage, event.get("timings") or timings
            if event["choices"] and (piece := event["choices"][0]["delta"].get("content")):
                first = first or time.perf_counter() - asked
                text += piece
    return Turn(text, usage["prompt_tokens"], timings["prompt_n"], usage["completion_tokens"], first)


def third_turn(url: str, words: str, n_strangers: int) -> tuple[Turn, int]:
    """The third turn of a long conversation, and the tokens that are new in it: what comes behind the answer of the second."""
    messages = [{"role": "system", "content": "You are a careful reader. Answer in one sentence."}]

    def say(text: str) -> Turn:
        messages.append({"role": "user", "content": text})
        answer = turn(url, messages, N_ANSWER)
        messages.append({"role": "assistant", "content": answer.text})
        return answer

    say(words[: 4 * N_LONG] + " What is this about?")
    second = say("Who is named in it, and where does it take place?")
    for i in range(n_strangers):
        turn(url, [messages[0], {"role": "user", "content": f"How many legs have {i + 2} spiders, and how many have as many dogs?"}], N_ANSWER)
    third = say("And what came of it in the end?")
    return third, third.n_prompt - second.n_prompt - second.n_answer


def strangers(model: str, words: str, memory: str, n_strangers: int, rounds: int, json_file: str | None) -> None:
    n_ctx = 4 * (2 * N_LONG)
    longer = ["--override-kv", f"{ModelIndex.read(model).architecture}.context_length=int:{n_ctx}"]
    ours = [os.path.join(os.path.dirname(sys.executable), "moeoff"), "serve", "-m", model, "-c", str(n_ctx), "--port", "0", "--memory", memory, "--", *longer]
    contenders = {"moeoff serve": ours, "similarity 0.1, no prompt cache": [*ours, "--slot-prompt-similarity", "0.1", "--cache-ram", "0"]}
    found: dict[str, list[tuple[Turn, int]]] = {name: [] for name in contenders}
    for index in range(rounds):
        for name, command in contenders.items():
            Console(stderr=True).print(f"round {index + 1}: {name}", style="dim")
            with served(command, r"on (http://\S+)/v1") as url:
                time.sleep(LOADING)
                found[name].append(third_turn(url, words, n_strangers))
    with ResultsFile(json_file) as results:
        table = results.table(
            "strangers",
            f"The third turn of a long conversation, after {n_strangers} strangers' questions, {memory}",
            ["", "tokens of the prompt", "new", "computed", "seconds to the first token"],
        )
        for name, turns in found.items():
            of = [[t.n_prompt for t, _ in turns], [new for _, new in turns], [t.n_computed for t, _ in turns]]
            table.row(name, *(_spread(values, 0) for values in of), _spread([t.first for t, _ in turns], 2))


@click.command()
@click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--text", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--memory", default="1100M", show_default=True)
@click.option("--clients", default="1,4", show_default=True)
@click.option("--n-decode", default=96, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("-t", "--threads", default=0, help="Compute threads. Default: every core.")
@click.option("--strategy", default="auto", show_default=True)
@click.option("--stock", is_flag=True)
@click.option("--strangers", "n_strangers", type=int, help="Measure the third turn of a conversation after so many questions of others, and nothing else.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(
    model: str,
    text: str,
    memory: str,
    clients: str,
    n_decode: int,
    rounds: int,
    threads: int,
    strategy: str,
    stock: bool,
    n_strangers: int | None,
    json_file: str | None,
) -> None:
    if n_strangers is not None:
        return strangers(model, Path(text).read_text(), memory, n_strangers, rounds, json_file)
    console = Console(stderr=True)
    counts = [int(n) for n in clients.split(",")]
    threads = threads or len(os.sched_getaffinity(0))
    words = Path(text).read_text()
    step = len(words) // max(counts)
    if step < 4 * N_PROMPT:
        raise click.UsageError(f"{text} is too short for prompts of {max(counts)} clients")
    pieces = [words[i * step :][: 4 * N_PROMPT] for i in range(max(counts))]
    n_ctx = max(counts) * (2 * N_PROMPT + n_decode)
    architecture = ModelIndex.read(model).architecture
    longer = ["--override-kv", f"{architecture}.context_length=int:{n_ctx}"]  # the reference model was trained on 256 tokens
    common = ["-m", model, "-c", str(n_ctx), "-t", str(threads), "-np", str(max(counts)), "--port"]
    ours = [os.path.join(os.path.dirname(sys.executable), "moeoff"), "serve", *common, "0", "--memory", memory, "--strategy", strategy]
    said = r"on (http://\S+)/v1"
    contenders = {"moeoff serve": ([*ours, "--", *longer], said)}
    if stock:
        binary = subprocess.run([sys.executable, str(ROOT / "scripts/build/fork.py"), "llama-server"], stdout=subprocess.PIPE, text=True, check=True)
        program = [binary.stdout.split()[-1], *common, "18080", "--no-repack", "--load-mode", "none", "-fa", "on", "-lv", "4", "--cache-ram", "0", *longer]
        contenders["llama-server"] = ([*program, "--kv-unified"], r"listening on (http://\S+)")
        contenders["llama-server, context divided"] = (program, r"listening on (http://\S+)")
    speeds: dict[str, dict[str, list[float]]] = {name: {} for name in [*contenders, "alone"]}
    for index in range(rounds):
        console.print(f"round {index + 1}: alone", style="dim")
        options = json.dumps({"memory": memory, "n_ctx": n_ctx, "strategy": strategy, "n_threads": threads})
        done = subprocess.run([sys.executable, "-c", ALONE, model, pieces[0], str(n_decode), options, str(LOADING)], capture_output=True, text=True)
        if done.returncode:
            raise click.ClickException(done.stderr[-500:])
        speeds["alone"].setdefault("1", []).append(float(done.stdout))
        for name, (command, pattern) in contenders.items() if index % 2 == 0 else reversed(list(contenders.items())):
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
            f"Tokens per second of all clients, {memory}",
            ["", "1 client, not streamed", *(f"{n} client{'s' * (n > 1)}" for n in counts), "last over first"],
        )
        for name, found in speeds.items():
            cells = [_spread(found.get("itself", found.get("1", [])))]
            cells += [_spread(found[str(n)]) if str(n) in found and name != "alone" else "" for n in counts]
            ends = [found.get(str(n)) for n in (counts[0], counts[-1])]
            table.row(name, *cells, _spread([b / a for a, b in zip(*ends, strict=True)], 2) if all(ends) and len(ends) > 1 else "")


def _spread(values: list[float], digits: int = 1) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


if __name__ == "__main__":
    main()
