"""Recordings of a pass over text, to which predictors and cache policies are fitted."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from .event import GateEvent
from .router import Router
from .trace import Trace, TraceHeader


@dataclass
class Recording:
    """Inputs and selections of all gates for each token.

    Attributes:
        tokens: [n_tokens] int32.
        starts: [n_tokens] bool, True for first tokens of sequences.
        ids: [n_tokens, n_gates, n_used] int32, -1 if a gate uses fewer.
        weights: [n_tokens, n_gates, n_used] float32.
        inputs: [n_rows, n_gates, n_embd] float16, None if a gate has none.
        probs: [n_probs, n_gates, n_experts] float16 of the first tokens, or None.
        input_tokens: [n_rows] tokens of `inputs`, ascending. Default: the first n_rows.
    """

    model: TraceHeader
    router: Router
    tokens: np.ndarray
    starts: np.ndarray
    ids: np.ndarray
    weights: np.ndarray
    inputs: np.ndarray | None = field(repr=False)
    probs: np.ndarray | None = field(repr=False)
    input_tokens: np.ndarray = field(default=None, repr=False)  # type: ignore[arg-type]

    def __post_init__(self) -> None:
        if self.input_tokens is None:
            self.input_tokens = np.arange(0 if self.inputs is None else len(self.inputs))

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    def used(self) -> np.ndarray:
        """Return which experts each token used: [n_tokens, n_gates, n_experts] bool."""
        out = np.zeros((*self.ids.shape[:2], self.router.n_experts + 1), bool)
        np.put_along_axis(out, self.ids, True, axis=2)  # -1 is the extra column
        used: np.ndarray = out[:, :, :-1]
        return used

    def popularity(self) -> np.ndarray:
        """Return each expert's number of tokens: [n_gates, n_experts] int64."""
        counts: np.ndarray = self.used().sum(axis=0)
        return counts

    def events(
        self, start: int = 0, stop: int | None = None, inputs: bool = True
    ) -> list[GateEvent]:
        """Return the gate events of tokens [start, stop) as of decoding."""
        out = []
        row_of = (
            dict(zip(self.input_tokens.tolist(), range(len(self.input_tokens))))
            if inputs and self.inputs is not None
            else {}
        )
        for t in range(self.n_tokens)[start:stop]:
            row = row_of.get(t)
            for g in range(self.model.n_gates):
                k = int((self.ids[t, g] >= 0).sum())
                probs = (
                    self.probs[t : t + 1, g].astype(np.float32)
                    if self.probs is not None and t < len(self.probs)
                    else None
                )
                x = (
                    self.inputs[row : row + 1, g].astype(np.float32)
                    if row is not None and self.inputs is not None
                    else None
                )
                out.append(
                    GateEvent(
                        g, self.ids[t : t + 1, g, :k], self.weights[t : t + 1, g, :k], probs, x
                    )
                )
        return out

    def trace(self, n_tokens: int | None = None) -> Trace:
        """Return the first tokens that have probabilities as a trace of decoding."""
        n = min(n_tokens or self.n_tokens, self.n_tokens if self.probs is None else len(self.probs))
        events = self.events(0, n, inputs=False)
        starts = np.zeros(len(events), bool)
        starts[:: self.model.n_gates] = self.starts[:n]
        return Trace(self.model, events, starts)

    def take(self, tokens: np.ndarray) -> Recording:
        """Return the tokens [n_tokens] bool, which must be whole sequences."""
        n_probs = 0 if self.probs is None else len(self.probs)
        rows = tokens[self.input_tokens]
        input_tokens = np.cumsum(tokens)[self.input_tokens[rows]] - 1
        return self._select(tokens, tokens[:n_probs], rows, input_tokens)

    def part(self, start: int, stop: int) -> Recording:
        """Return tokens [start, stop), without copying except `input_tokens`."""
        tokens = slice(start, stop)
        rows = slice(*np.searchsorted(self.input_tokens, (start, stop)).tolist())
        return self._select(tokens, tokens, rows, self.input_tokens[rows] - start)

    def _select(self, tokens: Any, probs: Any, rows: Any, input_tokens: np.ndarray) -> Recording:
        names = ("tokens", "starts", "ids", "weights")
        arrays = {name: getattr(self, name)[tokens] for name in names}
        arrays["probs"] = None if self.probs is None else self.probs[probs]
        arrays["inputs"] = None if self.inputs is None else self.inputs[rows]
        return replace(self, **arrays, input_tokens=input_tokens)

    def split(self, share: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
        """Return masks [n_tokens] bool of training and validation (ProMoE §4.3: 9:1).

        Every (1 / share)-th sequence is for validation.
        """
        number = np.cumsum(self.starts) - 1
        every = max(round(1 / share), 2)
        held = number % every == min(every - 1, number[-1] if len(number) else 0)
        return ~held, held
