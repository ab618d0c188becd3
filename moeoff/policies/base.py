"""Interfaces of cache policies and predictors, and options of their fits.

A cache policy updates a table `priorities` [n_gates, n_experts] by gate events. The
owner of the experts (the native buffer live, `replay.simulate` offline) evicts the
lowest priority, and the least recently used of equals. A predictor scores the experts
of coming gates.

Invariant: a table is read when the *next* gate misses, so layer-dependent policies
write for gate `event.gate + 1`.
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

Progress = Callable[[int, int], None]  # steps done, total
P = TypeVar("P", bound="Policy")


@dataclass(frozen=True)
class CacheShape:
    """The dimensions of model and buffer.

    Attributes:
        n_gates: Rows of the table, in the order of computation.
        n_experts: Columns; gates with fewer experts use the first ones.
        n_used: Experts per token.
        capacity: Experts in the buffer, over all layers. A fraction if slices do not
            fit evenly.
        model: File name of the model, for learned policies.
        by_layer: [n_gates] experts in each layer's own memory; None: layers share it.
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
        """Return the shape of a buffer with an arena of so many bytes."""
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
    """The options of all fits in a calibration.

    Attributes:
        seed: Seed of random choices; the same seed gives the same arrays.
        hidden: Units of a network's hidden layer.
        low_cost: Size of a low version relative to the model's own, HOBBIT's B_l/B_h
            (§3.4); None: the paper's.
        room: Bytes that a fit may take beyond the recording; None: no limit.
        replay: `replay.simulate`, for fits that evaluate candidates on a trace.
        until: Deadline in `time.monotonic`, at which a search returns its best
            candidate.

    Raises:
        OptionError: A value is out of range.
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
        layout: Expected arrays, as in `require_arrays`; a predictor checks its own.
    """

    name: str
    fit: Callable[[Recording, FitOptions, Progress | None], dict[str, np.ndarray] | None]
    layout: Mapping[str, Layout] = field(default_factory=dict)


class StrategyPart:
    """The base of `Policy` and `Predictor`: name, options and profile sections."""

    name = ""
    summary = ""
    defaults: dict[str, Any] = {}  # options and default values
    sections: tuple[Section, ...] = ()  # profile sections; the others need the first
    # learned arrays are kept only if they beat the defaults on held-out text
    compared = False

    @classmethod
    def check(cls, options: Mapping[str, Any]) -> None:
        """Raise `OptionError` for unknown options; subclasses check values."""
        unknown = sorted(set(options) - set(cls.defaults))
        if unknown:
            raise OptionError(
                f"{cls.name}: unknown option {unknown[0]!r}; there are:"
                f" {', '.join(cls.defaults) or 'none'}"
            )


class Policy(StrategyPart):
    """The base of cache policies. Override `update`, and `reset_sequence` if text
    matters.

    Arrays of the first section are options of the same names; those of others are
    fields of `Precision`, for a lossy preset.

    Args:
        shape: Dimensions of model and buffer.
        table: [n_gates, n_experts] float32 to write to, the native one when live.
            Default: a new one.
        options: Options of the policy, by default those in `defaults`.

    Raises:
        OptionError: An option is unknown.
    """

    offline = False  # True if it needs the future: for simulation only
    static = False  # True if the table never changes after `start`
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
        """Make a policy with calibrated options; `options` override them.

        Args:
            arrays: Arrays of the first section, or None.
        """
        return cls(
            shape, table, **({} if arrays is None else cls.profile_options(arrays)) | options
        )

    @classmethod
    def profile_options(cls, arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return the options in arrays of the first section."""
        require_arrays(arrays, cls.sections[0].layout)
        return {
            name: array.item() if array.size == 1 else array
            for name, array in arrays.items()
            if name in cls.defaults
        }

    def native(self) -> Any:
        """Return the struct moeoff_score that the native thread updates for decoded
        tokens instead of `update`, or None.
        """
        return None

    @classmethod
    def divide(cls, shape: CacheShape, options: Mapping[str, Any]) -> list[int]:
        """Return the experts of each layer if each has its own memory: equal shares.

        Override it if the policy favors layers.

        Args:
            options: All options of the policy.
        """
        return quotas(shape, 0)

    @classmethod
    def is_sized(cls) -> bool:
        """Return True if the priorities depend on the capacity."""
        return cls.resize is not Policy.resize

    def start(self) -> None:
        """Initialize state after `shape`, `options` and `priorities` are set."""

    def update(self, event: GateEvent) -> bool | None:
        """Update `priorities` after a selection. Return False if they are unchanged."""
        return None

    def resize(self, capacity: float) -> None:
        """Set a new capacity in experts (`CacheShape.capacity`) between events.

        Override it if anything but `shape` depends on the capacity, and call this
        first. Learned state stays.
        """
        self.shape = replace(self.shape, capacity=capacity)

    def reset_sequence(self) -> None:
        """Begin a new text. Not called while another sequence continues."""

    def prepare(self, events: Iterable[GateEvent]) -> None:
        """Take all events before the first `update`, for offline policies."""


# least updates of a grouped policy's table per token, or one per gate if there are
# fewer
UPDATES = 8


class GroupedPolicy(Policy):
    """The base of policies that take several gates' events at once, to amortize numpy
    calls.

    A table that is a few gates old evicts almost the same. Events wait inside the
    policy, so simulator and live driver see the same tables. Override `update_gates`;
    call `super().start()` in `start`, and `super().reset_sequence()` first in
    `reset_sequence`.
    """

    def start(self) -> None:
        self.group = max(self.shape.n_gates // UPDATES, 1)
        self._waiting: list[GateEvent] = []

    def update(self, event: GateEvent) -> bool:
        """Update in groups. Return True if `priorities` has changed."""
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
        """Update `priorities` after gates `first`, `first` + 1, ... have selected.

        There are at most `group` events, all with the same number of tokens. They are
        valid during the call.
        """
        raise NotImplementedError

    def reset_sequence(self) -> None:
        self._apply()


def chosen(event: GateEvent) -> tuple[np.ndarray, np.ndarray | int]:
    """Return an event's distinct experts and the number of tokens of each."""
    if len(event.ids) == 1:
        return event.ids[0], 1
    return np.unique(event.ids, return_counts=True)


@dataclass(frozen=True)
class Prediction:
    """The scores of a coming gate's experts.

    Attributes:
        gate: Row of the priority table: a later gate of the batch, or an earlier one of
            the next token.
        scores: [n_tokens, n_experts] float32, comparable within a row; higher is
            likelier. Rows for the next token follow this one's sequences. Valid until
            the predictor's next call.
        logits: True if the scores are router logits, not weights.
    """

    gate: int
    scores: np.ndarray
    logits: bool = False


class Predictor(StrategyPart):
    """The base of predictors. Override `observe` or `begin`, and `reset_sequence` if
    text matters.

    Without the calibrated arrays a predictor learns online, or predicts nothing.

    Args:
        router: Routers of the model.
        arrays: The predictor's profile sections, or None.
        options: Options of the predictor, by default those in `defaults`.

    Raises:
        OptionError: An option is unknown.
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
        """Initialize state after `router`, `arrays` and `options` are set."""

    def begin(self, tokens: np.ndarray) -> list[Prediction]:
        """Predict from a batch's tokens [n_tokens] before it is computed."""
        return []

    def observe(self, event: GateEvent) -> list[Prediction]:
        """Predict after a router's selection."""
        return []

    def reset_sequence(self) -> None:
        """Begin a new text, as in `Policy`."""

    def native(self) -> RoutersAhead | None:
        """Return the routers that the native thread computes instead of `observe`, or
        None.
        """
        return None


class RoutersAhead(Predictor):
    """The next gates' routers applied to a gate's input in one matrix product (Fate
    §4.2, HOBBIT §3.3). Call `look_ahead` in `start`.

    Attributes:
        steps: For each gate, the stacked routers of the following gates, their bias,
            and these gates; or None.
    """

    wants_gate_input = True

    def look_ahead(self, p: int, norm: bool | None) -> None:
        """Stack the routers of the next `p` gates.

        Args:
            norm: As in `Router.ahead`. None: as calibrated for each gate, or True.
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
                    # the lookahead ends at a layer that routes by token, or has another
                    # router shape
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
    """Return the top k [n_tokens, k] of scores [n_tokens, n_experts], unordered."""
    if k >= scores.shape[1]:
        return np.broadcast_to(np.arange(scores.shape[1]), scores.shape)
    return np.argpartition(scores, -k, axis=1)[:, -k:]


def recall(scores: np.ndarray, used: np.ndarray, k: int) -> float:
    """Return the share of used experts [n_tokens, n_experts] among the top k."""
    return float(np.take_along_axis(used, top_k(scores, k), axis=1).sum() / max(used.sum(), 1))


def quotas(shape: CacheShape, shallow: int) -> list[int]:
    """Return the most experts of each layer (Fate §4.4).

    cache_deep = (cache_total - L x num_experts) / (num_layers - L). With less memory
    the first L layers fill up in order. Memory divided by layer sets its own quotas.
    """
    if shape.by_layer is not None:
        return list(shape.by_layer)
    total, out = int(shape.capacity + 1e-6), []  # floating-point shares may be slightly too low
    for _ in range(shallow):
        out.append(min(shape.n_experts, total))
        total -= out[-1]
    deep = shape.n_gates - shallow
    for i in range(deep):  # evenly, the remainder to the first
        out.append(min(shape.n_experts, total // deep + (i < total % deep)))
    return out


def n_low(n_chosen: int, p: float) -> int:
    """Return the number of a prompt batch's experts read in low precision (Fate §4.5):
    the share p, rounded down.
    """
    return int(p * n_chosen)
