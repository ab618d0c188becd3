"""Tables and charts of the pages from measured data. Scripts write the data with
--json FILE, and `make results` puts the tables on the pages; tests/build/test_docs.py
checks that the pages are up to date.

A data file says what was run, where, when and at which commit, and holds the tables as
they were printed:

    {"command": ..., "machine": ..., "date": ..., "commit": ..., "paths": [...],
     "tables": [{"name": ..., "title": ..., "columns": [...], "rows": [[...], ...]},
     ...]}

"paths" are the parts of the repository that the figures depend on. A file whose paths
changed after its commit, or whose command this tree cannot run, is listed in `OLDER`;
tests/build/test_data.py checks that. If only names of scripts, subcommands or options
changed since, or an option is gone that did not change what was measured, "command" is
today's, and an additional field "run_as" is the command as it was typed.

README.md and the pages of docs/ have blocks that begin with `<!-- results NAME:TABLE
-->` and end with `<!-- end of results -->`. `make results` puts that table of
docs/results/data/NAME.json between the two. `{COLUMN | ...}` after the name leaves out
all other columns but the first. `models` and `reliability` gather rows from several
data files. The charts in docs/img are drawn from the same data. Everything outside the
blocks is written by hand.
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
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "docs" / "results" / "data"
IMAGES = ROOT / "docs" / "img"
BLOCK = re.compile(
    r"(<!-- results (?P<name>[\w-]+)(?::(?P<table>[\w-]+))?(?: {(?P<columns>[^}]+)})?"
    r" -->\n).*?(?P<end><!-- end of results -->\n)",
    re.DOTALL,
)
HEAD = ("command", "machine", "date", "commit", "paths")
STREAMING = ("moeoff/engine", "moeoff/policies", "llamacpp_patches/src/core")
KERNELS_OF = ("llamacpp_patches/src/ggml-cpu",)
SERVER = ("moeoff/server", "llamacpp_patches/src/server")
# what a script's figures depend on, and those of a command where they differ
PATHS: dict[str, tuple[str, ...]] = {
    "speed.py": STREAMING + KERNELS_OF,
    "speed.py kernels": KERNELS_OF,
    "routing.py": ("moeoff/policies",),
    "routing.py shapes": ("scripts/models/shape_model.py",),
    "needs.py": ("scripts/models/shape_model.py", "moeoff/budget"),
    "papers.py": (
        "moeoff/policies",
        *(
            f"scripts/papers/{name}.py"
            for name in ("baselines", "device_simulator", "paper_figures", "papers", "verdicts")
        ),
    ),
    "precision.py": (
        "moeoff/precision.py",
        "moeoff/measure/perplexity.py",
        "moeoff/measure/precision_search.py",
    ),
    "late_experts.py": ("moeoff/measure/perplexity.py",),
    "second_look.py": ("moeoff/policies/fate.py", "moeoff/policies/score.py"),
    "bench_server.py": SERVER + STREAMING + KERNELS_OF,
    "gpu_trial.py": (
        "moeoff/engine/device_tier.py",
        "llamacpp_patches/src/core/moeoff-device-tier.cpp",
    ),
    "micro.py": ("llamacpp_patches/src/core",),
    "micro.py kernels": KERNELS_OF,
    "micro.py attention": KERNELS_OF,
    "ray_cluster.py": ("moeoff/ray.py",),
    "soak.py": STREAMING,
    "faults.py": ("moeoff", "llamacpp_patches/src"),
    "faults.py http": SERVER,
    "faults.py advisories": ("scripts/faults/advisories.py",),
}
HELP = "Keep the tables as a data file for docs/results."

# Data files older than the code that they measure, by reason. An entry goes when its
# file is measured again; tests/build/test_data.py refuses new ones.
OLDER = {
    "Speed: the code changed since, and a new run needs an idle machine.": (
        "auto-lru gate-predictor "
        "limits-grown limits-qwen3 long-contexts-16k "
        "long-contexts-deepseek long-contexts-gpt-oss long-contexts-lending "
        "long-contexts-lending-6 long-contexts-xeon long-contexts-xeon-0 "
        "long-contexts-xeon-16k long-contexts-xeon-32k long-contexts-xeon-8k loss-live-1700 "
        "loss-live-400 real-deepseek real-flash real-gemma real-glm real-gpt-oss "
        "real-gpt-oss-120b real-qwen3 real-qwen3-32 real-qwen3-budgets "
        "real-qwen36 rows server-turns store "
        "store-switches time time-qwen3"
    ),
    "The code changed since; needs a GPU.": (
        "gpu-h200 gpu-h200-before gpu-h200-prompts gpu-h200-transfers"
    ),
    "Replays and losses that take hours; the code changed since.": (
        "answer-gemma-4-26b-a4b answer-gpt-oss-120b answer-qwen3-30b-a3b "
        "answer-qwen36-35b-a3b answer-qwen38-flash-next loss-contract"
    ),
    "The code changed since; make faults takes hours.": (
        "advisories damaged disk hostile-http kill nth-fault objects scale-events soak "
        "soak-interrupted"
    ),
}


def machine() -> str:
    from moeoff.system.machine import machine_name  # `make results` runs without the package

    return f"{machine_name()}, Linux {platform.release()}"


def commit() -> str:
    """Return the commit of this checkout, with "-dirty" if files differ from it."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return described.stdout.strip() or "unknown"


def command_line() -> str:
    """Return the command as it was typed, without --json and without folders, which
    differ from machine to machine.
    """

    def short(argument: str) -> str:
        name, equals, value = argument.rpartition("=")
        return name + equals + Path(value).name if os.path.isabs(value) else argument

    typed = sys.argv[1:]
    if "--json" in typed:
        at = typed.index("--json")
        del typed[at : at + 2]
    program = Path(sys.argv[0]).resolve()
    return shlex.join(
        ["python", f"scripts/{program.parent.name}/{program.name}", *map(short, typed)]
    )


def paths(command: str) -> list[str]:
    """Return the paths that the figures of a command depend on."""
    _, script, *arguments = shlex.split(command)
    name = Path(script).name
    return list(PATHS.get(" ".join((name, *arguments[:1])), PATHS.get(name, ("moeoff",))))


def n_rounds(data: dict) -> int | None:
    """Return the rounds of a data file by its command or a title, or None."""
    said = re.search(r"--rounds (\d+)", data["command"])
    titles = (re.search(r"(\d+) rounds", table["title"]) for table in data["tables"])
    said = said or next(filter(None, titles), None)
    return int(said[1]) if said else None


def spread(values: Sequence[float], form: str = "{:.2f}") -> str:
    """The median of the rounds, and their range where it is one."""
    middle, *ends = map(form.format, (statistics.median(values), min(values), max(values)))
    return middle if ends == [middle, middle] else f"{middle} ({ends[0]} to {ends[1]})"


def least_rounds(names: Iterable[str]) -> int:
    """Return the rounds of the data file that has the fewest."""
    return min(n_rounds(read(name)) or 0 for name in names)


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
    """The tables of one run of a script; a context manager that writes them if nothing
    was raised.

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
            command = command_line()
            head = (command, machine(), datetime.date.today().isoformat(), commit(), paths(command))
            write(
                self.path,
                dict(zip(HEAD, head)) | {"tables": [vars(table) for table in self.tables]},
            )


def write(path: str | Path, data: dict) -> None:
    """Write a data file with each row on its own line, so that a new measurement reads
    well as a diff.
    """

    def say(value: object) -> str:
        return json.dumps(value, ensure_ascii=False)

    tables = []
    for table in data["tables"]:
        rows = ",\n".join(f"    {say(row)}" for row in table["rows"])
        fields = [f"{say(key)}: {say(table[key])}" for key in ("name", "title", "columns")]
        tables.append("  {" + ",\n   ".join([*fields, f'"rows": [\n{rows}\n   ]']) + "}")
    body = ",\n ".join(
        [
            *(f"{say(key)}: {say(data[key])}" for key in (*HEAD, "run_as") if key in data),
            '"tables": [\n' + ",\n".join(tables) + "\n ]",
        ]
    )
    Path(path).write_text(f"{{\n {body}\n}}\n", encoding="utf-8")


def read(name: str) -> dict:
    return json.loads((DATA / f"{name}.json").read_text(encoding="utf-8"))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _rule(columns: Sequence[str], rows: Sequence[Sequence[str]] = ()) -> str:
    """Columns of numbers are set flush right."""
    return (
        "|---|"
        + "".join(
            "---:|" if all(re.match(r"[-+]?\d|$", row[i]) for row in rows) else "---|"
            for i in range(1, len(columns))
        )
        + "\n"
    )


def markdown(table: dict) -> str:
    return (
        _line(table["columns"])
        + _rule(table["columns"], table["rows"])
        + "".join(map(_line, table["rows"]))
    )


def table_of(name: str, table: str) -> dict:
    """Return a table of a data file."""
    return next(t for t in read(name)["tables"] if t["name"] == table)


def cells_by_column(name: str, table: str) -> dict[str, dict[str, str]]:
    """Return a table's cells by column and row."""
    shown = table_of(name, table)
    columns = zip(*(row[1:] for row in shown["rows"]))
    return {
        column: dict(zip((row[0] for row in shown["rows"]), cells))
        for column, cells in zip(shown["columns"][1:], columns)
    }


def with_columns(table: dict, columns: str | None) -> dict:
    """The table with its first column and those named, as "A | B"; None: all of them."""
    if not columns:
        return table
    names = [name.strip() for name in columns.split("|")]
    places = [0, *(table["columns"].index(name) for name in names)]
    return table | {
        "columns": [table["columns"][i] for i in places],
        "rows": [[row[i] for i in places] for row in table["rows"]],
    }


def block(name: str, table: str | None, columns: str | None = None) -> str:
    """Return the text of a block: a data file's table and command, or a gathered table."""
    if name in GATHERED:
        return markdown(with_columns(GATHERED[name](), columns))
    data, shown = read(name), with_columns(table_of(name, table), columns)
    note = rounds(n_rounds(data) or ENOUGH)
    rows = [[cell + note if " to " in cell else cell for cell in row] for row in shown["rows"]]
    renamed = "; written differently then" if "run_as" in data else ""
    table_text = markdown(shown | {"rows": rows})
    return f"{table_text}\n`{data['command']}` at {data['commit']}{renamed}\n"


TRACES, FIGURES, ASSUMED = "published traces", "two published figures", "not measured"
# of docs/results/real-sizes.md: model, 10^9 bytes of its file, and what its routing
# follows
SHAPES = {
    "limits-qwen3": ("Qwen3-30B-A3B", 18.55, TRACES),
    "real-qwen36": ("Qwen3.6-35B-A3B", 21.16, FIGURES),
    "real-gpt-oss": ("gpt-oss-20b", 12.10, ASSUMED),
    "real-deepseek": ("DeepSeek-V2-Lite", 10.37, ASSUMED),
    "real-gemma": ("gemma-4-26B-A4B", 17.03, TRACES),
    "real-glm": ("GLM-4.5-Air", 60.35, ASSUMED),
    "real-gpt-oss-120b": ("gpt-oss-120b", 63.37, TRACES),
}
DAYS = {  # of Qwen3-30B-A3B's shape in 6.5 GiB: each data file, and moeoff's row there
    "real-qwen3": "6656 MiB | auto",
    "long-contexts-lending": "behind 0 | moeoff in 6656 MiB",
    "gate-predictor": "6656 MiB | now",
    "time-qwen3": "6656 MiB | 6656 MiB",
    "limits-qwen3": "6656 MiB | auto",
}
ENOUGH = 5  # rounds; a cell with fewer says so
# for its repacked kernels the kernel may kill it
STOCK_IN_A_LIMIT = ("stock, memory map", "stock, memory map, plain kernels")


def _gib(limit: str) -> str:
    """ "6656 MiB" in GiB; other words stay."""
    n, _, unit = limit.partition(" ")
    return f"{int(n) / 1024:g} GiB" if unit == "MiB" else limit


def _numbers(cell: str) -> list[float]:
    """The median of the rounds, and their range where it is one."""
    return [float(number) for number in re.findall(r"[\d.]+", cell)]


def _said(data: dict, option: str) -> str:
    """The value of an option of the command."""
    return data["command"].partition(f"{option} ")[2].partition(" ")[0]


def by_contender(name: str, column: str = "tok/s") -> dict[str, dict[str, str]]:
    """A column of what `speed.py` has measured: the cell of each contender, for each
    limit or depth; where the table has neither, for the data file.
    """
    table = read(name)["tables"][0]
    at, contender = (table["columns"].index(column) for column in (column, "contender"))
    cells: dict[str, dict[str, str]] = {}
    for row in table["rows"]:
        cells.setdefault(row[0] if contender else name, {})[row[contender]] = row[at]
    return cells


def _ratio_to_stock(name: str) -> float | None:
    """Return the median of the rounds' ratios to llama.cpp's memory map, if measured."""
    for table in read(name)["tables"]:
        if table["name"] == "shares":
            column = table["columns"].index("times llama.cpp's memory map")
            return _numbers(table["rows"][0][column])[0]
    return None


def models_table() -> dict:
    """Return models with their memory limits and speeds."""
    rows = []
    for name, (model, size, routing) in SHAPES.items():
        limit, speeds = next(iter(by_contender(name).items()))
        contender = next(filter(speeds.get, STOCK_IN_A_LIMIT))
        stock, prompts = speeds[contender], by_contender(name, "prompt tok/s")[limit]
        prompt, ours = prompts["auto"], [speeds["auto"]]
        ours.append(by_contender(name, "MB/token")[limit]["auto"])
        n_prompt = int(_said(read(name), "--n-prompt") or 64)
        first, *range_ = (f"{n_prompt / rate:.2f}" for rate in _numbers(prompt))
        ours.append(first + (f" ({range_[1]} to {range_[0]})" if range_ else ""))
        times = f"{_ratio_to_stock(name) or _numbers(ours[0])[0] / _numbers(stock)[0]:.0f}"
        n = int(_said(read(name), "--rounds"))
        ours[0] += rounds(n)
        file = f"{size * 1e9 / 2**30:.1f} GiB"
        # two digits may be alike in every round, a prompt's are not
        stock += rounds(n if " to " in stock + prompts[contender] else 1)
        rows.append([model, file, routing, _gib(limit), *ours, stock, times])
    columns = ["model", "file", "routing", "memory", "moeoff, tok/s", "MB/token", "first token s"]
    columns += ["llama.cpp, tok/s", "times llama.cpp"]
    return {"columns": columns, "rows": rows}


def rounds(n: int) -> str:
    """Return the note of a cell with too few rounds."""
    return "" if n >= ENOUGH else f", {n} round{'s' * (n > 1)}"


def days_table() -> dict:
    """Return one shape's speed in one memory limit by day, and its share of the speed
    in memory.
    """
    rows = []
    for name, row in DAYS.items():
        data, (group, contender) = read(name), row.split(" | ")
        in_memory = by_contender(name).get("all in memory", {})
        ours = by_contender(name)[group][contender]
        own = in_memory.get("lru") or in_memory.get("all in memory", "")
        whole = [own, in_memory.get("stock, repacked kernels", "")]
        shares = [f"{_numbers(ours)[0] / _numbers(cell)[0]:.0%}" if cell else "" for cell in whole]
        ours, link = ours + rounds(n_rounds(data) or 0), f"[data](data/{name}.json)"
        rows.append([data["date"], data["machine"].split(",")[0], ours, *shares, link])
    columns = ["date", "machine", "moeoff, tok/s"]
    columns += ["of moeoff in memory", "of llama.cpp in memory", ""]
    return {"columns": columns, "rows": rows}


SCENARIOS = {  # of docs/results/reliability.md: what is done
    "nth-fault": "each call in turn fails: open, read, map, allocate, write, ...",
    "damaged": "damaged models, and damaged files beside a model",
    "objects": "an answer is interrupted, anywhere",
    "kill": "SIGKILL or SIGINT at a random moment",
    "disk": "disk trouble: slow, full, cut, replaced",
    "hostile-http": "hostile clients of a server, one round",
    "soak": "two hours under load while the budget moves",
    "soak-interrupted": "150 minutes likewise, two of three moves interrupted",
}
# columns that count them
CASES = ("faults", "files", "cases", "requests", "ended by SIGKILL", "by SIGINT")


def reliability_table() -> dict:
    """Return the cases and failures of each scenario."""
    rows = []
    for name, what in SCENARIOS.items():
        data = read(name)
        lines = [
            dict(zip(t["columns"], row))
            for t in data["tables"]
            if not t["name"].endswith("-kinds")
            for row in t["rows"]
        ]
        n = sum(int(line[column]) for line in lines for column in CASES if column in line)
        wrong = sum(
            int(line.get("problems", line.get("wrong", 0))) + (line.get("held", "yes") != "yes")
            for line in lines
        )
        rows.append(
            [
                what,
                f"{n or len(lines):,}",
                str(wrong),
                f"{data['date']}, {data['commit']}",
                f"[data](data/{name}.json)",
            ]
        )
    return {"columns": ["scenario", "cases", "not as it must be", "measured", ""], "rows": rows}


def known_table() -> dict:
    """Return what models need by their published names, and what was measured of them."""
    measured = {row[0]: row for row in models_table()["rows"]}
    rows = []
    for name, file, *sizes in table_of("needs", "needs")["rows"]:
        least, _, half, _ = (f"{int(size) / 1024:.1f} GiB" for size in sizes)
        row = measured.get(name)
        speed = (
            [re.sub(r"^([\d.]+)( \(.*\))?", rf"\1 in {row[3]}", row[4]), row[-2]]
            if row
            else ["", ""]
        )
        rows.append([name, f"{file} GiB", least, half, *speed])
    columns = ["model", "file", "least memory", "with half of the experts"]
    return {"columns": [*columns, "moeoff, tok/s", "llama.cpp there, tok/s"], "rows": rows}


def kernels_table(models: Mapping[str, str]) -> dict:
    """Return the speed with everything in memory, by model.

    Args:
        models: Names of models by data file.
    """
    contenders = {
        "llama.cpp": "stock, repacked kernels",
        "--no-repack": "stock, plain kernels",
        "moeoff": "moeoff",
    }
    rows = []
    for name, model in models.items():
        cells = [by_contender(name, column)[name] for column in ("tok/s", "prompt tok/s")]
        note = rounds(n_rounds(read(name)) or ENOUGH)
        named = [group[contender] + note for group in cells for contender in contenders.values()]
        rows.append([model, *named, read(name)["date"]])
    return {
        "columns": ["model", *contenders, *(f"prompt, {name}" for name in contenders), "date"],
        "rows": rows,
    }


GATHERED = {
    "models": models_table,
    "known": known_table,
    "kernels": lambda: kernels_table(KERNELS),
    "kernels-avx2": lambda: kernels_table(KERNELS_AVX2),
    "days": days_table,
    "reliability": reliability_table,
}


# that read on white and on black
GREY, BLUE, GOLD, MAUVE = "#6e7781", "#2f81f7", "#bf8700", "#8250df"
FONT = f'font-family="sans-serif" font-size="14" fill="{GREY}"'
# what the names of the data files of long contexts end with, by depth
DEPTHS = ("-0", "", "-8k", "-16k", "-32k")
KERNELS = {  # Models of docs/results/kernels.md by data file.
    "kernels-grown": "demo model, grown",
    "kernels-gpt-oss-20b": "gpt-oss-20b",
    "kernels-deepseek-v2-lite": "DeepSeek-V2-Lite",
    "kernels-qwen3-30b-a3b": "Qwen3-30B-A3B",
}
KERNELS_AVX2 = {
    "kernels-grown-avx2": "demo model, grown",
    "kernels-gpt-oss-20b-avx2": "gpt-oss-20b, 6 of 24 layers",
    "kernels-qwen3-30b-a3b-avx2": "Qwen3-30B-A3B, 6 of 48 layers",
}
GREEN, RED = "#1a7f37", "#cf222e"
POLICIES = {  # Rows of published-traces.json.
    "belady": (GREY, ("belady",)),
    "score": (BLUE, ("score",)),
    "lfu": (GREEN, ("lfu",)),
    "lru": (GOLD, ("lru",)),
    "edgemoe": (MAUVE, ("edgemoe",)),
    "arc": (RED, ("arc",)),
}
PUBLISHED = ("qwen3-30b-a3b", "gemma-4-26b-a4b", "gpt-oss-120b")  # tables of published-traces.json


Panels = dict[str, dict[str, dict[str, str]]]
Named = dict[str, tuple[str, tuple[str, ...]]]


def key(named: Named, x: int = 10) -> list[str]:
    """Return the key of a chart, at its top."""
    out = []
    for name, (colour, _) in named.items():
        out.append(
            f'<rect x="{x}" y="8" width="14" height="14" fill="{colour}"/><text x="{x + 20}"'
            f' y="20">{name}</text>'
        )
        x += 44 + 7 * len(name)
    return out


def head(width: int, height: int, title: str) -> list[str]:
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" {FONT}>',
        f"<title>{title}</title>",
    ]


def bars(title: str, side: str, named: Named, panels: Panels, note: str) -> str:
    """Medians as bars, and the range of the rounds as a line.

    Args:
        named: of each bar its colour and the contenders that it stands for, of which
            the first that was measured is drawn.
        panels: by unit, the groups of bars; of each the contenders' cells.
    """
    groups, step, room = list(next(iter(panels.values()))), 19 * len(named) + 12, 450 // len(panels)
    height = 86 + step * len(groups)
    out = [*head(600, height, title), *key(named)]
    for y, text in [
        (48, side),
        *((59 + step * (i + 0.5), group) for i, group in enumerate(groups)),
    ]:
        out.append(f'<text x="140" y="{y:g}" text-anchor="end">{text}</text>')
    for left, (unit, cells) in zip(range(150, 600, room), panels.items()):
        out.append(f'<text x="{left}" y="48">{unit}</text>')
        drawn = [
            [
                (colour, next(filter(None, map(cells[group].get, of)), ""))
                for colour, of in named.values()
            ]
            for group in groups
        ]
        scale = (room - 60) / max(
            number for group in drawn for _, cell in group for number in _numbers(cell)
        )
        for i, group in enumerate(drawn):
            measured = [(colour, cell) for colour, cell in group if cell]
            for j, (colour, cell) in enumerate(measured):
                y = 58 + step * i + 19 * (j + (len(group) - len(measured)) / 2)
                at, low, high = (
                    left + scale * end(_numbers(cell)) for end in (statistics.median, min, max)
                )
                out.append(
                    f'<rect x="{left}" y="{y:g}" width="{at - left:.1f}" height="16"'
                    f' fill="{colour}"/>'
                )
                if low < high:
                    out.append(
                        f'<path d="M{low:.1f} {y + 8:g}H{at:.1f}" stroke="#fff"/><path d="M{at:.1f}'
                        f' {y + 8:g}H{high:.1f}" stroke="{GREY}"/>'
                    )
                out.append(f'<text x="{high + 6:.1f}" y="{y + 13:g}">{cell.split()[0]}</text>')
    return (
        "\n".join([*out, f'<text x="10" y="{height - 10}" font-size="12">{note}</text>', "</svg>"])
        + "\n"
    )


def curves(title: str, side: str, named: Named, panels: Panels, note: str) -> str:
    """Medians as lines over the number in each group's name, and the range of the
    rounds.

    Args:
        side: Unit of those numbers.
        named, panels: As for `bars`.
    """
    width, left = 700, 36
    room = width // len(panels)
    out = [*head(width, 330, title), *key(named)]
    for i, (unit, cells) in enumerate(panels.items()):
        x0, x1 = i * room + left, (i + 1) * room - 24
        places = [_numbers(group.replace(",", ""))[0] for group in cells]
        most = max(
            number
            for group in cells.values()
            for of in named.values()
            for name in of[1]
            for number in _numbers(group.get(name, ""))
        )
        step = next(step for step in (1, 2, 5, 10, 20, 50, 100) if most / step <= 6)

        def at(place: float, ends: tuple[int, int] = (x0, x1), most: float = places[-1]) -> float:
            return ends[0] + (ends[1] - ends[0]) * place / most

        def up(value: float, top: float = step * -(-most // step)) -> float:
            return 270 - 200 * value / top

        out.append(f'<text x="{x0}" y="54">{unit}</text>')
        for value in range(0, int(step * -(-most // step)) + 1, step):
            line = f'<path d="M{x0} {up(value):g}H{x1}" stroke="{GREY}" stroke-opacity="0.3"/>'
            out.append(
                f'{line}<text x="{x0 - 5}" y="{up(value) + 5:g}" text-anchor="end"'
                f' font-size="12">{value}</text>'
            )
        for place in places:
            if place in places[:1] or place > places[-1] / 8:
                out.append(
                    f'<text x="{at(place):.0f}" y="288" text-anchor="middle"'
                    f' font-size="12">{place:,.0f}</text>'
                )
        for colour, of in named.values():
            drawn = [
                (at(place), _numbers(cell))
                for place, group in zip(places, cells.values())
                if (cell := next(filter(None, map(group.get, of)), ""))
            ]
            points = " ".join(f"{x:.1f},{up(numbers[0]):.1f}" for x, numbers in drawn)
            out.append(
                f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2.5"/>'
            )
            out += [
                f'<path d="M{x:.1f} {up(min(n)):.1f}V{up(max(n)):.1f}" stroke="{colour}"/>'
                for x, n in drawn
                if len(n) > 1
            ]
        out.append(
            f'<text x="{(x0 + x1) / 2:.0f}" y="306" text-anchor="middle"'
            f' font-size="12">{side}</text>'
        )
    return "\n".join([*out, f'<text x="10" y="324" font-size="12">{note}</text>', "</svg>"]) + "\n"


def parts_chart(title: str, parts: dict[str, float]) -> str:
    """Return one bar that is divided into named parts, in MiB, with a key below."""
    width, total, x = 660, sum(parts.values()), 10.0
    out = [*head(680, 60 + 22 * -(-len(parts) // 2), title), f'<text x="10" y="18">{title}</text>']
    for i, (colour, (part, size)) in enumerate(
        zip((GREY, MAUVE, GOLD, RED, GREEN, BLUE), parts.items())
    ):
        out.append(
            f'<rect x="{x:.1f}" y="28" width="{max(width * size / total, 1.5):.1f}" height="26"'
            f' fill="{colour}"/>'
        )
        x += width * size / total
        left, y = 10 + 330 * (i % 2), 66 + 22 * (i // 2)
        out.append(
            f'<rect x="{left}" y="{y}" width="14" height="14" fill="{colour}"/><text'
            f' x="{left + 20}" y="{y + 12}">{part}, {size:,.0f} MiB</text>'
        )
    return "\n".join([*out, "</svg>"]) + "\n"


def charts() -> dict[str, str]:
    """The text of each chart."""
    units = {"decode, tokens/s": "tok/s", "prompt, tokens/s": "prompt tok/s"}
    ours, stock = (BLUE, ("moeoff", "auto", "lru")), ("stock", "stock, repacked kernels")
    speeds = by_contender("real-qwen3-budgets") | by_contender("real-qwen3")
    limits = sorted(
        speeds, key=lambda limit: int(limit.split()[0]) if limit.endswith("MiB") else 1 << 30
    )
    disks = {"400 MB/s": "loss-live-400", "1.7 GB/s": "loss-live-1700"}
    left, lent = (
        by_contender("long-contexts-lending-6", "experts in memory"),
        by_contender("long-contexts-lending-6"),
    )
    day = read("real-qwen3")
    host = day["machine"].split(",")[0]
    rounds_said = f"medians and ranges of {n_rounds(day)} rounds"
    needed = table_of("needs", "parts")
    limited = next(
        name for cells in lent.values() for name in cells if name.startswith("moeoff in ")
    )
    return {
        "speed": bars(
            "Decode speed by memory limit",
            "memory limit",
            {"moeoff": ours, "llama.cpp": (GOLD, (*STOCK_IN_A_LIMIT, *stock))},
            {"decode, tokens/s": {_gib(limit): speeds[limit] for limit in limits}},
            f"{host}, {day['date']}: {rounds_said}; llama.cpp in 6.5 GiB: 1 round",
        ),
        "long-contexts": curves(
            "Speed by context depth",
            "tokens in the context",
            {
                "llama.cpp": (GOLD, stock),
                "llama.cpp -fa off": (GREY, ("stock, -fa off",)),
                "moeoff": ours,
                "moeoff --attention f32": (MAUVE, ("moeoff, f32",)),
            },
            {
                unit: {
                    k: row
                    for depth in DEPTHS
                    for k, row in by_contender(f"long-contexts-xeon{depth}", column).items()
                }
                for unit, column in units.items()
            },
            "medians and ranges of 3 rounds, up to 4,096 of 5",
        ),
        "long-contexts-lending": bars(
            "Experts in memory and decode speed by context depth",
            "context",
            {f"moeoff in {_gib(limited.removeprefix('moeoff in '))}": (BLUE, (limited,))},
            {"experts in memory": left, "decode, tokens/s": lent},
            "medians of the rounds, and the range of their speeds",
        ),
        "loss": bars(
            "Decode speed with a loss budget, and lossless",
            "disk, memory",
            {"lossless": ours, "--max-loss 1%": (MAUVE, ("auto, --max-loss 1%",))},
            {
                "decode, tokens/s": {
                    f"{disk}, {limit}": cells
                    for disk, name in disks.items()
                    for limit, cells in by_contender(name).items()
                }
            },
            f"medians and ranges of {least_rounds(disks.values())} rounds",
        ),
        "policies": curves(
            "Hit rate of cache policies in published answers",
            "% of the experts in memory",
            POLICIES,
            {
                f"hits in %, {table}": cells_by_column("published-traces", table)
                for table in PUBLISHED
            },
            "one prompt and answer each, replayed from an empty cache",
        ),
        "memory": parts_chart(
            needed["title"], {part: float(size) for part, size in needed["rows"]}
        ),
    }


def pages() -> dict[Path, str]:
    """Every generated file and the text it should have."""
    made = {IMAGES / f"{name}.svg": text for name, text in charts().items()}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        if BLOCK.search(text):
            made[page] = BLOCK.sub(
                lambda m: (
                    m[1] + "\n" + block(m["name"], m["table"], m["columns"]) + "\n" + m["end"]
                ),
                text,
            )
    return made


if __name__ == "__main__":
    for path, text in pages().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"{path.relative_to(ROOT)}: made anew")
