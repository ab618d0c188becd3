"""Warm start: which slices were resident when a model was closed, so that the next
start loads them in the background; all of them where all fit. And what is read between
requests: for the next prompt.

One entry of the user's cache folder for each model. It holds high and low versions, not
tiers: a start with other tiers loads those. Where there is none, a strategy may begin
with the experts that other text used most.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np

from ..gguf.model_index import ModelIndex
from ..routing.event import GateEvent, Observer
from ..system.arrays import Layout
from ..system.files import SMALL
from ..system.user_cache import CacheEntry
from .buffer import ExpertBuffer

_POLL = 0.002  # seconds
# seconds without a read that ends: what is still queued comes in the background, or is
# dropped by the first gate
_STUCK = 10.0
# of an arena, the part that slots take ahead at most: huge pages, where it is larger
# than so many for each size of slots
_ROUNDING = 64
# of a prompt's weight, steps that are told apart: experts that differ by less stay
# where they are
_HALVES = 2
VERSION = 1  # of the arrays


def _entry(model_index: ModelIndex) -> CacheEntry:
    return CacheEntry("warm.npz", version=VERSION, model=model_index.identity)


def save(buffer: ExpertBuffer, model_index: ModelIndex) -> None:
    """Writes down what is resident."""
    high, low = buffer.residency(), buffer.residency(low=True)
    if high.any() or low.any():
        _entry(model_index).save_arrays(high=high, low=low)


def restore(buffer: ExpertBuffer, model_index: ModelIndex, arenas: tuple[int, int]) -> int:
    """Queues what was resident, as far as the arenas go; returns how many slices.
    Demand always comes first.

    Args:
        arenas: bytes for high and for low versions.
    """
    if arenas[0] >= buffer.arena_full and not arenas[1]:
        return _preload(buffer, np.full_like(buffer.residency(), 0xFF), arenas[0], False)
    layout: Layout = ("i", buffer.priorities.shape, 0, 255)
    saved = _entry(model_index).load_arrays(
        {"high": layout, "low": layout}, 2 * buffer.priorities.nbytes + SMALL
    )
    if saved is None:
        return 0
    # the few low ones first: once a high version is there, the native side leaves its
    # low one out, and what is resident would depend on the I/O threads' speed
    return _preload(buffer, saved["low"], arenas[1], True) + _preload(
        buffer, saved["high"], arenas[0], False
    )


def preload_popular(buffer: ExpertBuffer, counts: np.ndarray, arena: int) -> int:
    """Reads the experts that were used most in other text, as many as the arena holds,
    and returns when they are there: how an expert buffer is initialized (EdgeMoE
    §3.3.3).

    Args:
        counts: [n_gates, n_experts] uses.
        arena: bytes.
    """
    sizes = buffer.expert_bytes()
    order = np.argsort(-counts, axis=None, kind="stable")
    order = order[(sizes.ravel()[order] > 0) & (counts.ravel()[order] > 0)]
    n = int(np.searchsorted(np.cumsum(sizes.ravel()[order]), arena, "right"))
    before = buffer.stats().reads
    queued = sum(
        buffer.preload(int(index) // counts.shape[1], [int(index) % counts.shape[1]])
        for index in order[:n]
    )
    last, since = before, time.monotonic()
    while buffer.running and last < before + queued and time.monotonic() - since < _STUCK:
        time.sleep(_POLL)
        if (reads := buffer.stats().reads) > last:
            last, since = reads, time.monotonic()
    buffer.check()
    return queued


class PromptUses(Observer):
    """Which experts the last prompts needed. One reads an expert once, however many of
    its tokens chose it, so that each counts once; an earlier one half as much as the
    next.

    Attributes:
        weights: [n_gates, n_experts] float32, from 0 to 2.
    """

    wants_decode = False

    def __init__(self, shape: tuple[int, int]):
        self.weights = np.zeros(shape, np.float32)
        # whether the last batch decoded; when the first batch of a prompt began
        self._decodes, self._begun = True, 0

    def begin(self, tokens: np.ndarray, decode: bool) -> None:
        if self._decodes and not decode:
            self._begun = time.monotonic_ns()
        self._decodes = decode

    def observe(self, event: GateEvent) -> None:
        if event.decode:
            return
        if event.t_ns >= self._begun:  # the first of a prompt, which may be several batches
            self._begun = sys.maxsize
            self.weights *= 0.5
        row = self.weights[event.gate]
        row[np.unique(event.ids[row[event.ids] < 1])] += 1


def swap_in(
    buffer: ExpertBuffer, weights: np.ndarray, ended: Callable[[], bool] = lambda: False
) -> None:
    """While nothing computes: queues experts that the last prompts needed and that are
    absent, in the place of those that they needed less. The arena may be full. What has
    not come when its gate selects, and is not chosen, is dropped.

    Args:
        weights: [n_gates, n_experts], as `PromptUses` has them.
        ended: as `fill_free` takes it.
    """
    stats = buffer.stats()
    room = stats.cache_bytes - stats.low_cache_bytes
    room -= room // _ROUNDING
    slots = buffer.expert_bytes()
    resident = buffer.residency() > 0
    steps = np.floor(weights * _HALVES)
    order = np.lexsort((-buffer.priorities.ravel(), ~resident.ravel(), -steps.ravel()))
    stays = np.zeros(slots.size, bool)
    stays[order] = (np.cumsum(slots.ravel()[order]) <= room) & (slots.ravel()[order] > 0)
    stays = stays.reshape(slots.shape) & ((steps > 0) | resident)
    if not (stays & ~resident).any():
        return
    for gate, row in enumerate(stays):
        if ended():
            break
        experts = np.flatnonzero(row)
        buffer.prefetch(gate, experts[np.argsort(-weights[gate, experts], kind="stable")].tolist())


def fill_free(buffer: ExpertBuffer, ended: Callable[[], bool] = lambda: False) -> None:
    """While nothing computes: queues absent experts for the room that is left. Nothing
    is evicted for them, and what has not begun when the next gate selects is dropped.

    A prompt selects most experts of a layer, whichever they are: every layer gets as
    many, first those that the policy would keep the longest.

    Args:
        ended: True once a batch wants to begin: the layers that follow are left out.
    """
    stats = buffer.stats()
    room = (
        stats.cache_bytes
        - stats.low_cache_bytes
        - (stats.arena_committed - stats.low_arena_committed)
    )
    room -= stats.cache_bytes // _ROUNDING
    absent = buffer.expert_bytes() - buffer.expert_bytes(resident=True)
    order = np.argsort(np.where(absent > 0, -buffer.priorities, np.inf), axis=1, kind="stable")
    ranked = np.take_along_axis(absent, order, axis=1)
    # the first of each gate, the second of each gate, ...
    fits = (np.cumsum(ranked.T.ravel()) <= room).reshape(ranked.T.shape).T & (ranked > 0)
    for gate, experts in enumerate(fits):
        if ended():
            break
        buffer.preload(gate, order[gate, experts].tolist())


def _preload(buffer: ExpertBuffer, residency: np.ndarray, room: int, low: bool) -> int:
    queued = 0
    for gate, row in enumerate(buffer.expert_bytes(low=low)):
        experts = np.flatnonzero((residency[gate] != 0) & (row > 0))
        nbytes = np.cumsum(row[experts])
        n = int(np.searchsorted(nbytes, room, "right"))
        if n:
            room -= int(nbytes[n - 1])
            queued += buffer.preload(gate, experts[:n].tolist(), low=low)
    return queued
