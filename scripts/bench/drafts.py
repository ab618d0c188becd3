"""What drafts gain: tokens per second with them over without, on prose and on code that is written again with a name changed. Of drafts that a model makes
also what it gains that experts of drafted tokens are read meanwhile: the time of a batch without over with, in blocks of batches of one answer.

usage: drafts.py -m MODEL --text FILE [-md FILE | --spec-type draft-mtp] [--length N] [--memory 6G,none] [--n-prompt 512] [--n-decode 192] [--rounds 5]
                 [--json FILE]

The answer is the text itself: a logits processor rules all other tokens out, with and without drafts. So tokens, and with them routing and what drafts can
guess, are a real text's, whatever the model would write. A minute or two for each model of 17 GB and round.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from pathlib import Path

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import moeoff
from moeoff.engine.drafts import TEXT_DRAFTS, DraftLength
from moeoff.engine.engine import Engine
from results import HELP, ResultsFile, spread

CODE = ROOT / "moeoff" / "routing" / "batch.py"
FILE = click.Path(exists=True, dir_okay=False)
WITHOUT, WITH, BY_TURNS = "without", "with drafts", "with drafts, and read ahead by turns"
BLOCK, SKIP = 10, 2  # batches of a turn, and how many of its first are not timed


def texts(path: str) -> dict[str, tuple[str, str]]:
    """Prompt and answer of each kind."""
    prose, code = Path(path).read_text(), CODE.read_text()
    half = len(prose) // 2
    return {"prose": (prose[:half], prose[half:]), "code, edited": (code, re.sub(r"\bspans?\b", "part", code))}


def speed(llm: moeoff.Llama, prompt: list[int], answer: list[int]) -> tuple[float, moeoff.Stats]:
    """Tokens per second of the answer behind its first token, and its statistics."""
    text = prompt + answer

    def force(ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
        scores[:] = -np.inf
        scores[text[len(ids)]] = 0
        return scores

    llm.clear_context()
    tokens = llm.generate(prompt, temp=0.0, logits_processor=[force])
    drawn, before, started = [next(tokens)], llm.stats(), time.perf_counter()
    for token in tokens:
        drawn.append(token)
        if len(drawn) == len(answer):
            break
    seconds = time.perf_counter() - started
    tokens.close()
    if drawn != answer:
        raise SystemExit("the answer is not the text")
    return (len(answer) - 1) / seconds, llm.stats().since(before)


def gain_of_reading_ahead(llm: moeoff.Llama, prompt: list[int], answer: list[int]) -> float:
    """Median time of a batch with a draft for which nothing was read ahead, over that of one for which it was."""
    times: dict[bool, list[float]] = {False: [], True: []}
    n, started, drafts, expect = 0, 0.0, llm._drafts, Engine.expect

    def reads() -> bool:
        return n // BLOCK % 4 in (1, 2)

    def timed(tokens: np.ndarray) -> np.ndarray:
        nonlocal n, started
        now = time.perf_counter()
        if n % BLOCK >= SKIP:
            times[reads()].append(now - started)
        n, started = n + 1, now
        return drafts(tokens)

    llm._draft_with(timed)
    Engine.expect = lambda engine, token: expect(engine, token) if reads() else None  # type: ignore[method-assign]
    speed(llm, prompt, answer)
    Engine.expect = expect  # type: ignore[method-assign]
    llm._draft_with(drafts)
    return statistics.median(times[False]) / statistics.median(times[True])


@click.command(help=__doc__)
@click.option("-m", "--model", required=True, type=FILE)
@click.option("--text", required=True, type=FILE)
@click.option("-md", "--draft", type=FILE, help="A model that makes the drafts; else the text itself does.")
@click.option("--spec-type", help="As of moeoff run.")
@click.option("--length", type=int, help="Tokens of each draft, whether that pays or not.")
@click.option("--memory", default="none", show_default=True, help="Limits, with commas between; none: 80 % of what is available.")
@click.option("--n-prompt", default=512, show_default=True)
@click.option("--n-decode", default=192, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(model: str, text: str, draft: str | None, spec_type: str | None, length: int | None, memory: str, n_prompt: int, n_decode: int, rounds: int,
         json_file: str | None) -> None:  # fmt: skip
    spec_type = spec_type or (None if draft else TEXT_DRAFTS)
    drafts = {"spec_type": spec_type, "draft": draft}
    if length is not None:
        DraftLength.best = length  # type: ignore[method-assign, assignment]
    ways = [WITHOUT, WITH] + ([BY_TURNS] if spec_type != TEXT_DRAFTS else [])
    with ResultsFile(json_file) as results:
        columns = ["text", "memory", "without, tok/s", "with drafts", "ratio", "rejected, of the text's tokens"]
        columns += ["by reading ahead"] if BY_TURNS in ways else []
        table = results.table("drafts", f"Decoding {n_decode} tokens behind {n_prompt}, medians of {rounds} rounds", columns)
        for limit in memory.split(","):
            rates: dict[tuple[str, str], list[float]] = {}
            last: dict[str, moeoff.Stats] = {}
            for index in range(rounds):
                for way in ways if index % 2 == 0 else ways[::-1]:
                    options = ({"memory": limit} if limit != "none" else {}) | (drafts if way != WITHOUT else {})
                    with moeoff.Llama(model, n_ctx=n_prompt + n_decode + 32, flash_attn=True, **options) as llm:
                        for kind, parts in texts(text).items():
                            prompt, answer = (llm.tokenize(part.encode(), add_bos=False) for part in parts)
                            prompt, answer = prompt[-n_prompt:] if kind == "prose" else prompt[:n_prompt], answer[:n_decode]
                            if way == BY_TURNS:
                                rates.setdefault((kind, way), []).append(gain_of_reading_ahead(llm, prompt, answer))
                                continue
                            rate, stats = speed(llm, prompt, answer)
                            rates.setdefault((kind, way), []).append(rate)
                            last |= {kind: stats} if way == WITH else {}
            for kind, stats in last.items():
                without, with_, *gains = (rates[kind, way] for way in ways)
                ratios = [b / a for a, b in zip(without, with_)]
                row = [kind, limit, *map(spread, (without, with_, ratios)), f"{stats.drafts_rejected / n_decode:.0%}"]
                table.row(*row, *map(spread, gains))


if __name__ == "__main__":
    main()
