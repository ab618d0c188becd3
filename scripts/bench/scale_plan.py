"""How many machines 1,000 users need, from what the model's routers choose on text: a replica's day on a simulated clock, by how requests are routed.

usage: scale_plan.py [-m MODEL] [--text FILE ...] [--users 1000] [--pause 300] [--experts 16] [--shares 25,50,75] [--json FILE]

Conversations have --turns turns of a question and an answer, of one text each. A replica answers --parallel of them at a time and always has the next
request at hand; its batches are the gate events that were recorded, put together as the server puts them together: each prompt on its own, tokens of all
answers that are written in one. Who serves a turn:
  any     no matter which replica: it has to read the whole conversation again, but for the share 1/replicas of turns that come back by chance
  own     the one that served the turn before (affinity): it reads the question alone
  topic   own, and conversations about one text have the same replica (prompt_cache_key)
Then disk, policy and memory give the time (moeoff.simulate.tiered, the CPU alone). The model's routing is its own; its experts are as large as --experts
says, so that times are those of a model of that size with such a routing. A run repeats exactly.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import click
import numpy as np

from moeoff.gate_event import GateEvent
from moeoff.simulate.bandwidths import Bandwidths
from moeoff.simulate.tiered import replay
from moeoff.simulate.tiered_result import TieredResult
from moeoff.simulate.trace import Model, Trace
from results_file import HELP, ResultsFile

ROOT = Path(__file__).resolve().parents[2]
TEXTS = [ROOT / "tests" / "data" / name for name in ("prose.txt", "prose-2.txt", "code.txt")]
BATCH = 512  # tokens of a prompt that are read at once
BUSY = 0.7  # of the time that a machine may be busy, so that requests do not queue without end
ROUTINGS = ("any", "own", "topic")


def record(model: str, text: Path, n_tokens: int) -> Trace:
    """Of a text fed token by token."""
    from moeoff import Llama

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.trace"
        with Llama(model, expert_memory="100G", n_ctx=512, n_threads=1, trace=path) as llm:
            tokens = llm.tokenize(text.read_bytes(), add_bos=False)[:n_tokens]
            for begin in range(0, len(tokens), 500):
                llm.reset()
                for token in tokens[begin : begin + 500]:
                    llm.eval([token])
        return Trace.read(path)


class Tokens:
    """What each gate chose for each token of a text: ids, weights [n_gates, n_tokens, n_used]."""

    def __init__(self, trace: Trace):
        of_gate = [[e for e in trace.events if e.gate == g] for g in range(trace.model.n_gates)]
        self.ids, self.weights = (np.stack([np.concatenate([getattr(e, name) for e in events]) for events in of_gate]) for name in ("ids", "weights"))
        self.n = self.ids.shape[1]

    def at(self, gate: int, places: range) -> tuple[np.ndarray, np.ndarray]:
        """Past the end the text begins again."""
        where = np.arange(places.start, places.stop) % self.n
        return self.ids[gate, where], self.weights[gate, where]


class Replica:
    """The events of one replica that serves these turns, each a text, the place in it where the conversation began, its number, and whether it has
    the conversation's history."""

    def __init__(self, texts: list[Tokens], prompt: int, answer: int, parallel: int):
        self._texts, self._prompt, self._answer, self._parallel = texts, prompt, answer, parallel
        self.events: list[GateEvent] = []
        self.read = 0

    def serve(self, turns: list[tuple[int, int, int, bool]]) -> None:
        waiting, slots = list(reversed(turns)), {}  # sequence: text, place, tokens left
        while waiting or slots:
            for sequence in range(self._parallel):
                if sequence not in slots and waiting:
                    text, begin, turn, known = waiting.pop()
                    history = turn * (self._prompt + self._answer)
                    end = begin + history + self._prompt
                    self.read_text(sequence, text, range(begin if not known else begin + history, end))
                    slots[sequence] = [text, end, self._answer]
            self.write_tokens(slots)

    def read_text(self, sequence: int, text: int, places: range) -> None:
        for first in range(places.start, places.stop, BATCH):
            self._add([(sequence, text, range(first, min(first + BATCH, places.stop)))], decode=False)
        self.read += len(places)

    def write_tokens(self, slots: dict[int, list[int]]) -> None:
        self._add([(sequence, text, range(at, at + 1)) for sequence, (text, at, _) in slots.items()], decode=True)
        for sequence, slot in list(slots.items()):
            slot[1], slot[2] = slot[1] + 1, slot[2] - 1
            if not slot[2]:
                del slots[sequence]

    def _add(self, parts: list[tuple[int, int, range]], decode: bool) -> None:
        sequences = np.concatenate([np.full(len(places), sequence, np.int32) for sequence, _, places in parts])
        for gate in range(self._texts[0].ids.shape[0]):
            ids, weights = (np.concatenate(arrays) for arrays in zip(*(self._texts[text].at(gate, places) for _, text, places in parts)))
            self.events.append(GateEvent(gate, ids, weights, decode=decode, sequences=sequences))


def turns_of(routing: str, n_texts: int, lengths: list[int], n_turns: int, n_conversations: int, replicas: int, seed: int) -> list[tuple[int, int, int, bool]]:
    """What one of the replicas is given: as many turns whatever the routing."""
    rng = random.Random(seed)
    conversations = [(0 if routing == "topic" else rng.randrange(n_texts), rng.random()) for _ in range(n_conversations)]
    turns = []
    for turn in range(n_turns):  # users take turns: between two of one conversation come those of the others
        for text, place in conversations:
            known = turn == 0 or routing != "any" or rng.random() < 1 / replicas
            turns.append((text, int(place * lengths[text]), turn, known))
    return turns


@click.command(help=__doc__)
@click.option("-m", "--model", type=click.Path(exists=True, dir_okay=False), help="Whose routing it is. Default: the demo model.")
@click.option("--text", "texts", multiple=True, type=click.Path(exists=True, dir_okay=False), help="Topics. Default: the tests' texts.")
@click.option("--experts", default=16.0, show_default=True, help="GiB of all experts.")
@click.option("--dense", default=1.0, show_default=True, help="GiB of the rest of the model.")
@click.option("--kv", default=96, show_default=True, help="KiB of KV cache for a token.")
@click.option("--users", default=1000, show_default=True)
@click.option("--pause", default=300.0, show_default=True, help="Seconds from one request of a user to the next.")
@click.option("--turns", default=4, show_default=True, help="Of a conversation.")
@click.option("--prompt", default=64, show_default=True, help="Tokens of a question.")
@click.option("--answer", default=128, show_default=True, help="Tokens of an answer.")
@click.option("--parallel", default=4, show_default=True)
@click.option("--conversations", default=4, show_default=True, help="That are simulated, of one replica.")
@click.option("--shares", default="25,50,75", show_default=True, help="Percent of the experts in memory.")
@click.option("--disk", default=6.3, show_default=True, help="GB/s.")
@click.option("--strategy", default="lru", show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(model: str | None, texts: tuple[str, ...], experts: float, dense: float, kv: int, users: int, pause: float, turns: int, prompt: int, answer: int,
         parallel: int, conversations: int, shares: str, disk: float, strategy: str, json_file: str | None) -> None:  # fmt: skip
    from moeoff.paths import demo_model

    speeds = Bandwidths(disk=disk)
    files = [Path(text) for text in texts] or TEXTS
    traces = [record(model or demo_model(), file, 1000) for file in files]
    tokens = [Tokens(trace) for trace in traces]
    small = traces[0].model
    first = {t.gate: t for t in reversed(small.tensors)}  # an expert's matrices as one: they are read together
    nbytes = int(experts * 2**30 / sum(t.n_experts for t in first.values()))
    large = replace(small, tensors=tuple(replace(t, nbytes=nbytes) for _, t in sorted(first.items())))
    asked = users / pause
    replicas = 10
    with ResultsFile(json_file) as results:
        speed = results.table(
            "replica",
            f"A replica with {parallel} answers at a time; {experts:g} GiB of experts, a disk of {disk:g} GB/s",
            ["experts in memory", "routed to", "uses in memory", "MB read per token", "prompt tokens", "prompt read in", "answers, tok/s", "requests/s"],
        )
        found: dict[tuple[int, str], float] = {}
        for share in map(int, shares.split(",")):
            for routing in ("own", "topic", "any"):
                replica = Replica(tokens, prompt, answer, parallel)
                lengths = [text.n for text in tokens]
                given = turns_of(routing, len(tokens), lengths, turns, conversations, replicas, 1)
                replica.serve(given)
                result = _replay(replica.events, large, strategy, speeds, share)
                uses, n = result.host + result.disk, result.n_tokens
                found[share, routing] = 1e9 * len(given) / result.ns
                if routing == "own":
                    replicas = _machines(asked, found[share, routing])
                speed.row(
                    f"{share} %", routing, f"{result.host / uses:.0%}", f"{result.read_bytes / n / 1e6:.0f}", f"{replica.read / len(given):.0f}",
                    f"{(result.ns - result.decode_ns) / len(given) / 1e9:.1f} s", f"{result.decode_tps:.1f}", f"{found[share, routing]:.3f}",
                )  # fmt: skip
                print(f"  {share} %, {routing}", file=sys.stderr)
        share = int(shares.split(",")[-1])
        turns_table = results.table(
            "history", f"Seconds to read a question of {prompt} tokens, with {share} % of the experts in memory", ["conversation so far, tokens", "own", "any"]
        )
        for history in (256, 1024, 4096):
            waits = []
            for begin in (history, 0):
                replica = Replica(tokens, prompt, answer, parallel)
                replica.read_text(0, 0, range(history))  # another conversation, so that memory is full
                warm = _seconds(replica.events, large, strategy, speeds, share)
                replica.read_text(0, len(tokens) - 1, range(begin, history + prompt))
                waits.append(_seconds(replica.events, large, strategy, speeds, share) - warm)
            turns_table.row(f"{history:,}", *(f"{wait:.1f}" for wait in waits))
        plan = results.table(
            "plan",
            f"{users:,} users, one request in {pause:g} s each ({asked:.1f} a second); machines busy {BUSY:.0%} of the time",
            ["experts in memory", *(f"machines, {routing}" for routing in ROUTINGS), "disk of each, GiB", "memory of each, GiB", "of it KV cache"],
        )
        for share in map(int, shares.split(",")):
            machines = {routing: _machines(asked, found[share, routing]) for routing in ROUTINGS}
            kept = users / machines["own"] * turns * (prompt + answer) * kv / 2**20  # all conversations of its users, GiB
            memory = experts * share / 100 + dense + kept
            plan.row(f"{share} %", *(str(machines[routing]) for routing in ROUTINGS), f"{experts + dense:.0f}", f"{memory:.1f}", f"{kept:.1f}")


def _seconds(events: list[GateEvent], model: Model, strategy: str, speeds: Bandwidths, share: int) -> float:
    return _replay(events, model, strategy, speeds, share).ns / 1e9


def _replay(events: list[GateEvent], model: Model, strategy: str, speeds: Bandwidths, share: int) -> TieredResult:
    starts = np.zeros(len(events), bool)
    starts[0] = True
    return replay(Trace(model, events, starts), strategy, speeds, 0, model.full_bytes * share // 100, "cpu")


def _machines(asked: float, served: float) -> int:
    return math.ceil(asked / (BUSY * served))


if __name__ == "__main__":
    main()
