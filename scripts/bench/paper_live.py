"""The papers' systems and their baselines on this machine, in turn, each run cold in a process of its own."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cgroup import unavailable
from paper_contenders import CONTENDERS, RATIOS, STOCK, STOCK_LIMITED, ratios
from results_file import ResultsFile
from timing import measure, run

COLUMNS = {"gen_tps": ("tok/s", "{:.1f}"), "prompt_tps": ("prompt tok/s", "{:.0f}"), "hit_rate": ("hits", "{:.0%}"), "mb_per_token": ("MB/token", "{:.0f}"),
           "stall_share": ("stall", "{:.0%}"), "low": ("served low", "{:.0%}"), "skipped": ("skipped", "{:.0%}")}  # fmt: skip
_TIMEOUT = 600.0


@dataclass(frozen=True)
class LiveRun:
    """Args:
    model, text: files; the text's first tokens are the same for all.
    arena: bytes for experts.
    tiers: of the companion beside the model, by "int4" and "int2"; contenders that need one that is not there are left out.
    stock: stock llama.cpp, too: once with everything in its page cache, once in a cgroup as large as LRU's process has been.
    """

    model: str
    text: str
    arena: int
    n_prompt: int
    n_decode: int
    io_workers: int
    tiers: Mapping[str, str] = field(default_factory=dict)
    stock: bool = True

    def contenders(self) -> dict[str, dict]:
        found = {name: contender.options(self.tiers) for name, contender in CONTENDERS.items()}
        return {name: options for name, options in found.items() if options is not None}

    def one_round(self) -> dict[str, dict]:
        rows = {name: self._ours(options) for name, options in self.contenders().items()}
        if self.stock:
            rows[STOCK] = measure("stock", self.model, self.text, self.n_prompt, self.n_decode, _TIMEOUT)
            limit, why = rows["LRU"].get("peak_rss_mib"), unavailable()
            if limit is not None and why is None:
                # without repacked kernels, which would need the weights twice
                rows[STOCK_LIMITED] = run(int(limit) << 20, "stock", self.model, self.text, self.n_prompt, self.n_decode, _TIMEOUT, use_extra_bufts=False)
            else:
                rows[STOCK_LIMITED] = {"failed": why or "LRU has failed"}
        return rows

    def _ours(self, options: dict) -> dict:
        return measure("moeoff", self.model, self.text, self.n_prompt, self.n_decode, _TIMEOUT, **options, expert_memory=self.arena, n_lanes=self.io_workers)


def run_rounds(live: LiveRun, rounds: int) -> dict[str, list[dict]]:
    """By contender, a row for each round; what failed has "failed"."""
    out: dict[str, list[dict]] = {}
    for index in range(rounds):
        for name, row in live.one_round().items():
            out.setdefault(name, []).append(row)
            said = row.get("failed") or f"{row['gen_tps']:.2f} tok/s, prompt {row['prompt_tps']:.0f}"
            print(f"round {index + 1}: {name}: {said}", file=sys.stderr, flush=True)
    return out


def tables(results: ResultsFile, found: Mapping[str, list[dict]]) -> None:
    """What was measured, medians with the decode speed's range, and the papers' ratios."""
    title = "The contenders, medians of the rounds; range of tok/s"
    table = results.table("live-contenders", title, ["contender", COLUMNS["gen_tps"][0], "range", *(t for t, _ in list(COLUMNS.values())[1:])])
    for name, rows in found.items():
        good = [row for row in rows if "failed" not in row]
        if not good:
            table.row(name, rows[0]["failed"], *[""] * len(COLUMNS))
            continue
        cells = [form.format(statistics.median(row[key] for row in good)) if key in good[0] else "" for key, (_, form) in COLUMNS.items()]
        speeds = [row["gen_tps"] for row in good]
        table.row(name, cells[0], f"{min(speeds):.1f} to {max(speeds):.1f}", *cells[1:])
    ratios(
        results, "live", "Speed on this machine", *({name: [row.get(key) for row in rows] for name, rows in found.items()} for key in ("gen_tps", "prompt_tps"))
    )


def draw(found: Mapping[str, list[dict]], folder: Path) -> None:
    """Bars of decode speed with each round as a point, and the ratios of decoding, on a scale where halving is as far from 1 as doubling."""
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    speeds = {name: [row.get("gen_tps") for row in rows] for name, rows in found.items()}
    ended = {name: [x for x in values if x] for name, values in speeds.items() if any(values)}
    figure = Figure(figsize=(13, 0.28 * len(ended) + 1.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    for at, (name, values) in enumerate(reversed(ended.items())):
        left.barh(at, statistics.median(values), color="tab:orange" if name.startswith("stock") else "tab:blue")
        left.plot(values, [at] * len(values), "k.", markersize=4)
    left.set_yticks(range(len(ended)), list(reversed(ended)))
    left.set(xlabel="tokens per second, decode: median, and every round", title="Contenders")
    rows = [(f"{r.paper} {r.figure}: {r.fast} / {r.slow}", values) for r in reversed(RATIOS) if not r.prompt and (values := r.of_rounds(speeds))]
    for at, (_, values) in enumerate(rows):
        right.plot(values, [at] * len(values), "-", color="tab:gray")
        right.plot([statistics.median(values)], [at], "o", color="tab:blue")
    right.axvline(1, color="black", linewidth=0.8)
    right.set_xscale("log", base=2)
    right.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
    right.set_yticks(range(len(rows)), [title for title, _ in rows], fontsize=8)
    right.set(xlabel="times as fast: median and range", title="Ratios that the papers claim")
    for ending in ("png", "svg"):
        figure.savefig(folder / f"papers-live.{ending}", dpi=110)
