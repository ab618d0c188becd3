"""What a cache policy is: a table of priorities that gate events change.

A policy never evicts. It writes `priorities` [n_gates, n_experts], and the owner of the slices (the native buffer live,
`moeoff.simulate` offline) evicts the lowest, among equals the least recently used. A policy knows nothing of files, slots or threads.

Invariant: the table that an event leaves behind is read when the *next* gate misses, so a policy that depends on the layer
being computed writes for gate `event.gate + 1`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from ..errors import OptionError
from ..gate_event import GateEvent

# what a calibration measured: section of the profile -> its arrays by name
Sections = Mapping[str, Mapping[str, np.ndarray]]
P = TypeVar("P", bound="Policy")


@dataclass(frozen=True)
class Shape:
    """The model and the buffer, as far as a policy needs them.

    Attributes:
        n_gates: rows of the table, in the order the graph runs them.
        n_experts: columns; a gate with fewer uses the first ones.
        n_used: experts for each token.
        capacity: experts that fit into the buffer, in all layers together (a fraction if their slices do not fit evenly).
        model: name of its file, for policies that have learned something about it.
    """

    n_gates: int
    n_experts: int
    n_used: int
    capacity: float
    model: str = ""

    def __post_init__(self) -> None:
        if min(self.n_gates, self.n_experts, self.n_used) < 1 or self.capacity < 0:
            raise OptionError(f"no buffer has this shape: {self}")


class Policy:
    """Base of all policies: override `update`, and `reset_sequence` if text matters.

    A policy that takes options from a calibration names the sections in `profile_sections` and overrides `profile_options`.

    Args:
        shape: of the model and buffer.
        table: [n_gates, n_experts] float32 to write into, the native one when live; a new one by default.
        seed: of whatever is random in the policy.
        options: the policy's own; each defaults to its entry in `defaults`.

    Raises:
        OptionError: an unknown option.
    """

    name = ""
    summary = ""
    offline = False  # needs the future: only the simulator can run it
    static = False  # the table never changes after `start`: events need not be delivered
    wants_probs = False  # reads GateEvent.probs
    profile_sections: tuple[str, ...] = ()  # of a profile, what `profile_options` reads
    defaults: dict[str, Any] = {}

    def __init__(self, shape: Shape, table: np.ndarray | None = None, seed: int = 0, **options: Any):
        unknown = sorted(set(options) - set(self.defaults))
        if unknown:
            raise OptionError(f"{self.name}: unknown option {unknown[0]!r}; there are: {', '.join(self.defaults) or 'none'}")
        self.shape = shape
        self.priorities = np.zeros((shape.n_gates, shape.n_experts), np.float32) if table is None else table
        if self.priorities.shape != (shape.n_gates, shape.n_experts):
            raise OptionError(f"{self.name}: a table of {self.priorities.shape} does not fit {shape}")
        self.options = self.defaults | options
        self._seed = seed
        self.start()

    @cached_property
    def rng(self) -> np.random.Generator:
        """Chance that `seed` repeats. Made when a policy asks for it: numpy.random takes 4 MiB."""
        return np.random.default_rng(self._seed)

    @classmethod
    def from_profile(cls: type[P], profile: Sections, shape: Shape, table: np.ndarray | None = None, seed: int = 0, **options: Any) -> P:
        """A policy with the options that a calibration of the model gives; `options` beat them.

        Args:
            profile: those of `profile_sections` that the calibration wrote.
        """
        return cls(shape, table, seed, **(cls.profile_options(profile) | options))

    @classmethod
    def profile_options(cls, profile: Sections) -> dict[str, Any]:
        """Options that a calibration gives; none for what it has not written."""
        return {}

    @classmethod
    def precision_options(cls, t1: float) -> dict[str, Any]:
        """Options for a run in which experts may be served in low precision (HOBBIT §3.2).

        Args:
            t1: largest unimportance that is read in high precision, 0 to 1.
        """
        return {}

    def start(self) -> None:
        """Sets up state; `shape`, `options`, `rng` and `priorities` are there."""

    def update(self, event: GateEvent) -> bool | None:
        """Changes `priorities` in place after a router has selected. False where it left them as they were: nothing has to be published."""
        return None

    def resize(self, capacity: float) -> None:
        """The buffer has been resized, between events: it now holds `capacity` experts (`Shape.capacity`). What has been learned stays.

        Override it if anything but `shape` depends on the capacity, and call this first.
        """
        self.shape = replace(self.shape, capacity=capacity)

    def reset_sequence(self, sequence: int = 0) -> None:
        """This sequence begins a new text: its next token is the first. Others may go on (`GateEvent.sequences`)."""

    def prepare(self, events: Iterable[GateEvent]) -> None:
        """Offline policies see all events before the first `update`."""


def with_row(rows: np.ndarray, n: int) -> np.ndarray:
    """`rows`, or a copy that has a row `n`: the new ones are 0."""
    return rows if n < len(rows) else np.concatenate([rows, np.zeros((n + 1 - len(rows), *rows.shape[1:]), rows.dtype)])


def used(event: GateEvent) -> tuple[np.ndarray, np.ndarray | int]:
    """Experts an event chose, each once, and how many of its tokens chose each (1 for a single token)."""
    if len(event.ids) == 1:
        return event.ids[0], 1
    return np.unique(event.ids, return_counts=True)
