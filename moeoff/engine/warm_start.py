"""Warm start: save the resident slices at close, and reload them in the background at
the next start. Also reads between requests, for the next prompt.

Each model has a file in the user's cache folder, with high and low versions but no
tiers. Without a file, a strategy may start with the most popular experts.
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
# seconds without a finished read; remaining reads continue in the background, or are
# dropped by the first gate
_STUCK = 10.0
# largest part of an arena lost to rounding of slots to huge pages
_ROUNDING = 64
# resolution of a prompt's weight: smaller differences move no experts
_HALVES = 2
WARM_VERSION = 1  # of the file format


def _entry(model_index: ModelIndex) -> CacheEntry:
    return CacheEntry("warm.npz", version=WARM_VERSION, model=model_index.identity)


def save(buffer: ExpertBuffer, model_index: ModelIndex) -> None:
    """Save the residency."""
    high, low = buffer.residency(), buffer.residency(low=True)
    if high.any() or low.any():
        _entry(model_index).save_arrays(high=high, low=low)


def restore(buffer: ExpertBuffer, model_index: ModelIndex, arenas: tuple[int, int]) -> int:
    """Queue the saved slices that fit, after demand. Return their number.

    Args:
        arenas: Bytes for high and for low versions.
    """
    if arenas[0] >= buffer.arena_full and not arenas[1]:
        return _preload(buffer, np.full_like(buffer.residency(), 0xFF), arenas[0], False)
    layout: Layout = ("i", buffer.priorities.shape, 0, 255)
    saved = _entry(model_index).load_arrays(
        {"high": layout, "low": layout}, 2 * buffer.priorities.nbytes + SMALL
    )
    if saved is None:
        return 0
    # the few low versions first: where a high one is resident the native side skips the
    # low one, and residency would depend on timing
    return _preload(buffer, saved["low"], arenas[1], True) + _preload(
        buffer, saved["high"], arenas[0], False
    )


def preload_popular(buffer: ExpertBuffer, counts: np.ndarray, arena: int) -> int:
    """Fill the arena with the most popular experts, and wait for them (EdgeMoE §3.3.3).

    Args:
        counts: [n_gates, n_experts] accesses.
        arena: Arena size in bytes.
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
    """The experts of recent prompts. A prompt counts each expert once, with half the
    weight of the next prompt.

    Attributes:
        weights: [n_gates, n_experts] float32, from 0 to 2.
    """

    wants_decode = False

    def __init__(self, shape: tuple[int, int]):
        self.weights = np.zeros(shape, np.float32)
        # True if the last batch decoded; start time of a prompt's first batch
        self._decodes, self._begun = True, 0

    def begin(self, tokens: np.ndarray, decode: bool) -> None:
        if self._decodes and not decode:
            self._begun = time.monotonic_ns()
        self._decodes = decode

    def observe(self, event: GateEvent) -> None:
        if event.decode:
            return
        if event.t_ns >= self._begun:  # first batch of a prompt
            self._begun = sys.maxsize
            self.weights *= 0.5
        row = self.weights[event.gate]
        row[np.unique(event.ids[row[event.ids] < 1])] += 1


def swap_in(
    buffer: ExpertBuffer, weights: np.ndarray, ended: Callable[[], bool] = lambda: False
) -> None:
    """Queue absent experts of recent prompts in place of less needed ones.

    For idle time; the arena may be full. Gates cancel reads of experts that they do not
    select.

    Args:
        weights: [n_gates, n_experts], as in `PromptUses`.
        ended: As in `fill_free`.
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
    """Queue absent experts into free memory, without evictions, during idle time.

    A prompt selects most experts, so every layer gets equally many, by the policy's
    priority. Reads that have not begun at the next gate are cancelled.

    Args:
        ended: Function that returns True once a batch waits, to stop.
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
    # rank by rank: the first of each gate, then the second of each gate, ...
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
