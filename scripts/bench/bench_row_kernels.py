"""What a token costs one thread when everything is in memory: stock llama.cpp's plain kernels, its default (repacked) ones, and ours.

usage: bench_row_kernels.py MODEL [MODEL ...] --text FILE [--prompt 64] [--tokens 90] [--json FILE]

The three are opened in one process and decode the same tokens in turn, token by token, so that neighbours on the machine and its clock touch all of them alike.
What is counted is the CPU time of the thread: it does not say how fast several threads are, which share the memory's rate (`speed.py kernels` does).
The model is in memory three times.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import moeoff
from moeoff.bench.worker import load_everything
from moeoff.binding import StockLlama
from results import HELP, ResultsFile

PLAIN, REPACKED, OURS = "stock, plain kernels", "stock, repacked kernels", "moeoff"


def open_all(stack: contextlib.ExitStack, model: str, n_ctx: int) -> dict:
    options = {"n_ctx": n_ctx, "n_threads": 1, "n_threads_batch": 1, "flash_attn": True, "logits_all": True, "verbose": False}
    engines = {}
    for name, repacks in ((PLAIN, False), (REPACKED, True)):
        engines[name] = stack.enter_context(contextlib.closing(StockLlama(model, use_mmap=False, use_extra_bufts=repacks, **options)))
    engines[OURS] = stack.enter_context(moeoff.Llama(model, expert_memory=1 << 40, **options))
    load_everything(engines[OURS].engine.buffer)
    return engines


def measure(model: str, text: str, n_prompt: int, n_tokens: int) -> tuple[dict[str, float], dict[str, float], bool]:
    """Median CPU ms of a token and CPU ms for each token of the prompt, by engine; whether our logits are those of the plain kernels, bit for bit."""
    with contextlib.ExitStack() as stack:
        engines = open_all(stack, model, n_prompt + n_tokens)
        tokens = engines[OURS].tokenize(text.encode())[: n_prompt + n_tokens]
        batches = [tokens[:n_prompt], *([token] for token in tokens[n_prompt:])]
        spent: dict[str, list[float]] = {name: [] for name in engines}
        names = list(engines)
        for turn, batch in enumerate(batches):
            for name in names[turn % 3 :] + names[: turn % 3]:
                began = time.thread_time()
                engines[name].eval(batch)
                spent[name].append(1e3 * (time.thread_time() - began) / len(batch))
        same = np.array_equal(*(np.asarray(engines[name].scores[: len(tokens)]).view(np.uint32) for name in (PLAIN, OURS)))
    return {name: statistics.median(each[1:]) for name, each in spent.items()}, {name: each[0] for name, each in spent.items()}, same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--text", required=True)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=90)
    parser.add_argument("--json", help=HELP)
    options = parser.parse_args()
    text = Path(options.text).read_text(encoding="utf-8")
    with ResultsFile(options.json) as results:
        columns = ["model", *(f"{name}: CPU ms/token" for name in (PLAIN, REPACKED, OURS)), "over plain", "over repacked", "prompt, each", "bits of plain"]
        table = results.table("cpu", "CPU time of a token on one thread", columns)
        for model in options.models:
            token, prompt, same = measure(model, text, options.prompt, options.tokens)
            gains = [f"{token[name] / token[OURS]:.2f} x" for name in (PLAIN, REPACKED)]
            each = " / ".join(f"{prompt[name]:.1f}" for name in (PLAIN, REPACKED, OURS))
            table.row(Path(model).stem, *(f"{token[name]:.2f}" for name in (PLAIN, REPACKED, OURS)), *gains, each, "yes" if same else "NO")


if __name__ == "__main__":
    main()
