"""Contracts of cache policies and predictors, and options of their fits.

A cache policy is a table of priorities that gate events change. It never evicts: it
writes `priorities` [n_gates, n_experts], and the owner of the experts (the native
buffer live, `replay.simulate` offline) evicts the lowest, among equals the least
recently used. A predictor turns gate events into scores of the experts of coming gates.
Neither knows files, slots or threads.

Invariant: the table that an event leaves behind is read when the *next* gate misses, so
a policy that depends on the layer being computed writes for gate `event.gate + 1`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np

from ..errors import OptionError
from ..routing.event import GateEvent
from ..routing.recording import Recording
from ..routing.router import SIGMOID, Router, Rows
from ..routing.trace import TraceHeader
from ..system.arrays import Layout, require_arrays

Progress = Callable[[int, int], None]  # steps done, and all
P = TypeVar("P", bound="Policy")


@dataclass(frozen=True)
class CacheShape:
    """The model and the buffer, as far as a policy needs them.

    Attributes:
        n_gates: rows of the table, in the order the graph runs them.
        n_experts: columns; a gate with fewer uses the first ones.
        n_used: experts for each token.
        capacity: experts that fit into the buffer, in all layers together (a fraction
            if their slices do not fit evenly).
        model: name of its file, for policies that have learned something about it.
        by_layer: Experts that each layer's own memory holds, [n_gates]; None: the
            layers share it.
    """

    n_gates: int
    n_experts: int
    n_used: int
    capacity: float
    model: str = ""
    by_layer: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if min(self.n_gates, self.n_experts, self.n_used) < 1 or self.capacity < 0:
            raise OptionError(f"no buffer has this shape: {self}")

    @classmethod
    def of(cls, model: TraceHeader, cache_bytes: int) -> CacheShape:
        """The shape of a model's buffer whose arena has so many bytes, slot padding
        included.
        """
        n = sum({t.gate: t.n_experts for t in model.tensors}.values())
        return cls(
            model.n_gates,
            model.n_experts,
            model.n_used,
            n * min(cache_bytes / model.full_bytes, 1.0),
            model.name,
        )

    def divided(self, by_layer: Sequence[int]) -> CacheShape:
        """Return the shape of memory that holds so many experts of each layer."""
        return replace(self, capacity=float(sum(by_layer)), by_layer=tuple(by_layer))


@dataclass(frozen=True)
class FitOptions:
    """Options of the fits, which a calibration gives to all; each takes what it needs.

    Attributes:
        seed: of whatever is random in the fit; the same seed gives the same arrays.
        hidden: units in the hidden layer of a network.
        low_cost: bytes of a low version as a share of the model's own, HOBBIT's B_l/B_h
            (§3.4); None: the paper's.
        room: bytes of memory that a fit may take beyond the recording; None: as many as
            it wants.
        replay: `replay.simulate`, for fits that try on a trace what they have fitted.
        until: of `time.monotonic`, when such a fit ends with the best that it has
            tried.

    Raises:
        OptionError: out of range.
    """

    seed: int = 0
    hidden: int = 128
    low_cost: float | None = None
    replay: Callable[..., Any] | None = None
    room: int | None = None
    until: float = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 32:
            raise OptionError(
                f"the seed of a fit lies between 0 and {(1 << 32) - 1}, not {self.seed}"
            )
        if self.hidden < 1:
            raise OptionError(f"a network has at least one hidden unit, not {self.hidden}")


DEFAULT_FIT = FitOptions()


@dataclass(frozen=True)
class Section:
    """A section of a profile: arrays that a part learns from text.

    Attributes:
        name: Name of the section.
        fit: Function of a recording, options and a progress callback or None that
            returns the arrays, or None if there is nothing to learn. `moeoff calibrate`
            calls it.
        layout: Expected arrays, as `require_arrays` takes them; a predictor checks its
            own.
    """

    name: str
    fit: Callable[[Recording, FitOptions, Progress | None], dict[str, np.ndarray] | None]
    layout: Mapping[str, Layout] = field(default_factory=dict)


class StrategyPart:
    """Base of `Policy` and `Predictor`: a name, options, and what it learns from text."""

    name = ""
    summary = ""
    defaults: dict[str, Any] = {}  # of its options
    sections: tuple[Section, ...] = ()  # of a profile; without the first the others are not used
    # what was learned is kept only where it serves better than the defaults on text
    # that it was not fitted to
    compared = False

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Raises OptionError for an option that is unknown or, where a subclass says
        so, out of range.
        """
        unknown = sorted(set(options) - set(cls.defaults))
        if unknown:
            raise OptionError(
                f"{cls.name}: unknown option {unknown[0]!r}; there are:"
                f" {', '.join(cls.defaults) or 'none'}"
            )


class Policy(StrategyPart):
    """Base of all cache policies: override `update`, and `reset_sequence` if text
    matters.

    Arrays of its first section are options of the same names; those of the others are
    fields of `Precision`, for a lossy preset.

    Args:
        shape: of the model and buffer.
        table: [n_gates, n_experts] float32 to write into, the native one when live; a
            new one by default.
        options: the policy's own; each defaults to its entry in `defaults`.

    Raises:
        OptionError: an unknown option.
    """

    offline = False  # needs the future: only the simulator can run it
    static = False  # the table never changes after `start`: events need not be delivered
    wants_probs = False  # reads GateEvent.probs
    group = 1  # gates whose events are taken together

    def __init__(self, shape: CacheShape, table: np.ndarray | None = None, **options: Any):
        self.check(options)
        self.shape = shape
        self.priorities = (
            np.zeros((shape.n_gates, shape.n_experts), np.float32) if table is None else table
        )
        if self.priorities.shape != (shape.n_gates, shape.n_experts):
            raise OptionError(
                f"{self.name}: a table of {self.priorities.shape} does not fit {shape}"
            )
        self.options = self.defaults | options
        self.start()

    @classmethod
    def from_profile(
        cls: type[P],
        arrays: Mapping[str, np.ndarray] | None,
        shape: CacheShape,
        table: np.ndarray | None = None,
        **options: Any,
    ) -> P:
        """A policy with the options that a calibration of the model gives; `options`
        beat them.

        Args:
            arrays: of the first section; None: there is none.
        """
        return cls(
            shape, table, **({} if arrays is None else cls.profile_options(arrays)) | options
        )

    @classmethod
    def profile_options(cls, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return the options that arrays of the first section give."""
        require_arrays(arrays, cls.sections[0].layout)
        return {
            name: array.item() if array.size == 1 else array
            for name, array in arrays.items()
            if name in cls.defaults
        }

    def native(self) -> Any:
        """Return the struct moeoff_score that the driver's native thread updates by
        decoded tokens in place of `update`, or None.
        """
        return None

    @classmethod
    def divide(cls, shape: CacheShape, options: Mapping[str, Any]) -> list[int]:
        """Return how many experts each layer keeps where each has its own memory: as
        many in each.

        Override it if the policy favors layers.

        Args:
            options: Options of the policy, each of them.
        """
        return quotas(shape, 0)

    @classmethod
    def is_sized(cls) -> bool:
        """Return whether the priorities depend on the capacity."""
        return cls.resize is not Policy.resize

    def start(self) -> None:
        """Sets up state; `shape`, `options` and `priorities` are there."""

    def update(self, event: GateEvent) -> bool | None:
        """Changes `priorities` in place after a router has selected. False where it
        left them as they were: nothing has to be published.
        """
        return None

    def resize(self, capacity: float) -> None:
        """The buffer has been resized, between events: it now holds `capacity` experts
        (`CacheShape.capacity`). What has been learned stays.

        Override it if anything but `shape` depends on the capacity, and call this
        first.
        """
        self.shape = replace(self.shape, capacity=capacity)

    def reset_sequence(self) -> None:
        """A new text begins: the next token is its first. Not called while another text
        goes on beside it.
        """

    def prepare(self, events: Iterable[GateEvent]) -> None:
        """Offline policies see all events before the first `update`."""


# of a grouped policy's table for each token at least, or one for each gate if there are
# fewer
UPDATES = 8


class GroupedPolicy(Policy):
    """Base of policies that take the events of several gates at once: numpy's calls
    cost more than their numbers.

    A token changes a gate's row once, and a table of priorities that is a few gates old
    evicts almost the same. The events wait inside the policy, so that the simulator and
    a live driver see the same table at the same time. Override `update_gates`; call
    `super().start()` in `start`, and `super().reset_sequence()` first in
    `reset_sequence`.
    """

    def start(self) -> None:
        self.group = max(self.shape.n_gates // UPDATES, 1)
        self._waiting: list[GateEvent] = []

    def update(self, event: GateEvent) -> bool:
        """True if `priorities` has changed."""
        waiting = self._waiting
        changed = bool(waiting) and (
            event.gate != waiting[-1].gate + 1 or len(event.ids) != len(waiting[0].ids)
        )
        if changed:
            self._apply()
        waiting.append(event)
        if len(waiting) < self.group and event.gate < self.shape.n_gates - 1 and event.decode:
            return changed
        self._apply()
        return True

    def _apply(self) -> None:
        waiting = self._waiting
        if not waiting:
            return
        self.update_gates(waiting[0].gate, waiting)
        waiting.clear()

    def update_gates(self, first: int, events: Sequence[GateEvent]) -> None:
        """Changes `priorities` after the gates `first`, `first` + 1, ... have selected,
        at most `group` of them and all for as many tokens.

        `events` is valid during the call.
        """
        raise NotImplementedError

    def reset_sequence(self) -> None:
        self._apply()


def chosen(event: GateEvent) -> tuple[np.ndarray, np.ndarray | int]:
    """Experts an event chose, each once, and how many of its tokens chose each (1 for a
    single token).
    """
    if len(event.ids) == 1:
        return event.ids[0], 1
    return np.unique(event.ids, return_counts=True)


@dataclass(frozen=True)
class Prediction:
    """Scores of the experts of one coming gate.

    Attributes:
        gate: row of the priority table: a later gate of the same batch, or an earlier
            one of the next token.
        scores: [n_tokens, n_experts] float32, higher is likelier; comparable within a
            row only. Rows for the next token are of the same sequences as this one's.
            Valid until the predictor's next call.
        logits: the scores are a router's logits, not weights.
    """

    gate: int
    scores: np.ndarray
    logits: bool = False


class Predictor(StrategyPart):
    """Base of all predictors: override `observe`, or `begin`, and `reset_sequence` if
    text matters.

    Where it needs a calibration, it gets the arrays of its section of a profile;
    without them it learns while it runs, or predicts nothing.

    Args:
        router: of the model.
        arrays: the predictor's sections of a profile, or None.
        options: the predictor's own; each defaults to its entry in `defaults`.

    Raises:
        OptionError: an unknown option.
    """

    wants_gate_input = False  # reads GateEvent.gate_input
    wants_tokens = False  # begin() must be called with the tokens of each batch
    needs_profile = False  # predicts nothing without one

    def __init__(
        self, router: Router, arrays: Mapping[str, np.ndarray] | None = None, **options: Any
    ):
        self.check(options)
        self.router, self.arrays = router, arrays
        self.options = self.defaults | options
        self.start()

    def start(self) -> None:
        """Sets up state; `router`, `arrays` and `options` are there."""

    def begin(self, tokens: np.ndarray) -> list[Prediction]:
        """Before a batch: its tokens [n_tokens]."""
        return []

    def observe(self, event: GateEvent) -> list[Prediction]:
        """After a router has selected."""
        return []

    def reset_sequence(self) -> None:
        """A new text begins, as for a policy."""

    def native(self) -> RoutersAhead | None:
        """Return the routers that the driver's native thread computes in place of
        `observe`, or None.
        """
        return None


class RoutersAhead(Predictor):
    """The routers of the next gates on a gate's input, in one matrix product (Fate
    §4.2, HOBBIT §3.3). Call `look_ahead` in `start`.

    Attributes:
        steps: of each gate, the routers of the gates behind it, one below the other,
            their bias, and these gates; None where there are none.
    """

    wants_gate_input = True

    def look_ahead(self, p: int, norm: bool | None) -> None:
        """Stacks the routers of the next `p` gates.

        Args:
            norm: as for `Router.ahead`; None takes what calibration measured for each
                gate, and True where there is none.
        """
        router = self.router
        measured = None
        if norm is None and self.arrays is not None:
            require_arrays(self.arrays, {"next_norm": ("b", (router.n_gates,))})
            measured = self.arrays["next_norm"]
        self.steps: list[tuple[Rows, np.ndarray | None, list[int]] | None] = []
        for gate in range(router.n_gates):
            parts: list[tuple[int, tuple[np.ndarray, np.ndarray | None]]] = []
            for target in range(gate + 1, min(gate + p, router.n_gates - 1) + 1):
                use = bool(measured[target]) if measured is not None else norm is not False
                ahead = router.ahead(gate, target, use)
                if ahead is None or (parts and ahead[0].shape != parts[0][1][0].shape):
                    # the look ahead ends at a layer that routes by token, or whose
                    # router has another shape
                    break
                parts.append((target, ahead))
            if not parts:
                self.steps.append(None)
                continue
            weight = np.concatenate([w for _, (w, _) in parts])
            if any(b is not None for _, (_, b) in parts):
                bias = np.concatenate(
                    [np.zeros(len(w), np.float32) if b is None else b for _, (w, b) in parts],
                    dtype=np.float32,
                )
            else:
                bias = None
            self.steps.append((Rows(weight), bias, [target for target, _ in parts]))

    def native(self) -> RoutersAhead | None:
        router, overridden = self.router, type(self).observe is not RoutersAhead.observe
        return (
            None
            if overridden or (router.by_probs and (router.gating != SIGMOID or router.n_groups > 1))
            else self
        )

    def observe(self, event: GateEvent) -> list[Prediction]:
        step = self.steps[event.gate]
        if step is None or event.gate_input is None:
            return []
        rows, bias, targets = step
        logits = rows.product(event.gate_input)
        if bias is not None:
            logits += bias
        router = self.router
        scores = logits.reshape(len(logits), len(targets), -1)
        if router.by_probs:
            scores = router.gated(scores)
            return [
                Prediction(gate, router.selection(gate, scores[:, i]))
                for i, gate in enumerate(targets)
            ]
        return [Prediction(gate, scores[:, i], True) for i, gate in enumerate(targets)]


def top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """[n_tokens, k] the k likeliest experts of each row [n_tokens, n_experts], in no
    order.
    """
    if k >= scores.shape[1]:
        return np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    return np.argpartition(scores, -k, axis=1)[:, -k:]


def recall(scores: np.ndarray, used: np.ndarray, k: int) -> float:
    """Share of the used experts [n_tokens, n_experts] bool that are among the k highest
    scores of their row.
    """
    return float(np.take_along_axis(used, top_k(scores, k), axis=1).sum() / max(used.sum(), 1))


def quotas(shape: CacheShape, shallow: int) -> list[int]:
    """Return how many experts each layer may keep (Fate §4.4): cache_deep =
    (cache_total - L x num_experts) / (num_layers - L), and with less room the first L
    layers in turn.

    Memory that is divided already decides itself.
    """
    if shape.by_layer is not None:
        return list(shape.by_layer)
    total, out = int(shape.capacity + 1e-6), []  # a share of a whole number may lie below it
    for _ in range(shallow):
        out.append(min(shape.n_experts, total))
        total -= out[-1]
    deep = shape.n_gates - shallow
    for i in range(deep):  # evenly, the remainder to the first
        out.append(min(shape.n_experts, total // deep + (i < total % deep)))
    return out


def n_low(n_chosen: int, p: float) -> int:
    """Return how many of the experts that a prompt's batch chose are read in low
    precision (Fate §4.5): the share p, rounded down.
    """
    return int(p * n_chosen)
