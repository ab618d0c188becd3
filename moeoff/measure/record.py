"""One pass over text that records each gate's input and selection, for fits.

Sequences are evaluated in batches: a router selects the same experts for a token as in
decode, and a batch is many times faster. Memory is bounded: gate inputs of evenly
spread tokens, and probabilities of the first tokens, are kept within `LIMIT`.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from ..budget.plan import MemoryPlan
from ..engine.llama import Llama
from ..errors import OptionError
from ..gguf.model_index import EMBEDDING, ModelIndex
from ..routing.event import GateEvent
from ..routing.recording import Recording
from ..routing.router import Router
from ..routing.trace import TraceHeader
from ..system.files import open_file
from ..system.memory import available, rss
from .checkpoint import Checkpoint
from .statistics import spread

LENGTH = 256  # tokens of a sequence
LIMIT = 1 << 30  # most bytes of gate inputs, and of probabilities
# Most bytes of a batch's logits: without them the last layer skips a token.
_OUTPUT_BYTES = 64 << 20


def sequences(
    model: Llama, texts: Sequence[str | os.PathLike[str]], n_tokens: int
) -> list[list[int]]:
    """Cut about `n_tokens` in sequences of at most `LENGTH` tokens, as many from each
    text.

    Any prefix of the sequences is spread over the texts.

    Raises:
        OptionError: A text is empty or cannot be read.
    """
    per_text = max(round(n_tokens / LENGTH / len(texts)), 1)
    out = []
    for path in texts:
        pieces = []
        try:
            with open_file(path) as file:
                size = os.fstat(file.fileno()).st_size
                for i in spread(range(per_text)):
                    piece = os.pread(
                        file.fileno(), min(12 * LENGTH, -(-size // per_text)), size * i // per_text
                    )
                    pieces.append(
                        model.tokenize(piece.decode("utf-8", "ignore").encode(), add_bos=False)[
                            :LENGTH
                        ]
                    )
        except OSError as error:
            raise OptionError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None
        pieces = [tokens for tokens in pieces if len(tokens) > 1]
        if not pieces:
            raise OptionError(f"{os.fspath(path)}: expected text, got none to calibrate on")
        out.append(pieces)
    return [pieces[i] for i in range(per_text) for pieces in out if i < len(pieces)]


def batch_size(n_vocab: int, n_embd: int) -> int:
    """Return the tokens of a batch whose logits and gate events stay small."""
    return int(
        max(min(LENGTH, _OUTPUT_BYTES // (4 * n_vocab), (1 << 20) // (4 * max(n_embd, 1))), 16)
    )


def _evaluate(model: Llama, tokens: list[int]) -> Iterator[int]:
    """Compute a sequence. Yield each batch's number of tokens after its gate events."""
    model.clear_context()
    for i in range(0, len(tokens), model.n_batch):
        batch = tokens[i : i + model.n_batch]
        model.decode_batch(batch, i)
        model.engine.buffer.drain()
        model.engine.buffer.check()
        yield len(batch)


@contextlib.contextmanager
def recordable(model_index: ModelIndex, **options: Any) -> Iterator[tuple[Llama, Router]]:
    """Open a model for `record` and `sequences`, with options of `Llama`."""
    embedding = model_index.dense.get(EMBEDDING)
    n_embd, n_vocab = embedding.shape[:2] if embedding else (4096, 1 << 17)
    batch = batch_size(n_vocab, n_embd)
    with contextlib.closing(
        Llama(
            model_index.files[0],
            gate_input=True,
            n_ctx=LENGTH,
            n_batch=batch,
            n_ubatch=batch,
            **options,
        )
    ) as llm:
        layers, before = {t.gate: t.layer for t in llm.engine.buffer.tensors}, rss()
        router = Router.read(
            model_index,
            [layers[g] for g in sorted(layers)],
            llm.engine.buffer.gating,
            llm.engine.buffer.priorities.shape[1],
        )
        llm.engine.sizer.make_room(rss() - before)
        yield llm, router


def recording_limit(plan: MemoryPlan | None = None) -> int:
    """Return `LIMIT`, or an eighth of available memory or of what a model's plan
    leaves.
    """
    free = (
        available()
        if plan is None or not plan.budget
        else min(plan.budget - plan.fixed - plan.arena_floor, available())
    )
    return min(LIMIT, max(free, 0) // 8)


def recording_bytes(model: Llama, router: Router, n_tokens: int, limit: int) -> int:
    """Return the most bytes that `record` keeps for `n_tokens`."""
    gates = len(model.engine.buffer.priorities)
    return n_tokens * gates * max(router.n_used) * 8 + sum(
        min(2 * n_tokens * gates * width, limit) for width in (model.n_embd(), router.n_experts)
    )


def record(
    model: Llama,
    texts: Sequence[list[int]],
    router: Router,
    name: str,
    *,
    limit: int | None = None,
    until: float = math.inf,
    least: int = 0,
    deadline: float = math.inf,
    checkpoint: Checkpoint | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Recording:
    """Evaluate sequences and record their gate events.

    Args:
        model: Model opened by `recordable`, with a context for the longest sequence.
        limit: Bytes of gate inputs, and of probabilities. Default: `recording_limit()`.
        until: Time of `time.monotonic` after which only the first `least` sequences are
            still started.
        least: Sequences to evaluate beyond `until`.
        deadline: Time of `time.monotonic` after which no sequence is started.
        checkpoint: Sequences to reuse from the same interrupted recording, and to add
            to.
        progress: Callback with tokens done and total.
    """
    buffer = model.engine.buffer
    header = TraceHeader.of(buffer, name, max(router.n_used))
    n, g, k, e = sum(map(len, texts)), header.n_gates, max(router.n_used), router.n_experts
    ids, weights = np.full((n, g, k), -1, np.int32), np.zeros((n, g, k), np.float32)
    rows: dict[str, np.ndarray] = {}  # inputs of every step-th token, probabilities of the first
    n_done, step = 0, 1
    limit = recording_limit() if limit is None else limit

    def allocate(what: str, width: int) -> np.ndarray:
        if what not in rows:
            rows[what] = np.zeros((min(n, max(limit // (2 * g * width), 1)), g, width), np.float16)
        return rows[what]

    def make_room(n_tokens: int) -> None:
        """Drop every second input until those of the next tokens fit."""
        nonlocal step
        place = rows.get("inputs")
        while place is not None and -(-(n_done + n_tokens) // step) > len(place):
            half = place[: -(-n_done // step) : 2]
            place[: len(half)], step = half, 2 * step

    def deliver(event: GateEvent) -> None:
        n_rows, used = event.ids.shape
        (
            ids[n_done : n_done + n_rows, event.gate, :used],
            weights[n_done : n_done + n_rows, event.gate, :used],
        ) = event.ids, event.weights
        if event.gate_input is not None:
            place = allocate("inputs", event.gate_input.shape[1])
            make_room(n_rows)
            store(place, event.gate, -(-n_done // step), event.gate_input[-n_done % step :: step])
            if router.weights[event.gate] is not None:
                probs = router.probs(event.gate, event.gate_input)
                store(
                    allocate("probs", e),
                    event.gate,
                    n_done,
                    np.pad(probs, ((0, 0), (0, e - probs.shape[1]))),
                )

    def store(place: np.ndarray, gate: int, first: int, values: np.ndarray) -> None:
        rows = place[first : first + len(values), gate]
        rows[:] = np.clip(values[: len(rows)], -65504, 65504)  # the range of float16

    def parts(begin: int, end: int) -> dict[str, np.ndarray]:
        """Return views of the rows of these tokens."""
        out = {"ids": ids[begin:end], "weights": weights[begin:end]}
        for what, place in rows.items():
            out[what] = (
                place[-(-begin // step) : -(-end // step)] if what == "inputs" else place[begin:end]
            )
        return out

    model.set_gate_callback(deliver)
    try:
        for i, tokens in enumerate(texts):
            if time.monotonic() > (until if i >= least else deadline):
                break
            part = checkpoint.load(f"sequence-{i}") if checkpoint else None
            begin, end = n_done, n_done + len(tokens)
            if part is not None:
                for what in ("inputs", "probs"):
                    if what in part:
                        allocate(what, part[what].shape[2])
                make_room(len(tokens))
                for what, place in parts(begin, end).items():
                    place[:] = part[what]
                n_done = end
            else:
                make_room(len(tokens))
                for n_batch in _evaluate(model, tokens):
                    n_done += n_batch
                    if progress:
                        progress(n_done, n)
                if checkpoint:
                    checkpoint.save(f"sequence-{i}", parts(begin, end))
            if progress:
                progress(n_done, n)
    finally:
        model.set_gate_callback(None)
        model.clear_context()
    if progress:
        progress(n_done, n_done)
    starts = np.zeros(n, bool)
    starts[np.cumsum([0, *map(len, texts[:-1])])] = True
    recorded = parts(0, n_done)
    with_inputs = np.arange(0, n_done, step)[: len(recorded.get("inputs", ()))]
    return Recording(
        header,
        router,
        np.concatenate(texts)[:n_done].astype(np.int32),
        starts[:n_done],
        recorded["ids"],
        recorded["weights"],
        recorded.get("inputs"),
        recorded.get("probs"),
        with_inputs,
    )
