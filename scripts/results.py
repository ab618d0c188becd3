"""Measured tables: scripts write them as data with --json FILE, `make results` puts them on the pages. tests/build/test_docs.py checks that the pages are up to date.

A data file says what was run, where, when and at which commit, and holds the tables as they were printed:

    {"command": ..., "machine": ..., "date": ..., "commit": ..., "tables": [{"name": ..., "title": ..., "columns": [...], "rows": [[...], ...]}, ...]}

README.md and the pages of docs/ have blocks that begin with `<!-- results NAME -->` and end with `<!-- end of results -->`. What stands between is made
from docs/results/data/NAME.json; with `NAME:TABLE` from that one table, with `NAME+TABLE` from it and what was run: the others are data. `{COLUMN | ...}` after
that leaves out all other columns but the first. `models` and `reliability` gather rows from several data files. Two charts are drawn from the same data: the README's, and the one of
cache policies. Everything outside the blocks is written by hand.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "results" / "data"
IMAGES = ROOT / "docs" / "img"
STOCK = "stock llama.cpp"
BLOCK = re.compile(
    r"(<!-- results (?P<name>[\w-]+)(?:(?P<mark>[:+])(?P<table>[\w-]+))?(?: {(?P<columns>[^}]+)})? -->\n).*?(?P<end><!-- end of results -->\n)", re.DOTALL
)
HEAD = ("command", "machine", "date", "commit")
HELP = "Keep the tables as a data file for docs/results."


def machine() -> str:
    from moeoff.system.machine import machine_name  # `make results` runs without the package

    return f"{machine_name()}, Linux {platform.release()}"


def commit() -> str:
    """The commit that is run; "-dirty" if something of it was changed."""
    described = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return described.stdout.strip() or "unknown"


def command_line() -> str:
    """The command as it was typed, but for --json; of files only the names, since folders differ from machine to machine."""

    def short(argument: str) -> str:
        name, equals, value = argument.rpartition("=")
        return name + equals + Path(value).name if os.path.isabs(value) else argument

    typed = sys.argv[1:]
    if "--json" in typed:
        at = typed.index("--json")
        del typed[at : at + 2]
    program = Path(sys.argv[0]).resolve()
    return shlex.join(["python", f"scripts/{program.parent.name}/{program.name}", *map(short, typed)])


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """The median of the rounds, and their range where it is one."""
    middle, *ends = map(form.format, (statistics.median(values), min(values), max(values)))
    return middle if ends == [middle, middle] else f"{middle} ({ends[0]} to {ends[1]})"


class Table:
    """Rows of text under columns of text, each printed as Markdown when it is known."""

    def __init__(self, name: str, title: str, columns: Sequence[str]):
        self.name, self.title, self.columns, self.rows = name, title, list(columns), []
        print(f"\n**{title}**\n\n{_line(columns)}{_rule(columns)}", end="", flush=True)

    def row(self, *cells: str) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{self.name}: {len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(list(cells))
        print(_line(cells), end="", flush=True)


class ResultsFile:
    """The tables of one run of a script; a context manager that writes them if nothing was raised.

    Args:
        path: the data file, or None if nothing is to be kept.
    """

    def __init__(self, path: str | Path | None):
        self.path, self.tables = path, []

    def table(self, name: str, title: str, columns: Sequence[str]) -> Table:
        self.tables.append(Table(name, title, columns))
        return self.tables[-1]

    def __enter__(self) -> ResultsFile:
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None and self.path:
            head = (command_line(), machine(), datetime.date.today().isoformat(), commit())
            write(self.path, dict(zip(HEAD, head)) | {"tables": [vars(table) for table in self.tables]})


def write(path: str | Path, data: dict) -> None:
    """Writes a data file with each row on a line of its own: a new measurement then reads well as a diff."""

    def say(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    tables = []
    for table in data["tables"]:
        rows = ",\n".join(f"    {say(row)}" for row in table["rows"])
        fields = [f"{say(key)}: {say(table[key])}" for key in ("name", "title", "columns")]
        tables.append("  {" + ",\n   ".join([*fields, f'"rows": [\n{rows}\n   ]']) + "}")
    body = ",\n ".join([*(f"{say(key)}: {say(data[key])}" for key in HEAD), '"tables": [\n' + ",\n".join(tables) + "\n ]"])
    Path(path).write_text(f"{{\n {body}\n}}\n", encoding="utf-8")


def read(name: str) -> dict:
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _rule(columns: Sequence[str]) -> str:
    return f"|---|{'---:|' * (len(columns) - 1)}\n"


def markdown(table: dict) -> str:
    return _line(table["columns"]) + _rule(table["columns"]) + "".join(map(_line, table["rows"]))


def with_columns(table: dict, columns: str | None) -> dict:
    """The table with its first column and those named, as "A | B"; None: all of them."""
    if not columns:
        return table
    names = [name.strip() for name in columns.split("|")]
    places = [0, *(table["columns"].index(name) for name in names)]
    return table | {"columns": [table["columns"][i] for i in places], "rows": [[row[i] for i in places] for row in table["rows"]]}


def block(name: str, table: str | None, mark: str | None = ":", columns: str | None = None) -> str:
    """The text of a block: one table of a data file, with what was run if its mark is "+", or all of it; "models", "reliability": one row of each."""
    if name in GATHERED:
        return GATHERED[name]()
    data = read(name)
    tables = [with_columns(t, columns) for t in data["tables"] if table in (None, t["name"])]
    if table and mark == ":":
        return markdown(tables[0])
    said = f"Measured {data['date']}" + (f" at {data['commit']}" if "commit" in data else "") + f"; {data['machine']}"
    said += f":\n\n    {data['command']}\n" if "command" in data else ".\n"
    return said + "".join(f"\n**{t['title']}**\n\n{markdown(t)}" for t in tables)


SHAPES = {  # of docs/results/real-sizes.md: the model whose sizes it has, and 10^9 bytes of its file
    "real-qwen3": ("Qwen3-30B-A3B", 18.55),
    "real-gpt-oss": ("gpt-oss-20b", 12.10),
    "real-deepseek": ("DeepSeek-V2-Lite", 10.37),
    "real-gemma": ("gemma-4-26B-A4B", 17.03),
    "real-glm": ("GLM-4.5-Air", 60.35),
    "real-gpt-oss-120b": ("gpt-oss-120b", 63.37),
}
STOCK_IN_A_LIMIT = ("stock, memory map", "stock, memory map, plain kernels")  # for its repacked kernels the kernel may kill it


def _gib(limit: str) -> str:
    """ "6656 MiB" in GiB; other words stay."""
    n, _, unit = limit.partition(" ")
    return f"{int(n) / 1024:g} GiB" if unit == "MiB" else limit


def _said(data: dict, option: str) -> str:
    """The value of an option of the command."""
    return data["command"].partition(f"{option} ")[2].partition(" ")[0]


def decode_speeds(name: str) -> dict[str, dict[str, str]]:
    """Of what `speed.py memory` has measured: tokens per second of each contender, in each limit and with everything in memory."""
    table = next(t for t in read(name)["tables"] if t["name"] == "memory")
    column = table["columns"].index("tok/s")
    speeds: dict[str, dict[str, str]] = {}
    for row in table["rows"]:
        speeds.setdefault(row[0], {})[row[1]] = row[column]
    return speeds


def models_table() -> str:
    """Which model in how much memory at what speed."""
    rows = []
    for name, (model, size) in SHAPES.items():
        limit, speeds = next(iter(decode_speeds(name).items()))
        stock = next(speeds[contender] for contender in STOCK_IN_A_LIMIT if speeds.get(contender))
        rows.append([model, f"{size * 1e9 / 2**30:.1f} GiB", _gib(limit), speeds["auto"], _said(read(name), "--rounds"), stock])
    return markdown({"columns": ["model", "file", "memory", "moeoff, tok/s", "rounds", "llama.cpp, tok/s"], "rows": rows})


SCENARIOS = {  # of docs/results/reliability.md: what is done
    "nth-fault": "each call in turn fails: open, read, map, allocate, write, ...",
    "damaged": "damaged models, profiles, sidecars, plans, traces",
    "headers": "headers damaged in four ways",
    "beside": "damaged files beside a model",
    "objects": "an answer is interrupted, anywhere",
    "kill": "SIGKILL or SIGINT at a random moment",
    "disk": "disk trouble: slow, full, cut, replaced",
    "hostile-http": "hostile clients of a server",
    "soak": "two hours under load while the budget moves",
    "soak-interrupted": "the same, and half of the moves are interrupted",
}
CASES = ("faults", "files", "cases", "requests", "ended by SIGKILL", "by SIGINT", "had ended")  # columns that count them


def reliability_table() -> str:
    """How much of each scenario was run, and how much of it ended as it should not."""
    rows = []
    for name, what in SCENARIOS.items():
        data = read(name)
        lines = [dict(zip(t["columns"], row)) for t in data["tables"] if not t["name"].endswith("-kinds") for row in t["rows"]]
        n = sum(int(line[column]) for line in lines for column in CASES if column in line)
        wrong = sum(int(line.get("problems", line.get("wrong", 0))) + (line.get("held", "yes") != "yes") for line in lines)
        rows.append([what, f"{n or len(lines):,}", str(wrong), f"{data['date']}, {data['commit']}", f"[data](data/{name}.json)"])
    return markdown({"columns": ["scenario", "cases", "not as it must be", "measured", ""], "rows": rows})


GATHERED = {"models": models_table, "reliability": reliability_table}


FONT = 'font-family="sans-serif" font-size="14" fill="#6e7781"'  # its grey reads on white and on black


def chart(*names: str) -> str:
    """Decode speed of one model by memory limit and with all of it in memory, moeoff's and stock llama.cpp's."""
    bars = {"moeoff": (("auto", "lru"), "#2f81f7"), STOCK: ((*STOCK_IN_A_LIMIT, "stock, repacked kernels"), "#bf8700")}
    groups = {limit: speeds for name in names for limit, speeds in decode_speeds(name).items()}
    limits = sorted(groups, key=lambda limit: int(limit.split()[0]) if limit.endswith("MiB") else 1 << 30)
    cells = {bar: [next((groups[limit][c].split()[0] for c in of if groups[limit].get(c)), None) for limit in limits] for bar, (of, _) in bars.items()}
    scale = 400 / max(float(cell) for column in cells.values() for cell in column if cell)
    height = 60 + 50 * len(limits)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 {height}" width="680" height="{height}" role="img" {FONT}>',
        f"<title>Tokens per second while decoding, by memory limit: moeoff and {STOCK}</title>",
    ]
    for i, (bar, (_, colour)) in enumerate(bars.items()):
        out.append(f'<rect x="{200 + 110 * i}" y="12" width="14" height="14" fill="{colour}"/><text x="{220 + 110 * i}" y="24">{bar}</text>')
    out.append('<text x="190" y="24" text-anchor="end">memory limit</text><text x="670" y="24" text-anchor="end">tokens per second, decode</text>')
    for i, limit in enumerate(limits):
        top = 44 + 50 * i
        out.append(f'<text x="190" y="{top + 24}" text-anchor="end">{_gib(limit)}</text>')
        measured = [(cells[bar][i], colour) for bar, (_, colour) in bars.items() if cells[bar][i]]
        for j, (cell, colour) in enumerate(measured):
            y = top + 19 * j + (0 if len(measured) > 1 else 10)
            width = scale * float(cell)
            out.append(f'<rect x="200" y="{y}" width="{width:.1f}" height="16" fill="{colour}"/><text x="{206 + width:.1f}" y="{y + 13}">{cell}</text>')
    said = f"medians of {_said(read(names[0]), '--rounds')} rounds; {STOCK} was measured where it has a bar, in a limit once"
    return "\n".join([*out, f'<text x="200" y="{height - 14}" font-size="12">{said}</text>', "</svg>"]) + "\n"


def policies_chart(name: str, table: str, colours: dict[str, str]) -> str:
    """Hit rates of cache policies over the share of the experts in memory; cells begin with the hit rate."""
    data = next(t for t in read(name)["tables"] if t["name"] == table)
    rates = {row[0]: [float(cell.split()[0]) for cell in row[1:]] for row in data["rows"]}
    x = [60 + 5 * float(share.split()[0]) for share in data["columns"][1:]]
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 380" width="680" height="380" role="img" {FONT}>',
        f"<title>Hit rate by the share of the experts in memory: {', '.join(colours)}</title>",
    ]
    for rate in range(0, 101, 20):
        y = 340 - 3 * rate
        out.append(f'<path d="M60 {y}H530" stroke="#6e7781" stroke-opacity="0.3"/><text x="50" y="{y + 5}" text-anchor="end">{rate} %</text>')
    out.append('<text x="50" y="16" text-anchor="end">hits</text><text x="556" y="362">in memory</text>')
    out += [f'<text x="{at:g}" y="362" text-anchor="middle">{share}</text>' for at, share in zip(x, data["columns"][1:])]
    for i, (policy, colour) in enumerate(colours.items()):
        points = " ".join(f"{at:g},{340 - 3 * rate:g}" for at, rate in zip(x, rates[policy]))
        out.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>')
        out.append(f'<rect x="556" y="{60 + 26 * i}" width="14" height="14" fill="{colour}"/><text x="578" y="{72 + 26 * i}">{policy}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


POLICIES = {"belady": "#6e7781", "score": "#2f81f7", "lfu": "#1a7f37", "lru": "#bf8700", "edgemoe": "#8250df", "arc": "#cf222e"}


def pages() -> dict[Path, str]:
    """Every generated file and the text it should have."""
    made = {
        IMAGES / "speed.svg": chart("real-qwen3", "real-qwen3-budgets"),
        IMAGES / "policies.svg": policies_chart("cache-policies", "mixed", POLICIES),
    }
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        if BLOCK.search(text):
            made[page] = BLOCK.sub(lambda m: m[1] + "\n" + block(m["name"], m["table"], m["mark"], m["columns"]) + "\n" + m["end"], text)
    return made


if __name__ == "__main__":
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: made anew")
