"""One pass over text: what every gate of a model read and chose, for fits.

Texts are evaluated in batches, one sequence after the other: a gate says the same of a token in a batch as in decode, and
many times faster. Bounded: only as many gate inputs and probabilities are kept as fit in LIMIT; what was chosen is small.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from .buffer import GateEvent
from .cache import Event
from .errors import OptionError
from .llama import Llama
from .router import Router
from .trace import Model, Trace

__all__ = ["LENGTH", "Recording", "record", "sequences"]

LENGTH = 256  # tokens of a sequence
LIMIT = 256 << 20  # bytes of gate inputs, and of probabilities
_OUTPUT_BYTES = 64 << 20  # of the logits that a batch makes, because the last layer sees only tokens whose logits are wanted


@dataclass
class Recording:
    """What was recorded, token by token.

    Attributes:
        model: header of a trace.
        router: of the model.
        tokens: [n_tokens] int32.
        starts: [n_tokens] bool, the first token of a sequence.
        ids: [n_tokens, n_gates, n_used] int32; -1 where a gate uses fewer.
        weights: likewise, float32.
        inputs: [n_kept, n_gates, n_embd] float16, or None where a gate gave none. The first n_kept tokens.
        probs: [n_probs, n_gates, n_experts] float16, or None. The first n_probs tokens.
    """

    model: Model
    router: Router
    tokens: np.ndarray
    starts: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    inputs: np.ndarray | None = field(repr=False)
    probs: np.ndarray | None = field(repr=False)

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    def used(self) -> np.ndarray:
        """[n_tokens, n_gates, n_experts] bool."""
        out = np.zeros((*self.ids.shape[:2], self.router.n_experts + 1), bool)
        np.put_along_axis(out, self.ids, True, axis=2)  # -1 goes into the column too many
        return out[:, :, :-1]

    def popularity(self) -> np.ndarray:
        """[n_gates, n_experts] int64: tokens that used each expert."""
        return self.used().sum(axis=0)

    def events(self, start: int = 0, stop: int | None = None, inputs: bool = True) -> list[Event]:
        """As decode gives them: of each token in turn, one of each gate."""
        out = []
        for t in range(start, min(self.n_tokens, stop if stop is not None else self.n_tokens)):
            for g in range(self.model.n_gates):
                k = int((self.ids[t, g] >= 0).sum())
                probs = self.probs[t : t + 1, g].astype(np.float32) if self.probs is not None and t < len(self.probs) else None
                x = self.inputs[t : t + 1, g].astype(np.float32) if inputs and self.inputs is not None and t < len(self.inputs) else None
                out.append(Event(g, self.ids[t : t + 1, g, :k], self.weights[t : t + 1, g, :k], probs, x))
        return out

    def trace(self, n_tokens: int | None = None) -> Trace:
        """The first tokens with probabilities as a trace of a token-by-token run."""
        n = min(n_tokens or self.n_tokens, self.n_tokens if self.probs is None else len(self.probs))
        events = self.events(0, n, inputs=False)
        starts = np.zeros(len(events), bool)
        starts[:: self.model.n_gates] = self.starts[:n]
        zeros = np.zeros(len(events), np.int64)
        return Trace(self.model, events, starts, zeros, zeros, zeros, [])

    def take(self, tokens: np.ndarray) -> Recording:
        """Of these tokens [n_tokens] bool alone; whole sequences."""
        parts = {name: getattr(self, name)[tokens] for name in ("tokens", "starts", "ids", "weights")}
        for name in ("inputs", "probs"):
            array = getattr(self, name)
            parts[name] = None if array is None else array[tokens[: len(array)]]
        return Recording(self.model, self.router, **parts)

    def split(self, share: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
        """[n_tokens] bool twice: sequences to train on, and every 1/share-th one to judge by (ProMoE §4.3: 9:1)."""
        number = np.cumsum(self.starts) - 1
        every = max(round(1 / share), 2)
        held = number % every == min(every - 1, number[-1] if len(number) else 0)
        return ~held, held


def sequences(model: Llama, texts: Sequence[str | os.PathLike], n_tokens: int, length: int = LENGTH) -> list[list[int]]:
    """Pieces of `length` tokens from all of each text, as many from each, about `n_tokens` in all.

    Raises:
        OptionError: a text is empty.
    """
    per_text = max(round(n_tokens / length / len(texts)), 1)
    out = []
    for path in texts:
        with open(path, "rb") as file:
            text = file.read()
        found = []
        for i in range(per_text):
            at = len(text) * i // per_text
            piece = text[at : at + min(12 * length, -(-len(text) // per_text))].decode("utf-8", "ignore").encode()
            found.append(model.tokenize(piece, add_bos=False)[:length])
        found = [tokens for tokens in found if len(tokens) > 1]
        if not found:
            raise OptionError(f"{os.fspath(path)}: holds no text to calibrate on")
        out.append(found)
    # the texts in turn, so that whatever keeps the first tokens only has some of each
    return [found[i] for i in range(per_text) for found in out if i < len(found)]


def batch_size(n_vocab: int, n_embd: int, length: int = LENGTH) -> int:
    """Tokens of a batch: logits and one gate's event stay small."""
    return int(max(min(length, _OUTPUT_BYTES // (4 * n_vocab), (1 << 20) // (4 * max(n_embd, 1))), 16))


def record(
    model: Llama, texts: Sequence[list[int]], router: Router, name: str, *, inputs: bool = True, progress: Callable[[int, int], None] | None = None
) -> Recording:
    """Evaluates the sequences.

    Args:
        model: opened with `gate_input=True`; its batch size is used, its context must hold a sequence.
        inputs: keep gate inputs and probabilities.
        progress: called with tokens done and all.
    """
    buffer = model.expert_buffer
    header = Model.of(buffer, name, max(router.n_used))
    n, g, k, e = sum(map(len, texts)), header.n_gates, max(router.n_used), router.n_experts
    ids, weights = np.full((n, g, k), -1, np.int32), np.zeros((n, g, k), np.float32)
    kept: dict[str, np.ndarray | None] = {"inputs": None, "probs": None}
    at = 0

    def keep(what: str, gate: int, rows: np.ndarray) -> None:
        if kept[what] is None:
            kept[what] = np.zeros((min(n, max(LIMIT // (2 * g * rows.shape[1]), 1)), g, rows.shape[1]), np.float16)
        place = kept[what][at : at + len(rows), gate]
        place[:] = np.clip(rows[: len(place)], -65504, 65504)

    def deliver(event: GateEvent) -> None:
        rows, used = event.ids.shape
        ids[at : at + rows, event.gate, :used], weights[at : at + rows, event.gate, :used] = event.ids, event.weights
        if inputs and event.gate_input is not None:
            keep("inputs", event.gate, event.gate_input)
            if router.weights[event.gate] is not None:
                probs = router.probs(event.gate, event.gate_input)
                keep("probs", event.gate, np.pad(probs, ((0, 0), (0, e - probs.shape[1]))))

    model.set_gate_callback(deliver)
    try:
        for tokens in texts:
            model._ctx.kv_cache_clear()
            for i in range(0, len(tokens), model.n_batch):
                batch = tokens[i : i + model.n_batch]
                # all logits are asked for: else the last layers leave out the tokens that no answer needs
                model._batch.set_batch(batch=batch, n_past=i, logits_all=True)
                model._ctx.decode(model._batch)
                buffer.drain()
                buffer.check()
                at += len(batch)
                if progress:
                    progress(at, n)
    finally:
        model.set_gate_callback(None)
        model.reset()
        model._ctx.kv_cache_clear()
    starts = np.zeros(n, bool)
    starts[np.cumsum([0, *map(len, texts[:-1])])] = True
    return Recording(header, router, np.concatenate(texts).astype(np.int32), starts, ids, weights, kept["inputs"], kept["probs"])
