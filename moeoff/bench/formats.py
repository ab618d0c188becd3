"""Rows as text: a Markdown table for people, and csv, json, jsonl and sql for programs, as llama-bench has them."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from typing import Any, Protocol

from ..memory import format_size
from .row import Row

_LISTS = ("samples_ns", "samples_ts")
_NAMES = [f.name for f in fields(Row) if f.name not in _LISTS]
TABLE = "moeoff_bench"


class Format(Protocol):
    """Writes rows as they come."""

    def begin(self) -> str: ...

    def rows(self, rows: list[Row]) -> str:
        """Of one configuration."""
        ...

    def end(self) -> str: ...


class Json:
    """One array."""

    def __init__(self) -> None:
        self._first = True

    def begin(self) -> str:
        return "[\n"

    def rows(self, rows: list[Row]) -> str:
        out = ""
        for row in rows:
            out += ("" if self._first else ",\n") + json.dumps(asdict(row), indent=2)
            self._first = False
        return out

    def end(self) -> str:
        return "\n]\n"


class JsonLines:
    def begin(self) -> str:
        return ""

    def rows(self, rows: list[Row]) -> str:
        return "".join(json.dumps(asdict(row)) + "\n" for row in rows)

    def end(self) -> str:
        return ""


class Csv:
    def begin(self) -> str:
        return _csv([_NAMES])

    def rows(self, rows: list[Row]) -> str:
        return _csv([["" if (value := getattr(row, name)) is None else value for name in _NAMES] for row in rows])

    def end(self) -> str:
        return ""


def _csv(lines: Iterable[Iterable[Any]]) -> str:
    out = io.StringIO()
    csv.writer(out, quoting=csv.QUOTE_NONNUMERIC, lineterminator="\n").writerows(lines)
    return out.getvalue()


class Sql:
    """For sqlite3 and its like: a table, made if it is not there, and an INSERT for each row."""

    def begin(self) -> str:
        kinds = {"int": "INTEGER", "int | None": "INTEGER", "float | None": "REAL", "bool": "INTEGER"}
        columns = ",\n  ".join(f"{f.name} {kinds.get(str(f.type), 'TEXT')}" for f in fields(Row) if f.name in _NAMES)
        return f"CREATE TABLE IF NOT EXISTS {TABLE} (\n  {columns}\n);\n\n"

    def rows(self, rows: list[Row]) -> str:
        return "".join(f"INSERT INTO {TABLE} ({', '.join(_NAMES)}) VALUES ({', '.join(_literal(getattr(row, name)) for name in _NAMES)});\n" for row in rows)

    def end(self) -> str:
        return ""


def _literal(value: object) -> str:
    if value is None:
        return "NULL"
    if isinstance(value, (bool, int, float)):
        return repr(int(value) if isinstance(value, bool) else value)
    return "'" + str(value).replace("'", "''") + "'"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _speed(row: Row) -> str:
    if row.avg_ts is None:
        return "-"
    digits = 2 if row.avg_ts < 1000 else 1
    return f"{row.avg_ts:.{digits}f} ± {row.stddev_ts:.{digits}f}"


# (title, width, value); a negative width aligns to the left, as in llama-bench
_ALWAYS: list[tuple[str, int, Callable[[Row], str]]] = [
    ("model", -24, lambda r: r.model_type),
    ("size", 10, lambda r: format_size(r.model_size)),
    ("params", 9, lambda r: f"{r.model_n_params / 1e9:.2f} B"),
    ("threads", 7, lambda r: str(r.n_threads)),
    ("memory", 10, lambda r: format_size(r.memory) if r.memory else "no limit"),
    ("strategy", -15, lambda r: r.strategy),
]
_IF_VARIED: list[tuple[str, int, Callable[[Row], str]]] = [
    ("n_batch", 7, lambda r: str(r.n_batch or "")),
    ("n_ubatch", 8, lambda r: str(r.n_ubatch or "")),
    ("type_k", 6, lambda r: r.type_k),
    ("type_v", 6, lambda r: r.type_v),
    ("flash_attn", 10, lambda r: str(int(r.flash_attn))),
    ("n_gpu_layers", 12, lambda r: str(r.n_gpu_layers)),
    ("vram", 6, lambda r: r.vram),
    ("vram_mode", 11, lambda r: r.vram_mode),
    ("on GPU", 7, lambda r: _percent(r.device_hit_rate)),
    ("n_lanes", 7, lambda r: str(r.n_lanes or "")),
]
_RESULTS: list[tuple[str, int, Callable[[Row], str]]] = [
    ("test", 14, lambda r: r.test),
    ("t/s", 16, _speed),
    ("MB/token", 8, lambda r: "" if r.mb_per_token is None else f"{r.mb_per_token:.1f}"),
    ("hit rate", 8, lambda r: _percent(r.hit_rate)),
    ("stalled", 7, lambda r: _percent(r.stall_share)),
    ("disk MB/s", 9, lambda r: "" if r.disk_mb_s is None else f"{r.disk_mb_s:.0f}"),
    ("of ceiling", 10, lambda r: _percent(r.ceiling_share)),
    ("peak RSS", 9, lambda r: "" if r.peak_rss is None else format_size(r.peak_rss)),
]


class Markdown:
    """llama-bench's table, a configuration's lines as soon as it is done, and below it how each ran.

    Args:
        varied: options with several values, or that were given: they have columns of their own.
    """

    def __init__(self, varied: Iterable[str] = ()):
        chosen = set(varied)
        self._columns = [*_ALWAYS, *(column for column in _IF_VARIED if column[0] in chosen or (column[0] == "on GPU" and "vram" in chosen)), *_RESULTS]
        self._notes: list[str] = []

    def begin(self) -> str:
        titles = [_cell(title, width) for title, width, _ in self._columns]
        rules = ["-" * (abs(width) + 1) + (":" if width > 0 else "-") for _, width, _ in self._columns]
        return f"| {' | '.join(titles)} |\n|{'|'.join(rules)}|\n"

    def rows(self, rows: list[Row]) -> str:
        out = ""
        for row in rows:
            out += f"| {' | '.join(_cell(value(row), width) for _, width, value in self._columns)} |\n"
            if row.error and not any(row.error in note for note in self._notes[-len(rows) :]):
                self._notes.append(f"{_title(row)}, {row.test}: {row.error}")
        if rows and rows[0].mode:
            self._notes.append(f"mode: {_title(rows[0])}: {rows[0].mode}")
        return out

    def end(self) -> str:
        return "\n" + "".join(f"{note}\n" for note in self._notes)


def _title(row: Row) -> str:
    return f"{row.strategy}, {format_size(row.memory)}" if row.memory else row.strategy


def _cell(text: str, width: int) -> str:
    return text.ljust(-width) if width < 0 else text.rjust(width)


FORMATS = ("md", "csv", "json", "jsonl", "sql")


def format_named(name: str, varied: Iterable[str] = ()) -> Format:
    """One of FORMATS."""
    made: dict[str, Callable[[], Format]] = {"md": lambda: Markdown(varied), "csv": Csv, "json": Json, "jsonl": JsonLines, "sql": Sql}
    return made[name]()
