"""Route traces: text files (version 1) in which other programs say which experts each layer's router chose. docs/reference/trace.md has the rows.

They name the chosen experts and their weights, and nothing of the others: no probabilities, no gate inputs, no tokens.
"""

from __future__ import annotations

import gzip
import io
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from io import BufferedIOBase
from typing import NamedTuple, cast

import numpy as np

from ..errors import OptionError
from ..files import open_file
from ..gate_event import GateEvent
from ..memory import available, format_size, rss
from ..trace import TensorInfo, Trace, TraceHeader

__all__ = ["read_trace"]

_FIRST_LINE = b"# route_trace "
_GZIP = b"\x1f\x8b"
_COLUMNS = ["turn", "phase", "step", "layer", "slot", "expert", "weight", "residency", "expert_bytes"]
_PROMPT, _ANSWER = 0, 1  # phases
_LARGEST = 1 << 16  # layers, experts, and experts of a token
_LARGEST_SLICE = 1 << 40  # bytes
_LONGEST_LINE = 1 << 13  # bytes; a fact may be a path
_LONGEST_FACTS = 1 << 20  # bytes; more than 512 layers, as many as llama.cpp reads, have no use for
_EVENT, _ROW, _CHOICE = 1536, 256, 16  # bytes of memory, of an event, a row until its event is whole, and then


class _Row(NamedTuple):
    """The fields of a line that are read. turn and step name a token; residency is 1 where the expert was in memory."""

    turn: int
    phase: int
    step: int
    layer: int
    slot: int
    expert: int
    weight: float
    residency: int


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """A trace of moeoff, or a route trace (.csv, .csv.gz): what is in the file decides, not its name.

    Rows of a prompt's tokens that follow each other are a batch, as the recorded run had it. All turns are one text. An expert is one slice, of the
    bytes that the file gives for its layer; `n_hit` and `n_miss` are what the recorded run had.

    Raises:
        OptionError: it cannot be read, or is neither, or is damaged, or takes more memory than is free. A last event that was cut is left out.
    """
    name = os.fspath(path)
    try:
        with open_file(path) as raw, io.BufferedReader(cast(io.RawIOBase, raw)) as file:
            begin = file.read(len(_FIRST_LINE))
            file.seek(0)
            if begin.startswith(_GZIP):
                with gzip.open(file, "rb") as packed:
                    if packed.read(len(_FIRST_LINE)) != _FIRST_LINE:
                        raise OptionError(f"{name}: is no route trace")
                    packed.seek(0)
                    return _read(name, _lines(name, packed))
            if begin == _FIRST_LINE:
                return _read(name, _lines(name, file))
    except (EOFError, zlib.error, gzip.BadGzipFile):
        raise OptionError(f"{name}: cannot be read: its compressed data is cut or damaged") from None
    except OSError as error:
        raise OptionError(f"{name}: cannot be read: {error.strerror or error}") from None
    return Trace.read(path)


def _lines(name: str, file: BufferedIOBase) -> Iterator[bytes]:
    """A line after the other, of bounded length: a packed file of a few kB may hold one of GB."""
    while line := file.readline(_LONGEST_LINE + 1):
        if len(line) > _LONGEST_LINE:
            raise OptionError(f"{name}: has a line of more than {_LONGEST_LINE} bytes")
        yield line


def _read(name: str, lines: Iterator[bytes]) -> Trace:
    try:
        facts, n_line = _facts(name, lines)
        model = _header(name, facts)
        events = list(_events(name, lines, n_line, model))
    except UnicodeDecodeError:
        raise OptionError(f"{name}: is no text") from None
    starts = np.zeros(len(events), bool)
    starts[:1] = True
    return Trace(model, events, starts)


def _facts(name: str, lines: Iterator[bytes]) -> tuple[list[dict[str, str]], int]:
    """The lines of facts, and which line of the file the rows' heading was."""
    facts: list[dict[str, str]] = []
    length = 0
    for n_line, line in enumerate(lines, 1):
        length += len(line)
        if length > _LONGEST_FACTS:
            raise OptionError(f"{name}: has more than {format_size(_LONGEST_FACTS)} of facts")
        text = line.decode().strip()
        if n_line == 1:
            version = text.removeprefix(_FIRST_LINE.decode())
            if version != "v1":
                raise OptionError(f"{name}: is a route trace of version {version!r}, this moeoff reads v1")
        elif text.startswith("#"):
            # a path may have blanks: a fact ends where the next one begins
            found = (part.partition("=") for part in re.split(r"(?<!\s)\s+(?=\w+=)", text.lstrip("# ")))
            facts.append({key: value for key, equals, value in found if equals})
        elif text.split(",") == _COLUMNS:
            return facts, n_line
        else:
            raise OptionError(f"{name}: line {n_line}: expected the columns {','.join(_COLUMNS)}, found {text[:60]!r}")
    raise OptionError(f"{name}: has no rows")


def _header(name: str, facts: list[dict[str, str]]) -> TraceHeader:
    def number(fields: dict[str, str], key: str, least: int, most: int) -> int:
        text = fields.get(key, "")
        if not (text.isascii() and text.isdigit() and least <= int(text[:20]) <= most):
            raise OptionError(f"{name}: the facts say {key}={text[:20]!r}, expected a number from {least} to {most}")
        return int(text)

    model = next((fields for fields in facts if "n_expert" in fields), None)
    if model is None:
        raise OptionError(f"{name}: no line of facts has n_expert")
    n_layer, n_expert = number(model, "n_layer", 1, _LARGEST), number(model, "n_expert", 1, _LARGEST)
    n_used = number(model, "n_expert_used", 1, n_expert)
    sizes = {number(f, "layer", 0, n_layer - 1): number(f, "expert_bytes", 0, _LARGEST_SLICE) for f in facts if "expert_bytes" in f}
    layers = sorted(layer for layer, size in sizes.items() if size)  # the others have no experts
    if not layers:
        raise OptionError(f"{name}: no layer has experts")
    tensors = tuple(TensorInfo(gate, layer, 0, n_expert, sizes[layer]) for gate, layer in enumerate(layers))
    return TraceHeader(re.split(r"[/\\]", model.get("model", ""))[-1] or "unknown", n_used, tensors)


def _events(name: str, lines: Iterator[bytes], n_heading: int, model: TraceHeader) -> Iterator[GateEvent]:
    """In order; a last one without all of its rows is left out."""
    gate_of = {tensor.layer: tensor.gate for tensor in model.tensors}
    rows: list[_Row] = []
    gate = -1  # of the last event
    n_line = n_heading
    n_events, room = 0, available() - rss()
    for line in lines:
        n_line += 1
        if n_events * _EVENT + (n_line - n_heading) * _CHOICE + len(rows) * _ROW > room:
            raise OptionError(f"{name}: {n_line - n_heading} of its rows take more than the {format_size(max(room, 0))} of memory that are free")
        row = _row(name, n_line, line, gate_of, model)
        if rows and _event_of(row) != _event_of(rows[0]):
            yield _event(name, n_line, rows, gate_of, model)
            gate = gate_of[rows[0].layer]
            n_events, rows = n_events + 1, []
        if not rows:
            # of a prompt that goes on, the last layers may have nothing to do
            expected = {(gate + 1) % model.n_gates} | ({0} if row.phase == _PROMPT else set())
            if gate_of[row.layer] not in expected:
                raise OptionError(f"{name}: line {n_line}: layer {row.layer} does not follow the layer before it")
        rows.append(row)
    if rows and len(rows) % model.n_used == 0:
        yield _event(name, n_line + 1, rows, gate_of, model)
    elif gate < 0:
        raise OptionError(f"{name}: has no rows")


def _event_of(row: _Row) -> tuple[int, ...]:
    """The same for rows of one event: of a prompt's batch, or of a token of the answer, in one layer."""
    return row.turn, row.phase, row.layer, row.step if row.phase == _ANSWER else -1


def _event(name: str, n_line: int, rows: list[_Row], gate_of: Mapping[int, int], model: TraceHeader) -> GateEvent:
    """Of the rows before a line.

    Raises:
        OptionError: they are not n_used different experts for each token.
    """
    shape = len(rows) // model.n_used, model.n_used
    if len(rows) % model.n_used == 0:
        ids = np.array([row.expert for row in rows], np.int32).reshape(shape)
        steps = np.array([row.step for row in rows]).reshape(shape)
        slots = np.array([row.slot for row in rows]).reshape(shape)
        if (slots == np.arange(model.n_used)).all() and (steps == steps[:, :1]).all() and (np.diff(np.sort(ids)) > 0).all():
            weights = np.array([row.weight for row in rows], np.float32).reshape(shape)
            n_hit = sum(row.residency for row in rows)
            layer = rows[0].layer
            return GateEvent(gate_of[layer], ids, weights, layer=layer, n_hit=n_hit, n_miss=ids.size - n_hit, decode=rows[0].phase == _ANSWER)
    raise OptionError(f"{name}: before line {n_line}: expected {model.n_used} different experts for each token, in slots from 0")


def _row(name: str, n_line: int, line: bytes, gate_of: Mapping[int, int], model: TraceHeader) -> _Row:
    cells = line.decode().strip().split(",")
    try:
        if len(cells) != len(_COLUMNS):
            raise ValueError
        turn, phase, step, layer, slot, expert = map(int, cells[:6])
        row = _Row(turn, phase, step, layer, slot, expert, float(cells[6]), int(cells[7]))
    except ValueError:
        raise OptionError(f"{name}: line {n_line}: expected nine numbers, found {','.join(cells)[:60]!r}") from None
    if (
        min(row[:6]) < 0
        or layer not in gate_of
        or expert >= model.n_experts
        or phase not in (_PROMPT, _ANSWER)
        or not (np.isfinite(row.weight) and row.residency in (0, 1))
    ):
        raise OptionError(f"{name}: line {n_line}: there is no such layer, expert or phase, or its numbers are none: {','.join(cells)[:60]!r}")
    return row
