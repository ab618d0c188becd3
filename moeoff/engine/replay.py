"""Decisions of a recorded run, taken again: a lossy run then gives the same numbers independent of what is resident."""

from __future__ import annotations

import os

import numpy as np

from ..errors import OptionError
from ..gate_event import GateEvent
from ..simulate.trace import Model, Trace
from .expert_buffer import ExpertBuffer


class Replay:
    """Gives a recorded run's decisions to a started buffer, and checks that the run follows the recorded one.

    Raises:
        OptionError: no trace, or one of another model, or it needs low versions and there is no arena for them.
    """

    def __init__(self, path: str | os.PathLike[str], buffer: ExpertBuffer, model: Model):
        trace = Trace.read(path)
        if trace.model != model:
            raise OptionError(f"{path}: is a trace of another model ({trace.model.name})")
        self._path, self._events, self._at = path, trace.events, 0
        buffer.force(trace.decisions())
        if trace.rerouted:
            buffer.force_experts(trace.experts())

    def follow(self, event: GateEvent) -> None:
        """Raises `OptionError` if the recorded run had another event here. After its end everything is allowed."""
        if self._at < len(self._events):
            recorded = self._events[self._at]
            self._at += 1
            if event.gate != recorded.gate or not np.array_equal(_router_ids(event), _router_ids(recorded)):
                raise OptionError(
                    f"{self._path}: another run: at event {self._at} it chose other experts (the prompts, seeds and batch sizes must be the same)"
                )


def _router_ids(event: GateEvent) -> np.ndarray:
    return event.ids if event.router_ids is None else event.router_ids
