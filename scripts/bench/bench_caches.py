"""Every cache policy against text: records traces of teacher-forced decoding, fits, replays, and prints the tables of docs/results/cache-policies.md.

bench_caches.py record --model M.gguf --out DIR --text math=FILE --text code=FILE [--tokens N] [--ctx N]
bench_caches.py fit    --trace FILE... --out WEIGHTS.npz        (the learned score, and HOBBIT's weights on stdout)
bench_caches.py papers --trace NAME=FILE --trace NAME=FILE      (EdgeMoE Fig. 13 and HOBBIT Fig. 18 on this model)
bench_caches.py table  --trace NAME=FILE --trace NAME=FILE [--calibration FILE...]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from results_file import HELP, ResultsFile


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

    from moeoff.calibrate.fit_hobbit import fit_hobbit
    from moeoff.calibrate.fit_score import fit_score
    from moeoff.simulate.trace import Trace

    trace = mixed([Trace.read(t) for t in traces])
    np.savez_compressed(out, **fit_score(trace))
    print(f"{out}: {out.stat().st_size} bytes", file=sys.stderr)
    print("hobbit:", fit_hobbit(trace, max_events=3 * 1024 * trace.model.n_gates))


def mixed(traces: list, piece: int = 256):
    """The traces' pieces of `piece` tokens in turn: the domain switches all the time."""
    from moeoff.simulate.trace import Trace

    n = piece * traces[0].model.n_gates
    longest = max(len(t.events) for t in traces)
    return Trace.join([t.slice(i, i + n) for i in range(0, longest, n) for t in traces if i < len(t.events)])


def table(results: ResultsFile, traces: dict[str, Path], calibration: list[Path], shares: list[int], names: list[str], start: int, n_tokens: int) -> None:
    """Every policy on every text, and on all of them in turn."""
    from moeoff.simulate.simulator import simulate
    from moeoff.simulate.trace import Trace

    counts = Trace.join([Trace.read(t) for t in calibration]).counts() if calibration else None
    read = {name: Trace.read(path) for name, path in traces.items()}
    read = {name: t.slice(start * t.model.n_gates, (start + n_tokens) * t.model.n_gates) for name, t in read.items()}
    read["mixed"] = mixed(list(read.values()))
    for name, trace in read.items():
        full = trace.model.full_bytes
        title = f"{name}, {trace.n_tokens:,} tokens: hit rate % / MB read per token / miss penalty per token / % of the gap between LRU and Belady"
        said = results.table(name, title, ["strategy", *(f"{s} %" for s in shares)])
        rows = {}
        for policy in names:
            options = {"counts": counts} if policy == "static" and counts is not None else {}
            rows[policy] = [simulate(trace, policy, int(full * s / 100), **options) for s in shares]
        for policy, replays in rows.items():
            cells = []
            for i, r in enumerate(replays):
                lru, best = rows["lru"][i].hit_rate, rows["belady"][i].hit_rate
                gap = 100 * (r.hit_rate - lru) / (best - lru)
                n = r.n_tokens
                cells.append(f"{100 * r.hit_rate:.1f} / {r.bytes_read / n / 1e6:.2f} / {r.miss_penalty / n:.1f} / {gap:.0f}")
            said.row(policy, *cells)


def papers(results: ResultsFile, traces: dict[str, Path], shares: list[int], start: int, n_tokens: int) -> None:
    """EdgeMoE's Fig. 13 (hit rates) and HOBBIT's Fig. 18 (penalties against random, resetting with each text or not)."""
    from moeoff.cache import Policy, register
    from moeoff.simulate.simulator import simulate
    from moeoff.simulate.trace import Trace

    @register
    class Random(Policy):
        name, summary = "random", "HOBBIT's baseline"

        def update(self, event):
            self.priorities[event.gate] = self.rng.random(self.shape.n_experts)

    read = [Trace.read(path) for path in traces.values()]
    trace = mixed([t.slice(start * t.model.n_gates, (start + n_tokens) * t.model.n_gates) for t in read])
    arenas = [int(trace.model.full_bytes * s / 100) for s in shares]
    head = ["policy", *(f"{s} %" for s in shares)]
    done = {}
    variants = {"hobbit-model": ("hobbit", {"sequence": False})}
    for name in ("random", "lru", "lfu", "lfu-model", "hobbit", "hobbit-model", "edgemoe", "edgemoe-printed"):
        policy, options = variants.get(name, (name, {}))
        done[name] = [simulate(trace, policy, arena, **options) for arena in arenas]
    said = results.table("edgemoe-fig-13", "EdgeMoE, Fig. 13: hit rate %", head)
    for name in ("random", "lru", "lfu-model", "edgemoe", "edgemoe-printed"):
        said.row(name, *(f"{100 * r.hit_rate:.1f}" for r in done[name]))
    said = results.table("hobbit-fig-18a", "HOBBIT, Fig. 18 (a): miss penalty, random eviction = 1", head)
    for name in ("lru", "lfu", "hobbit"):
        said.row(name, *(f"{r.miss_penalty / base.miss_penalty:.3f}" for r, base in zip(done[name], done["random"], strict=True)))
    for other in ("lru", "lfu"):
        pairs = zip(done["hobbit"], done[other], strict=True)
        said.row(f"hobbit against {other}", *(f"{100 * (r.miss_penalty / o.miss_penalty - 1):+.1f} %" for r, o in pairs))
    said = results.table("hobbit-fig-18b", "HOBBIT, Fig. 18 (b): hit rate %, counting since the text began, and for ever", head)
    for name in ("lfu", "hobbit"):
        pairs = zip(done[name], done[f"{name}-model"], strict=True)
        said.row(name, *(f"{100 * r.hit_rate:.1f}, {100 * m.hit_rate:.1f}" for r, m in pairs))


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
    for name in ("table", "papers"):
        p = commands.add_parser(name)
        p.add_argument("--trace", action="append", required=True, metavar="NAME=FILE")
        p.add_argument("--shares", type=int, nargs="+", default=[10, 25, 50, 75, 90])
        p.add_argument("--tokens", type=int, default=1536, help="of each trace")
        p.add_argument("--from", type=int, default=0, dest="start", metavar="TOKEN", help="leave out the tokens before")
        p.add_argument("--json", help=HELP)
        if name == "table":
            p.add_argument("--calibration", type=Path, nargs="*", default=[], help="traces whose counts `static` gets")
            p.add_argument("--strategies", nargs="+")
    args = parser.parse_args()
    if args.command == "record":
        record(args.model, args.out, dict(t.split("=", 1) for t in args.text), args.tokens, args.ctx)
    elif args.command == "fit":
        fit(args.trace, args.out)
    else:
        from moeoff.cache import names

        traces = {name: Path(path) for name, path in (t.split("=", 1) for t in args.trace)}
        with ResultsFile(args.json) as results:
            if args.command == "papers":
                papers(results, traces, args.shares, args.start, args.tokens)
            else:
                table(results, traces, args.calibration, args.shares, args.strategies or names(), args.start, args.tokens)


if __name__ == "__main__":
    main()
