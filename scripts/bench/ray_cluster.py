"""A Ray cluster of nodes on this machine to which things happen while clients ask: a
server that hangs, a node that dies, one that joins, more requests.

usage: ray_cluster.py -m MODEL [--memory 200M] [--clients 4] [--json FILE]

Two nodes with a replica each (tests/helpers/ray_cluster.py). The clients ask short
questions, each a conversation of its own, one after the other, from before the event
until the cluster is whole again and for some seconds more; an answer that is not whole
is an error. At last replicas are scaled by the requests in flight: one client, then
many, then none. These ask for longer answers: of short ones most of a client's time is
spent in the client and in Ray, where no replica counts it, while the servers wait for
the cores that all share here.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import click

sys.path[:0] = [
    str(Path(__file__).resolve().parents[1]),
    str(Path(__file__).resolve().parents[2] / "tests"),
]

import httpx
from rich.console import Console

from helpers.ray_cluster import Cluster, cluster
from helpers.servers import single_use
from results import HELP, ResultsFile

GIB = 1 << 30
N_TOKENS, N_LONGER = 32, 256  # of an answer; of one that lasts
AROUND = 5.0  # seconds of asking before an event and behind it
LASTS = 40.0  # seconds for which the demand lasts: longer than Ray looks back
LONGEST = 240.0  # seconds until the cluster must be whole again
SCALED = {
    "min_replicas": 1,
    "max_replicas": 2,
    "target_ongoing_requests": 2,
    "upscale_delay_s": 2,
    "downscale_delay_s": 5,
}


class Clients:
    """Ask while the block runs. answers: (seconds, whole or not) of each request, in
    the order of their ends.
    """

    def __init__(self, url: str, n: int, n_tokens: int = N_TOKENS):
        self.url, self.n_tokens, self.answers, self._ends = (
            url,
            n_tokens,
            list[tuple[float, bool]](),
            threading.Event(),
        )
        self._threads = [threading.Thread(target=self._ask, args=(i,)) for i in range(n)]

    def __enter__(self) -> Clients:
        self.begun = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._ends.set()
        for thread in self._threads:
            thread.join()
        self.seconds = time.monotonic() - self.begun

    def _ask(self, client: int) -> None:
        number, n = 0, self.n_tokens
        with single_use() as http:
            while not self._ends.is_set():
                number += 1
                body = {
                    "messages": [{"role": "user", "content": f"{client}.{number}: how many?"}],
                    "max_tokens": n,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                asked = time.monotonic()
                try:
                    answer = http.post(
                        f"{self.url}/v1/chat/completions", json=body, timeout=LONGEST
                    )
                    whole = (
                        answer.status_code == 200
                        and answer.json()["usage"]["completion_tokens"] == n
                    )
                except httpx.HTTPError:
                    whole = False
                self.answers.append((time.monotonic() - asked, whole))


def servers(nodes: Cluster) -> set[tuple[int, int]]:
    """(node, process) of every server that there is now."""
    return {(replica.node, replica.server_pid) for replica in nodes.running()}


def after(condition: Callable[[], bool], began: float | None = None) -> float:
    """Seconds until it is so, from now on or from then."""
    began = time.monotonic() if began is None else began
    while not condition():
        if time.monotonic() - began > LONGEST:
            raise click.ClickException(f"not so after {LONGEST:.0f} s")
        time.sleep(0.1)
    return time.monotonic() - began


def n_running(name: str) -> int:
    """Replicas that answer, as Ray knows it."""
    from ray import serve

    return sum(
        app.deployments[name].replica_states.get("RUNNING", 0)
        for app in serve.status().applications.values()
        if name in app.deployments
    )


def n_in_flight() -> float:
    """Requests, by which Ray scales: the mean of the last half minute."""
    import ray

    ports = [node["MetricsExportPort"] for node in ray.nodes() if node["Alive"]]
    texts = "".join(
        httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=LONGEST).text for port in ports
    )
    return float(
        re.findall(
            r'^ray_serve_autoscaling_total_requests\{.*?deployment="moeoff".*?\} (\S+)',
            texts,
            re.MULTILINE,
        )[-1]
    )


@click.command()
@click.option("-m", "--model", required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--memory", default="200M", show_default=True, help="Of each replica.")
@click.option("--clients", "n_clients", default=4, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(model: str, memory: str, n_clients: int, json_file: str | None) -> None:
    from ray import serve

    import moeoff.ray

    console = Console(stderr=True)
    rows: list[tuple[str, float, Clients]] = []
    steps: list[tuple[str, int, float, Clients | None, float | None]] = []
    model = os.path.abspath(model)

    def happens(
        nodes: Cluster, what: str, event: Callable[[], tuple[float, Callable[[], bool]]]
    ) -> None:
        """event: does it, and returns when, and what says that the cluster is whole
        again.
        """
        console.print(what, style="dim")
        with Clients(nodes.url, n_clients) as clients:
            time.sleep(AROUND)
            began, whole = event()
            seconds = after(whole, began)
            time.sleep(AROUND)
        rows.append((what, seconds, clients))

    def hang() -> tuple[float, Callable[[], bool]]:
        hung, now = min(servers(nodes)), time.monotonic()
        os.kill(hung[1], signal.SIGSTOP)
        return now, lambda: hung not in servers(nodes) and n_running("moeoff") == 2

    def die() -> tuple[float, Callable[[], bool]]:
        now = time.monotonic()
        nodes.kill(1)
        return now, lambda: n_running("moeoff") == 1

    def join() -> tuple[float, Callable[[], bool]]:
        nodes.add({"holds": "model"})  # until Ray runs there
        return time.monotonic(), lambda: n_running("moeoff") == 2

    with cluster([{"holds": "model"}] * 2, 2 * GIB, None) as nodes:
        serve.run(
            moeoff.ray.deployment(
                model, memory=memory, num_replicas=2, labels={"holds": "model"}, n_threads=1
            )
        )
        happens(nodes, "a server hangs (SIGSTOP)", hang)
        happens(nodes, "a node dies", die)
        happens(nodes, "a node joins", join)
        serve.delete("default")
        after(lambda: not servers(nodes))
        scaled = moeoff.ray.deployment(
            model,
            memory=memory,
            labels={"holds": "model"},
            n_threads=1,
            ray_options={"autoscaling_config": SCALED},
        )
        serve.run(scaled)
        for n, n_expected in ((1, 1), (2 * n_clients, 2)):
            console.print(f"{n} clients, replicas scaled", style="dim")
            with Clients(nodes.url, n, N_LONGER):
                seconds = after(lambda n_expected=n_expected: n_running("moeoff") == n_expected)
            with Clients(nodes.url, n, N_LONGER) as clients:
                time.sleep(LASTS)
                n_replicas, in_flight = n_running("moeoff"), n_in_flight()
            steps.append((f"{n} client{'s' * (n > 1)}", n_replicas, seconds, clients, in_flight))
        steps.append(("none", 1, after(lambda: n_running("moeoff") == 1), None, None))
    with ResultsFile(json_file) as results:
        title = f"{n_clients} clients, two replicas with {memory} each"
        table = results.table(
            "events",
            title,
            ["", "whole again after, s", "requests", "answered", "errors", "slowest, s"],
        )
        for what, seconds, clients in rows:
            whole = sum(ok for _, ok in clients.answers)
            n = len(clients.answers)
            table.row(
                what,
                f"{seconds:.1f}",
                str(n),
                str(whole),
                str(n - whole),
                f"{max(s for s, _ in clients.answers):.1f}",
            )
        title = (
            f"Replicas by requests in flight, one to two, two for each; after {LASTS:.0f} s more of"
            " the same demand"
        )
        table = results.table(
            "scaled",
            title,
            [
                "",
                "so many replicas after, s",
                "replicas then",
                "in flight, as Ray counts",
                "answers/s",
            ],
        )
        for what, n, seconds, clients, in_flight in steps:
            rate = f"{len(clients.answers) / clients.seconds:.1f}" if clients else ""
            table.row(
                what,
                f"{seconds:.1f}",
                str(n),
                "" if in_flight is None else f"{in_flight:.1f}",
                rate,
            )


if __name__ == "__main__":
    main()
