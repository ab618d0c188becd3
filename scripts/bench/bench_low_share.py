"""How the experts' memory is best divided between high and low versions: bytes read for each token, by the low versions' share.

Decodes texts token by token with HOBBIT's thresholds in arenas of some shares of all experts, with LRU and no prefetching.
Counts bytes and not seconds, so the table does not depend on the machine. The default of `moeoff.budget.precision.LOW_SHARE` comes from here.

    python scripts/bench/bench_low_share.py MODEL.gguf prose.txt math.txt --tier Q4_0
"""

from __future__ import annotations

import argparse
from pathlib import Path

import moeoff
from moeoff.budget.precision import Precision
from results_file import HELP, ResultsFile

SHARES = (0.02, 0.05, 0.1, 0.2, 0.4)


def measure(model: str, texts: list[bytes], n_tokens: int, arena: float, precision: Precision) -> tuple[float, float, float]:
    """MB read per token, share of uses served low, share skipped, over all texts."""
    with moeoff.Llama(model, expert_memory=1 << 40, n_ctx=n_tokens, strategy="lru") as llm:
        full = llm.expert_buffer.arena_full
    with moeoff.Llama(model, expert_memory=int(arena * full), n_ctx=n_tokens, precision=precision, strategy="lru") as llm:
        total = 0
        for text in texts:
            tokens = llm.tokenize(text)[:n_tokens]
            llm.reset()
            for token in tokens:
                llm.eval([token])
            total += len(tokens)
        s = llm.stats()
    return s.bytes_read / total / 1e6, s.served_low / s.expert_uses, s.skipped / s.expert_uses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--tier", default="Q4_0")
    parser.add_argument("--tokens", type=int, default=256, help="of each text")
    parser.add_argument("--t1", type=float, default=0.6)
    parser.add_argument("--t2", type=float, default=1.0)
    parser.add_argument("--arenas", type=float, nargs="+", default=[0.25, 0.5], help="as shares of all experts in high precision")
    parser.add_argument("--json", help=HELP)
    args = parser.parse_args()
    texts = [path.read_bytes()[: 16 * args.tokens] for path in args.texts]
    rows = [("lossless", Precision())] + [(f"{s:.0%}", Precision(args.t1, args.t2, 0.0, args.tier, s)) for s in SHARES]
    with ResultsFile(args.json) as results:
        title = f"MB per token (low %, skipped %); T1 {args.t1}, T2 {args.t2}, tier {args.tier}"
        table = results.table("low-share", title, ["low share", *(f"{a:.0%} resident" for a in args.arenas)])
        for label, precision in rows:
            cells = [measure(args.model, texts, args.tokens, a, precision) for a in args.arenas]
            table.row(label, *(f"{mb:.3f} ({100 * low:.0f} %, {100 * skipped:.0f} %)" for mb, low, skipped in cells))


if __name__ == "__main__":
    main()
