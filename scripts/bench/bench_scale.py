"""Two replicas against one, each on a node with its own memory and its own slow disk; and what becomes of chats whose replica is killed.

usage: bench_scale.py -m MODEL --text FILE [--memory 900M] [--disk 40] [--clients 8] [--rounds 3] [--kills 5] [--json FILE]     (root: cgroups)

The nodes are raylets on this machine, in a memory cgroup each, whose processes read no faster than --disk MB/s; so each node is a machine with a disk,
but for the processor, which they share. The disk has to be so slow that it is what answers wait for: then the processor is idle most of the time,
and the last column of the table, what was read over what the disks could give, is near 100 %. Clients ask for answers of their own conversations
at the same time; what counts is the tokens of all in the time in which all are answering. Each round begins with an answer to each client that is not counted.

A kill: 16 chats, half of them streamed; when they have begun one replica (its actor, then its server, in turns) gets SIGKILL. A chat is *lost* if it ends
without all of its answer and without an error.
"""

from __future__ import annotations

import collections
import json
import os
import signal
import statistics
import sys
import threading
import time
from pathlib import Path

import click
import httpx
from ray import serve

import moeoff.ray
from ray_cluster import Cluster, cluster
from results_file import HELP, ResultsFile

NODE = 3 << 30  # bytes of a node's cgroup: Ray's own processes are in it, too
N_KILLED = 16


class Chat:
    """One question, in a thread. times: when each piece of the answer came; outcome: "whole", "error" or "lost"."""

    def __init__(self, url: str, text: str, n: int, stream: bool = True):
        self.times: list[float] = []
        self.outcome, self.asked = "lost", time.perf_counter()
        self._url, self._stream = url, stream
        self._body = {"messages": [{"role": "user", "content": text}], "max_tokens": n, "temperature": 0, "ignore_eos": True, "stream": stream}
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def join(self) -> Chat:
        self._thread.join()
        return self

    def _ask(self) -> None:
        try:
            if self._stream:
                self._read_stream()
            else:
                reply = httpx.post(f"{self._url}/v1/chat/completions", json=self._body, timeout=900)
                self.outcome = "whole" if reply.status_code == 200 and reply.json()["choices"][0]["finish_reason"] else "error"
        except (httpx.TransportError, ValueError):
            self.outcome = "error"

    def _read_stream(self) -> None:
        with httpx.stream("POST", f"{self._url}/v1/chat/completions", json=self._body, timeout=900) as reply:
            if reply.status_code != 200:
                self.outcome = "error"
                return
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                said = json.loads(line[6:])
                if "error" in said:
                    self.outcome = "error"
                elif said["choices"][0]["finish_reason"]:
                    self.outcome = "whole"
                elif said["choices"][0]["delta"].get("content"):
                    self.times.append(time.perf_counter())


def together(url: str, prompts: list[str], n: int) -> tuple[float, float]:
    """Tokens per second of all while all of them are answered, and the median of seconds to the first token."""
    chats = [chat.join() for chat in [Chat(url, prompt, n) for prompt in prompts]]
    if any(chat.outcome != "whole" for chat in chats):
        raise click.ClickException("a chat was not answered")
    first, last = max(chat.times[0] for chat in chats), min(chat.times[-1] for chat in chats)
    return sum(first < t <= last for chat in chats for t in chat.times) / (last - first), statistics.median(chat.times[0] - chat.asked for chat in chats)


def read_so_far(nodes: Cluster, n: int) -> tuple[float, float]:
    """Bytes of experts that all replicas have read, and tokens that they have read and written; reports are renewed every two seconds."""
    time.sleep(5)
    reports = nodes.reports(n)
    return sum(r["expert_bytes_read"] for r in reports), sum(r["tokens_predicted"] + r["tokens_read"] for r in reports)


def kill(nodes: Cluster, prompts: list[str], n: int, what: str) -> tuple[collections.Counter[str], float]:
    """How 16 chats end, and the seconds until as many replicas run as before."""
    dead = nodes.reports(2)[0]
    chats = [Chat(nodes.url, f"{number} {prompts[number % len(prompts)]}", n, stream=number % 2 == 0) for number in range(N_KILLED)]
    while not any(chat.times for chat in chats):
        time.sleep(0.05)
    time.sleep(2)
    os.kill(dead[what], signal.SIGKILL)
    killed = time.perf_counter()
    while dead["replica"] in {report["replica"] for report in nodes.reports(2)}:
        time.sleep(0.1)
    replaced = time.perf_counter() - killed
    return collections.Counter(chat.join().outcome for chat in chats), replaced


@click.command(help=__doc__)
@click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--text", required=True, type=click.Path(exists=True, dir_okay=False), help="Prompts are pieces of it.")
@click.option("--memory", default="900M", show_default=True, help="Of each replica.")
@click.option("--disk", default=40, show_default=True, help="MB/s of each node.")
@click.option("--clients", default=8, show_default=True, help="At the same time, whatever the number of replicas.")
@click.option("--n-decode", default=48, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--kills", default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(model: str, text: str, memory: str, disk: int, clients: int, n_decode: int, rounds: int, kills: int, json_file: str | None) -> None:
    words = Path(text).read_text()
    step = len(words) // clients
    prompts = [words[i * step : i * step + 160] for i in range(clients)]
    with ResultsFile(json_file) as results, cluster([{"disk": "a"}, {"disk": "b"}], NODE, NODE, disk=(model, disk * 10**6)) as nodes:
        table = results.table(
            "replicas",
            f"{clients} clients, {memory} for each replica, a disk of {disk} MB/s for each",
            ["replicas", "tok/s of all", "over one", "first token after, s", "MB read per token", "read, of what the disks give"],
        )
        alone = 0.0
        for n in (1, 2):
            # the same number of answers at a time in each case and replica: as many as there are clients for it
            serve.run(moeoff.ray.deployment(Path(model).resolve(), memory=memory, num_replicas=n, parallel=clients, imbalance=1, n_ctx=512 * clients))
            nodes.reports(n)
            speeds, firsts, shares, each = [], [], [], []
            for _ in range(rounds):
                together(nodes.url, prompts, 8)
                read, tokens = read_so_far(nodes, n)
                began = time.perf_counter()
                speed, first = together(nodes.url, prompts, n_decode)
                took = time.perf_counter() - began
                now, tokens_now = read_so_far(nodes, n)
                speeds.append(speed)
                firsts.append(first)
                shares.append((now - read) / took / (n * disk * 1e6))
                each.append((now - read) / (tokens_now - tokens) / 1e6)
            median = statistics.median(speeds)
            alone = alone or median
            table.row(
                str(n), f"{median:.1f} ({min(speeds):.1f}-{max(speeds):.1f})", f"{median / alone:.2f}", f"{statistics.median(firsts):.1f}",
                f"{statistics.median(each):.0f}", f"{statistics.median(shares):.0%}",
            )  # fmt: skip
            print(f"  {n} replicas", file=sys.stderr)
        if kills:
            table = results.table("kills", f"{N_KILLED} chats, one of two replicas killed", ["killed", "whole", "error", "lost", "replaced after, s"])
        for number in range(kills):
            what = ("pid", "server_pid")[number % 2]
            counts, replaced = kill(nodes, prompts, n_decode, what)
            table.row("actor" if what == "pid" else "server", *(str(counts[outcome]) for outcome in ("whole", "error", "lost")), f"{replaced:.1f}")


if __name__ == "__main__":
    main()
