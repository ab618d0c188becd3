"""What drafts from the text gain: tokens per second with them over without, on prose and on code that is written again with a name changed.

usage: drafts.py -m MODEL --text FILE [--memory 6G,none] [--n-prompt 512] [--n-decode 192] [--rounds 5] [--json FILE]

The answer is the text itself: a logits processor rules all other tokens out, with and without drafts. So tokens, and with them routing and what drafts can
guess, are a real text's, whatever the model would write. A minute or two for each model of 17 GB and round.
"""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import click
import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import moeoff
from results import HELP, ResultsFile, spread

CODE = ROOT / "moeoff" / "routing" / "batch.py"
FILE = click.Path(exists=True, dir_okay=False)


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


@click.command(help=__doc__)
@click.option("-m", "--model", required=True, type=FILE)
@click.option("--text", required=True, type=FILE)
@click.option("--memory", default="none", show_default=True, help="Limits, with commas between; none: 80 % of what is available.")
@click.option("--n-prompt", default=512, show_default=True)
@click.option("--n-decode", default=192, show_default=True)
@click.option("--rounds", default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False), help=HELP)
def main(model: str, text: str, memory: str, n_prompt: int, n_decode: int, rounds: int, json_file: str | None) -> None:
    with ResultsFile(json_file) as results:
        columns = ["text", "memory", "without, tok/s", "with drafts", "ratio", "rejected, of the text's tokens"]
        table = results.table("drafts", f"Decoding {n_decode} tokens behind {n_prompt}, medians of {rounds} rounds", columns)
        for limit in memory.split(","):
            rates: dict[str, list[tuple[float, float]]] = {kind: [] for kind in texts(text)}
            last: dict[str, moeoff.Stats] = {}
            for index in range(rounds):
                of_round: dict[str, dict[bool, float]] = {kind: {} for kind in rates}
                for drafts in (False, True) if index % 2 == 0 else (True, False):
                    options = {"memory": limit} if limit != "none" else {}
                    with moeoff.Llama(model, n_ctx=n_prompt + n_decode + 32, flash_attn=True, spec_type="ngram-simple" if drafts else None, **options) as llm:
                        for kind, parts in texts(text).items():
                            prompt, answer = (llm.tokenize(part.encode(), add_bos=False) for part in parts)
                            of_round[kind][drafts], stats = speed(llm, prompt[-n_prompt:] if kind == "prose" else prompt[:n_prompt], answer[:n_decode])
                            last |= {kind: stats} if drafts else {}
                for kind, pair in of_round.items():
                    rates[kind].append((pair[False], pair[True]))
            for kind, pairs in rates.items():
                ratios = [with_ / without for without, with_ in pairs]
                table.row(
                    kind,
                    limit,
                    *map(spread, zip(*pairs)),
                    spread(ratios),
                    f"{last[kind].drafts_rejected / n_decode:.0%}",
                )


if __name__ == "__main__":
    main()
