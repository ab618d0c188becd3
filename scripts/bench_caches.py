"""Every cache policy against text: records traces of teacher-forced decoding, fits, replays, and prints docs/strategies.md's table.

    bench_caches.py record --model M.gguf --out DIR --text math=FILE --text code=FILE [--tokens N] [--ctx N]
    bench_caches.py fit    --trace FILE... --out WEIGHTS.npz        (the learned score; needs scikit-learn)
    bench_caches.py table  --trace NAME=FILE --trace NAME=FILE [--calibration FILE...]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import moeoff.hooks  # noqa: F401, I001  prepares the process before anything loads llama.cpp


def record(model: str, out: Path, texts: dict[str, str], n_tokens: int, n_ctx: int) -> None:
    """One trace for each text: tokens fed one by one, a new sequence each `n_ctx` tokens."""
    from moeoff import Llama

    out.mkdir(parents=True, exist_ok=True)
    for name, path in texts.items():
        file = out / f"{name}.trace"
        file.unlink(missing_ok=True)
        with Llama(model, expert_memory="100G", n_ctx=n_ctx, n_threads=1, trace=file) as llm:
            text = Path(path).read_bytes()
            # spread over the file, so that few tokens still are many documents
            n_seq = max(n_tokens // n_ctx, 1)
            for i in range(n_seq):
                piece = text[len(text) * i // n_seq :][: 12 * n_ctx].decode("utf-8", "ignore").encode()
                tokens = llm.tokenize(piece, add_bos=False)[:n_ctx]
                llm.reset()
                for token in tokens:
                    llm.eval([token])
        print(f"{file}: {file.stat().st_size} bytes", file=sys.stderr)


def fit(traces: list[Path], out: Path) -> None:
    import numpy as np

    from moeoff.cache.learn import fit_score
    from moeoff.trace import Trace

    np.savez_compressed(out, **fit_score(Trace.join([Trace.read(t) for t in traces])))
    print(f"{out}: {out.stat().st_size} bytes", file=sys.stderr)


def mixed(traces: list, piece: int = 256):
    """The traces' pieces of `piece` tokens in turn: the domain switches all the time."""
    from moeoff.trace import Trace

    n = piece * traces[0].model.n_gates
    longest = max(len(t.events) for t in traces)
    return Trace.join([t.slice(i, i + n) for i in range(0, longest, n) for t in traces if i < len(t.events)])


def table(traces: dict[str, Path], calibration: list[Path], shares: list[int], names: list[str], n_tokens: int, seed: int = 0) -> None:
    """The table of docs/strategies.md on stdout."""
    from moeoff.simulate import simulate
    from moeoff.trace import Trace

    counts = Trace.join([Trace.read(t) for t in calibration]).counts() if calibration else None
    read = {name: Trace.read(path) for name, path in traces.items()}
    read = {name: t.slice(0, n_tokens * t.model.n_gates) for name, t in read.items()}
    read["mixed"] = mixed(list(read.values()))
    for name, trace in read.items():
        full = trace.model.full_bytes
        print(f"\n**{name}**, {trace.n_tokens:,} tokens: hit rate % / MB per token / miss penalty per token / % of the LRU-to-Belady gap\n")
        print("| strategy | " + " | ".join(f"{s} %" for s in shares) + " |")
        print("|---|" + "---:|" * len(shares))
        rows = {}
        for policy in names:
            options = {"counts": counts} if policy == "static" and counts is not None else {}
            rows[policy] = [simulate(trace, policy, int(full * s / 100), seed=seed, **options) for s in shares]
        for policy, results in rows.items():
            cells = []
            for i, r in enumerate(results):
                lru, best = rows["lru"][i].hit_rate, rows["belady"][i].hit_rate
                gap = 100 * (r.hit_rate - lru) / (best - lru)
                n = r.n_tokens
                cells.append(f"{100 * r.hit_rate:.1f} / {r.bytes_read / n / 1e6:.2f} / {r.miss_penalty / n:.1f} / {gap:.0f}")
            print(f"| {policy} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    p = commands.add_parser("record")
    p.add_argument("--model", required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    p.add_argument("--tokens", type=int, default=4096)
    p.add_argument("--ctx", type=int, default=256)
    p = commands.add_parser("fit")
    p.add_argument("--trace", type=Path, nargs="+", required=True)
    p.add_argument("--out", type=Path, required=True)
    p = commands.add_parser("table")
    p.add_argument("--trace", action="append", required=True, metavar="NAME=FILE")
    p.add_argument("--calibration", type=Path, nargs="*", default=[], help="traces whose counts `static` gets")
    p.add_argument("--shares", type=int, nargs="+", default=[10, 25, 50, 75, 90])
    p.add_argument("--strategies", nargs="+")
    p.add_argument("--tokens", type=int, default=1536, help="of each trace")
    args = parser.parse_args()
    if args.command == "record":
        record(args.model, args.out, dict(t.split("=", 1) for t in args.text), args.tokens, args.ctx)
    elif args.command == "fit":
        fit(args.trace, args.out)
    else:
        from moeoff.cache import names

        traces = {name: Path(path) for name, path in (t.split("=", 1) for t in args.trace)}
        table(traces, args.calibration, args.shares, args.strategies or names(), args.tokens)


if __name__ == "__main__":
    main()
