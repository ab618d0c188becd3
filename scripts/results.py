"""Puts measured tables on the pages: `make results`. tests/test_docs.py checks that the pages are up to date.

README.md and the pages of docs/ have blocks that begin with `<!-- results NAME -->` and end with `<!-- end of results -->`. What
stands between is made from docs/results/data/NAME.json, which a benchmark writes with --json (scripts/bench/results_file.py):
the machine, the day, the command line and every table; with `NAME:TABLE` that one table alone. The README's chart is drawn
from the same data. Everything outside the blocks is written by hand.

A data file that is an array is what `moeoff bench -o json` has printed: it becomes a table of its single-token test, a line for each memory.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DATA = ROOT / "docs" / "results" / "data"
CHART = ROOT / "docs" / "img" / "speed.svg"
STOCK = "stock llama.cpp"
BLOCK = re.compile(r"(<!-- results (?P<name>[\w-]+)(?::(?P<table>[\w-]+))? -->\n).*?(<!-- end of results -->\n)", re.DOTALL)


def read(name: str) -> dict:
    data = json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))
    return bench_data(data) if isinstance(data, list) else data


def bench_data(rows: list[dict]) -> dict:
    """Rows of `moeoff bench` in the form of the other data files, without a command line, which they do not hold."""
    rows = [row for row in rows if row["n_gen"] and not row["n_prompt"]]
    strategies = list(dict.fromkeys(row["strategy"] for row in rows if row["strategy"] != STOCK))
    first = strategies[0]

    def cell(memory: int, strategy: str, key: str, form: str) -> str:
        row = next((row for row in rows if (row["memory"], row["strategy"]) == (memory, strategy)), None)
        return "" if row is None else (format(row[key], form) if row[key] is not None else row["error"])

    columns = ["memory", *(f"`{s}`: tok/s" for s in strategies), f"`{first}`: MB read per token", f"`{first}`: of ceiling", f"`{first}`: peak RSS, MiB"]
    lines = []
    for memory in sorted({row["memory"] for row in rows}, reverse=True):
        speeds = [cell(memory, s, "avg_ts", ".1f") for s in strategies]
        peak = next(row["peak_rss"] for row in rows if (row["memory"], row["strategy"]) == (memory, first))
        of = [cell(memory, first, "mb_per_token", ".0f"), cell(memory, first, "ceiling_share", ".0%"), f"{peak / 2**20:.0f}"]
        lines.append([f"{memory / 2**20:.0f} MiB", *speeds, *of, cell(memory, STOCK, "avg_ts", ".2f")])
    table = {"name": "summary", "title": "Decode speed and memory", "columns": [*columns, "stock llama.cpp: tok/s"], "rows": lines}
    return {"date": rows[0]["test_time"][:10], "machine": f"{rows[0]['n_threads']} cores of {rows[0]['cpu_info']}", "tables": [table]}


def markdown(table: dict) -> str:
    columns = table["columns"]
    head, *rows = (f"| {' | '.join(cells)} |\n" for cells in [columns, *table["rows"]])
    return f"{head}|---|{'---:|' * (len(columns) - 1)}\n{''.join(rows)}"


def block(name: str, table: str | None) -> str:
    """What stands in a block: one table of a data file, or all of it."""
    data = read(name)
    if table:
        return markdown(next(t for t in data["tables"] if t["name"] == table))
    said = f"Measured {data['date']}; {data['machine']}" + (f":\n\n    {data['command']}\n" if "command" in data else ".\n")
    return said + "".join(f"\n**{t['title']}**\n\n{markdown(t)}" for t in data["tables"])


def chart(data: dict) -> str:
    """Decode speed in each memory limit, moeoff beside stock llama.cpp. Its greys and colours read on white and on black."""
    table = next(t for t in data["tables"] if t["name"] == "summary")
    bars = {"moeoff": ("`auto`: tok/s", "#2f81f7"), "stock llama.cpp": ("stock llama.cpp: tok/s", "#bf8700")}
    series = {name: [_number(row[table["columns"].index(column)]) for row in table["rows"]] for name, (column, _) in bars.items()}
    scale = 400 / max(max(values) for values in series.values())
    height = 36 + 56 * len(table["rows"])
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 {height}" width="680" height="{height}" role="img" '
        'font-family="sans-serif" font-size="14" fill="#6e7781">',
        "<title>Tokens per second while decoding, by memory limit: moeoff and stock llama.cpp</title>",
    ]
    for i, (name, (_, colour)) in enumerate(bars.items()):
        out.append(f'<rect x="{200 + 110 * i}" y="12" width="14" height="14" fill="{colour}"/><text x="{220 + 110 * i}" y="24">{name}</text>')
    out.append('<text x="190" y="24" text-anchor="end">memory limit</text><text x="670" y="24" text-anchor="end">tokens per second, decode</text>')
    for i, row in enumerate(table["rows"]):
        top = 44 + 56 * i
        out.append(f'<text x="190" y="{top + 26}" text-anchor="end">{row[0]}</text>')
        for j, (name, (column, colour)) in enumerate(bars.items()):
            width, y = scale * series[name][i], top + 21 * j
            cell = row[table["columns"].index(column)]
            out.append(f'<rect x="200" y="{y}" width="{width:.1f}" height="18" fill="{colour}"/><text x="{206 + width:.1f}" y="{y + 14}">{cell}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _number(cell: str) -> float:
    """0 for a run that did not end."""
    try:
        return float(cell)
    except ValueError:
        return 0.0


def pages() -> dict[Path, str]:
    """Every generated file and the text it should have."""
    made = {CHART: chart(read("readme"))}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        filled = BLOCK.sub(lambda m: m[1] + "\n" + block(m["name"], m["table"]) + "\n" + m[4], text)
        if BLOCK.search(text):
            made[page] = filled
    return made


if __name__ == "__main__":
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: made anew")
