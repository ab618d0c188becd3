"""Recorded text on a simulated device that holds some of the experts; the others lie
behind a link and are sent before they are used, as the papers' systems do.

The live policies and predictors run on it unchanged. What the papers' systems do beside
these, and their baselines do not, is `Execution`. An expert takes as long to compute as
the device takes to read its bytes, for one token or for a prompt of a few hundred: that
is so while an expert gets fewer tokens than make a product bound by arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from moeoff.engine.buffer import ExpertBuffer
from moeoff.engine.driver import Driver
from moeoff.errors import BudgetError, OptionError
from moeoff.experts.profile import Profile
from moeoff.gguf.model_index import ModelIndex
from moeoff.policies import CacheShape, Strategy
from moeoff.policies.base import n_low, quotas
from moeoff.policies.hobbit import HIGH, LOW, SKIP, unimportance, versions
from moeoff.precision import LOSSLESS, Precision
from moeoff.routing.batch import Span
from moeoff.routing.event import GateEvent
from moeoff.routing.recording import Recording
from moeoff.routing.router import SOFTMAX
from moeoff.routing.trace import TraceHeader

# what a meter asks of a finished read
READ_FIELDS = np.dtype([(name, np.int64) for name in ("tensor", "expert", "t_done", "result")])
PREFETCH, DEMAND = 0, 2
ALWAYS, PROMPTS, NEVER = "always", "prompts", "never"
POPULAR, AS_NAMED, BY_ID = "popular", "as named", "by id"


@dataclass(frozen=True)
class Bandwidths:
    """Rates in GB/s (10^9 bytes). Decoding reads every weight once, so that a
    processor's rate is its memory's.

    The defaults are a desktop computer with an RTX 4090 in a PCIe 4.0 x16 slot: 85 % of
    what data sheets say.

    Attributes:
        link: to the device.
        device: of weights that the device computes with.
        host: of weights that the processor computes with, where it helps.
        layer_us: what a layer takes without its routed experts.
    """

    link: float = 26.8
    device: float = 857.0
    host: float = 70.0
    layer_us: float = 150.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise OptionError(f"{name} of a simulated machine must be positive, not {value}")


@dataclass(frozen=True)
class Execution:
    """The order in which a system sends and computes a layer's experts.

    The defaults are what the native store does.

    Attributes:
        eager: what a router selects is sent before all prefetches, and what was to be
            sent ahead for its layer and is not selected is given up (ProMoE §5.2).
            False: an expert is sent when it is its turn to be computed.
        reordered: when what is there is computed before what has to come (ProMoE §5.3;
            Fate §5.2.1 in prompts): ALWAYS, PROMPTS or NEVER. Else in `order`.
        chunked: a prefetch gives way after each matrix (ProMoE §5.1); False: after the
            whole expert.
        order: of a prompt's experts: those of the most tokens first (Fate §4.3), as the
            tokens name them, or by their numbers.
        cooperative: the processor computes with what is absent, beside the device
            (HOBBIT §4); sent is what is predicted alone.
        predict_us: from a router's input to what is predicted from it, beside computing
            (ProMoE §4.2: 200).
    """

    eager: bool = True
    reordered: str = ALWAYS
    chunked: bool = True
    order: str = POPULAR
    cooperative: bool = False
    predict_us: float = 0.0

    def arranged(self, event: GateEvent) -> np.ndarray:
        """[n] the selected experts, each once."""
        if self.order == POPULAR:
            return event.demand()
        distinct, first = np.unique(event.ids, return_index=True)
        return distinct if self.order == BY_ID else distinct[np.argsort(first)]


@dataclass(frozen=True)
class LowVersions:
    """Smaller copies that a device is sent in the place of absent experts; they are not
    kept.

    Attributes:
        share: of an expert's bytes, that its copy has.
        t1, t2: of unimportance: up to t1 the expert itself is sent, up to t2 the copy,
            above it nothing (HOBBIT §3.2); of a prompt by the token to which the expert
            matters most. 1: not by unimportance.
        prefill: the share of a prompt's experts that are sent as copies, those of the
            fewest tokens (Fate §4.5).
        mispredicted: in decode, what is absent and was not asked for is sent as a copy
            (Fate §5.3).
    """

    share: float
    t1: float = 1.0
    t2: float = 1.0
    prefill: float = 0.0
    mispredicted: bool = False

    def serving(
        self, event: GateEvent, experts: np.ndarray, asked: np.ndarray, n_experts: int
    ) -> np.ndarray:
        """[n] versions of these absent experts; asked: those that are on their way."""
        if self.t1 < 1:
            least = np.full(n_experts, 1.0)
            np.minimum.at(least, event.ids, np.minimum(unimportance(event.weights), 1))
            return versions(least[experts], self.t1, self.t2)
        out = np.full(len(experts), HIGH)
        if event.decode:
            out[~asked & self.mispredicted] = LOW
        else:
            count = np.bincount(event.ids.ravel(), minlength=n_experts)[experts]
            out[np.argsort(count, kind="stable")[: n_low(len(experts), self.prefill)]] = LOW
        return out

    def precision(self) -> Precision:
        """The same for the live predictor."""
        return Precision(
            self.t1, self.t2, self.prefill, low_tier="low", mispredicted_low=self.mispredicted
        )


@dataclass(frozen=True)
class DeviceResult:
    """Attributes:
    ns: of the simulated clock; stall_ns: in which the device did not compute. device,
    host: uses of experts by where these were when their router had selected. low,
    skipped: of the uses, those that a smaller copy served, and those that nothing did.
    uploads, up_bytes: what was sent over the link; ahead: pieces that were begun before
    a router had asked for them.
    """

    n_tokens: int
    ns: int
    stall_ns: int
    device: int
    host: int
    low: int
    skipped: int
    uploads: int
    up_bytes: int
    ahead: int

    @property
    def tps(self) -> float:
        return 1e9 * self.n_tokens / max(self.ns, 1)


Part = tuple[int, bool]  # an expert among those of all layers, as its copy


class DeviceBuffer:
    """As much of an expert buffer as a policy and a prefetcher ask of one: whole
    experts on a device, in one pool for all layers or, where `rooms` says how many each
    has, in a room for each.

    Evicted is what ranks lowest, among equals the least recently used; what is
    predicted only for what a router has selected. A layer with a full room evicts its
    own; what it computes with beyond its room goes again.

    Args:
        model: every gate must have the same matrices.
        vram_bytes: for experts, on the device.
        keep: as a strategy's: False drops experts after their use.
        low: smaller copies. Two gates' selections of them have their room in
            vram_bytes.
        widths: [n_gates, n_experts], each expert's bytes as a share of the model's.

    Attributes:
        rooms: experts of each layer that stay, or None. Two gates' selections are then
            held free for what does not.

    Raises:
        BudgetError: the device has room for fewer than twice what one gate selects.
    """

    gating = SOFTMAX  # of the demo model, the only one whose routers predict here

    def __init__(self, model: TraceHeader, speeds: Bandwidths, vram_bytes: int, *, keep: bool = True, execution: Execution = Execution(),
                 low: LowVersions | None = None, widths: np.ndarray | None = None):  # fmt: skip
        self._speeds, self._execution, self._low, self._keep = speeds, execution, low, keep
        self._gate_ns, self._eager, self._width = (
            round(1000 * speeds.layer_us),
            execution.eager,
            model.n_experts,
        )
        self.priorities = np.zeros((model.n_gates, model.n_experts), np.float32)
        self.tensors = [
            SimpleNamespace(
                gate=t.gate, layer=t.layer, matrix=t.matrix, ne=(1, 1, t.n_experts), nbytes=t.nbytes
            )
            for t in model.tensors
        ]
        self.arena_full = model.full_bytes
        self._of_gate = [
            sorted(
                (i for i, t in enumerate(model.tensors) if t.gate == g),
                key=lambda i: model.tensors[i].matrix,
            )
            for g in range(model.n_gates)
        ]
        self._clock = self.now = self._idle_since = 0
        self.counts = dict.fromkeys(("hits", "misses", "prefetched", "stall_ns", "busy_ns"), 0)
        self._callback: Callable[[GateEvent], None] | None = None
        self._reads: list[tuple[int, int, int, int]] = []
        self._logs_reads = False
        self._n_used = model.n_used
        each = np.array(
            [sum(model.tensors[i].nbytes for i in tensors) for tensors in self._of_gate]
        )
        self._sizes = (
            each[:, None] * (np.ones(self.priorities.shape) if widths is None else widths)
        ).ravel()
        self._largest = float(self._sizes.max())
        self._bytes = vram_bytes - (
            0 if low is None else 2 * model.n_used * low.share * self._largest
        )
        if self._bytes < 2 * model.n_used * self._largest:
            raise BudgetError(
                f"a device with {vram_bytes} bytes for experts holds fewer of them than a gate"
                " selects"
            )
        self._matrices = np.array(
            [[sum(1 << model.tensors[i].matrix for i in tensors)] for tensors in self._of_gate],
            np.uint8,
        )
        n = self.priorities.size
        self._layer = np.repeat(np.arange(model.n_gates), self._width)
        # keeps: what a predictor wants
        self._resident, self._space, self._needed, self._keeps = (
            np.zeros(n, bool) for _ in range(4)
        )
        self._used_at = np.zeros(n, np.int64)
        self._copies: set[int] = set()  # on the device
        self._jobs: dict[int, list[Part]] = {DEMAND: [], PREFETCH: []}
        self._ready: dict[Part, int] = {}  # when what is queued ahead was predicted
        self._begun: dict[Part, int] = {}  # pieces that have been sent
        self._sent: tuple[Part, int, int] | None = None  # start, end
        self.rooms: list[int] | None = None
        self.sent = dict.fromkeys(
            ("device", "host", "low", "skipped", "uploads", "up_bytes", "ahead"), 0
        )

    # --- what policies and prefetchers ask ---

    running = True
    low_arena_full = 0

    def set_gate_callback(
        self, callback: Callable[[GateEvent], None] | None, predictor: None = None
    ) -> None:
        """Without a native thread: what is predicted is predicted in the callback."""
        self._callback = callback

    def publish(self) -> None:
        """The table is read as it is."""

    def drain(self) -> None:
        """Events are delivered at once."""

    def log_reads(self, on: bool = True) -> None:
        self._logs_reads = on

    def take_reads(self) -> np.ndarray:
        """Return and clear the records of whole experts sent since the last call."""
        reads, self._reads = self._reads, []
        return np.array(reads, READ_FIELDS)

    def stats(self) -> Any:
        return SimpleNamespace(
            disk_busy_ns=self.counts["busy_ns"],
            reads=len(self._of_gate[0]) * self.sent["uploads"],
            cache_bytes=round(self.arena_full * self.capacity / self._sizes.size),
            low_cache_bytes=0,
            prefetch_issued=self.counts["prefetched"],
        )

    def fill_layers(self) -> None:
        """Make all experts resident in as many first layers as fit."""
        n = int(self.capacity) // self._width
        self._resident[: n * self._width] = self._space[: n * self._width] = True

    def divide(self, policy: Any) -> None:
        """A room for each layer, as the policy divides them."""
        # from here on the stats are without what is held free
        self.rooms = [self._width] * self.priorities.shape[0]
        shape = CacheShape(*self.priorities.shape, self._n_used, self.capacity)
        if policy is not None:
            policy.resize(shape.capacity)
        self.rooms = quotas(shape, 0) if policy is None else policy.divide(shape, policy.options)

    @property
    def capacity(self) -> float:
        """Experts, of the mean size."""
        free = 0 if self.rooms is None else 2 * self._n_used * self._largest
        return float(min((self._bytes - free) / self._sizes.mean(), self._sizes.size))

    def residency(self, *, low: bool = False) -> np.ndarray:
        resident = (
            np.isin(np.arange(self._resident.size), list(self._copies)) if low else self._resident
        )
        return resident.reshape(self.priorities.shape) * self._matrices

    def lacks(self, gate: int, experts: np.ndarray, *, low: bool = False) -> bool:
        at = gate * self._width + experts
        return any(not self._resident[i] and not (low and i in self._copies) for i in at.tolist())

    def prefetch(
        self,
        gate: int,
        experts: Sequence[int],
        n_read: int | None = None,
        *,
        low: bool = False,
        limit: int = -1,
    ) -> int:
        n_queued, n_each = 0, len(self._of_gate[gate])
        for place, i in enumerate(gate * self._width + int(e) for e in experts):
            if self._resident[i] or (i, low) in self._begun or self._has((i, low)):
                self._keeps[i] |= not self._needed[i]
            elif not any((i, low) in jobs for jobs in self._jobs.values()):
                if (n_read is None or place < n_read) and (limit < 0 or n_queued + n_each <= limit):
                    self._jobs[PREFETCH].append((i, low))
                    self._ready[i, low] = self.now + round(1000 * self._execution.predict_us)
                    self._keeps[i] |= not low
                    n_queued += n_each
        self.counts["prefetched"] += n_queued
        self._start()
        return n_queued

    def compute(self, event: GateEvent) -> None:
        """Sends what is absent, and computes."""
        chosen = self._execution.arranged(event).astype(np.int64)
        experts = event.gate * self._width + chosen
        resident = self._resident[experts].copy()
        version = np.full(len(experts), HIGH)
        if self._low is not None:
            asked = np.array(
                [any((i, False) in jobs for jobs in self._jobs.values()) for i in experts.tolist()],
                bool,
            )
            version = np.where(
                resident, HIGH, self._low.serving(event, chosen, asked | resident, self._width)
            )
            of_expert = np.full(self._width, HIGH)
            of_expert[chosen] = version
            event.versions = of_expert[event.ids].astype(np.uint8)
        parts = [(i, v == LOW) for i, v in zip(experts.tolist(), version.tolist()) if v != SKIP]
        n_each, n_there = len(self._of_gate[event.gate]), sum(map(self._has, parts))
        for name, n in zip(
            ("device", "host", "low", "skipped"),
            (resident.sum(), (~resident).sum(), (version == LOW).sum(), (version == SKIP).sum()),
        ):
            self.sent[name] += int(n)
        event.n_hit, event.n_miss, event.t_ns = (
            n_each * n_there,
            n_each * (len(parts) - n_there),
            self.now,
        )
        self.counts["hits"] += event.n_hit
        self.counts["misses"] += event.n_miss
        span = slice(event.gate * self._width, (event.gate + 1) * self._width)
        self._keeps[span] = False
        if self._eager:
            self._give_up(event.gate, set(parts))
            for part in parts:
                self._use(part)
                if not self._execution.cooperative:
                    self._request(part, len(self._jobs[DEMAND]))
        self._start()
        if self._callback is not None:
            self._callback(event)
        if self._execution.cooperative:
            self._run_on_both(parts)
        else:
            self._run(parts, event.decode or False)
        self._copies -= set(range(span.start, span.stop))
        self._needed[span] = False
        if not self._keep:
            self._resident[span] = self._space[span] = False
        if self.rooms is not None:
            while int(self._space[span].sum()) > self.rooms[event.gate] and self._evict(
                self._layer == event.gate, False
            ):
                pass
        self._until(self.now + self._gate_ns)

    def _run(self, parts: list[Part], is_decode: bool) -> None:
        """Computes them all."""
        reorders = self._execution.reordered == ALWAYS or (
            self._execution.reordered == PROMPTS and not is_decode
        )
        began, t, computing, left = self.now, float(self.now), 0.0, list(parts)
        while left:
            part = (
                next((part for part in left if self._has(part)), None)
                if reorders
                else left[0]
                if self._has(left[0])
                else None
            )
            if part is None:
                if not self._eager:
                    self._use(left[0])
                self._request(left[0], 0)
                self._start()
                # everything that could go is needed later: in an order of its own it
                # would wait for ever
                if self._sent is None:
                    self._needed[:] = False
                    self._use(left[0])
                    self._start()
                t = max(t, self._finish_read())
                continue
            if not self._eager:
                self._use(part)
            left.remove(part)
            ns = self._nbytes(part) / self._speeds.device
            t, computing = t + ns, computing + ns
            self._until(int(t))
            self._needed[part[0]] = False
            if not self._keep:
                self._resident[part[0]] = self._space[part[0]] = False
            self._start()
        self._until(round(t))
        self.counts["stall_ns"] += round(t - began - computing)

    def _run_on_both(self, parts: list[Part]) -> None:
        """Computes with what is there on the device, and with the others on the
        processor at the same time.
        """
        began = self.now
        device = sum(self._nbytes(part) for part in parts if self._has(part)) / self._speeds.device
        host = sum(self._nbytes(part) for part in parts if not self._has(part)) / self._speeds.host
        self.counts["stall_ns"] += round(max(host - device, 0))
        self._until(round(began + max(device, host)))

    def _use(self, part: Part) -> None:
        i, is_low = part
        if not is_low:
            self._clock += 1
            self._used_at[i], self._needed[i] = self._clock, True

    def _request(self, part: Part, place: int) -> None:
        if not self._has(part) and part not in self._jobs[DEMAND]:
            if part in self._jobs[PREFETCH]:
                self._jobs[PREFETCH].remove(part)
            self._jobs[DEMAND].insert(place, part)

    def _give_up(self, gate: int, chosen: set[Part]) -> None:
        """Cancel the prefetches for this gate that its router has not selected.

        A piece that is being sent arrives first.
        """
        for part in [
            part
            for part in self._jobs[PREFETCH]
            if self._layer[part[0]] == gate and part not in chosen
        ]:
            self._jobs[PREFETCH].remove(part)
            if self._sent is None or self._sent[0] != part:
                self._forget(part)

    def _forget(self, part: Part) -> None:
        if self._begun.pop(part, None) is not None and not part[1] and not self._resident[part[0]]:
            self._space[part[0]] = False

    def _has(self, part: Part) -> bool:
        i, is_low = part
        return i in self._copies if is_low else bool(self._resident[i])

    def _nbytes(self, part: Part) -> float:
        i, is_low = part
        return float(self._sizes[i]) * (
            self._low.share if is_low and self._low is not None else 1.0
        )

    def _until(self, t: int) -> None:
        while True:
            if self._sent is not None and self._sent[2] <= t:
                self._finish_read()
                continue
            ready = [self._ready[part] for part in self._jobs[PREFETCH]]
            later = [at for at in ready if self.now < at <= t]
            if self._sent is not None or not later:
                break
            self.now = min(later)
            self._start()
        self.now = max(self.now, t)

    def _finish_read(self) -> int:
        if self._sent is None:
            raise AssertionError("an expert is waited for that nobody sends")
        part, start, end = self._sent
        self._sent, self.now, self._idle_since = None, max(self.now, end), end
        self.counts["busy_ns"] += end - start
        self._begun[part] += 1
        if self._logs_reads and not part[1]:
            tensors = self._of_gate[self._layer[part[0]]]
            sent = (
                tensors[self._begun[part] - 1 : self._begun[part]]
                if self._execution.chunked
                else tensors
            )
            self._reads += [(tensor, part[0] % self._width, end, 0) for tensor in sent]
        level = next((level for level, jobs in self._jobs.items() if part in jobs), None)
        if self._begun[part] == self._pieces:
            del self._begun[part]
            if level is not None:
                self._jobs[level].remove(part)
            if part[1]:
                self._copies.add(part[0])
            else:
                self._resident[part[0]] = True
            self.sent["uploads"] += 1
        elif level is None:
            self._forget(part)
        self.sent["up_bytes"] += round(self._nbytes(part) / self._pieces)
        self._start()
        return end

    @property
    def _pieces(self) -> int:
        return len(self._of_gate[0]) if self._execution.chunked else 1

    def _start(self) -> None:
        """The link takes the next piece that there is room for, as soon as it is idle."""
        if self._sent is not None:
            return
        for level in (DEMAND, PREFETCH):
            for part in self._jobs[level]:
                if level == PREFETCH and self._ready[part] > self.now:
                    continue
                if part in self._begun or part[1] or self._make_room(part[0], level == DEMAND):
                    self._begun.setdefault(part, 0)
                    self.sent["ahead"] += level == PREFETCH
                    self._space[part[0]] |= not part[1]
                    start = max(self._idle_since, self.now)
                    self._sent = (
                        part,
                        start,
                        start + round(self._nbytes(part) / self._pieces / self._speeds.link),
                    )
                    return

    def _make_room(self, i: int, is_demand: bool) -> bool:
        if self.rooms is None:
            while float(self._sizes[self._space].sum() + self._sizes[i]) > self._bytes:
                if not self._evict(np.ones(self._resident.size, bool), is_demand):
                    return False
            return True
        held, rooms = (
            np.bincount(self._layer[self._space], minlength=len(self.rooms)),
            np.array(self.rooms),
        )
        gate = int(self._layer[i])
        if held[gate] < rooms[gate] or self._evict(self._layer == gate, is_demand):
            return True
        beyond = np.maximum(held - rooms, 0)
        return int(beyond.sum()) < 2 * self._n_used or (
            is_demand and self._evict((beyond > 0)[self._layer], True)
        )

    def _evict(self, among: np.ndarray, is_demand: bool) -> bool:
        """The lowest of those that no gate needs; what is predicted gives way to demand
        alone.
        """
        evictable = np.flatnonzero(
            among & self._resident & ~self._needed & (is_demand | ~self._keeps)
        )
        if not len(evictable):
            return False
        lowest = evictable[
            np.lexsort(
                (
                    evictable,
                    self._used_at[evictable],
                    self.priorities.ravel()[evictable],
                    self._keeps[evictable],
                )
            )[0]
        ]
        self._resident[lowest] = self._space[lowest] = self._keeps[lowest] = False
        return True


def decode(buffer: DeviceBuffer, recording: Recording, driver: Driver, tokens: int) -> int:
    """Computes a text's first tokens one by one, told to the driver as `Llama` tells
    it; returns how many there were.
    """
    position, n_tokens = 0, 0
    for event in recording.events(0, tokens):
        if event.gate == 0:
            position = 0 if recording.starts[n_tokens] else position + 1
            driver.begin(
                recording.tokens[n_tokens : n_tokens + 1],
                {0: Span(position, position + 1, 1, True)},
                True,
            )
            n_tokens += 1
        buffer.compute(event)
    return n_tokens


def on_device(recording: Recording, strategy: Strategy, model_index: ModelIndex, speeds: Bandwidths, *, share: float, by_layer: bool = False, whole_layers: bool = False,
              execution: Execution = Execution(), low: LowVersions | None = None, widths: np.ndarray | None = None, profile: Profile | None = None,
              tokens: int = 256, prompt: int = 0) -> DeviceResult:  # fmt: skip
    """Decodes the text's first tokens, or reads a prompt, with a device that computes
    with all experts and holds some of them.

    Args:
        share: of the experts' bytes in their widths, that the device holds.
        by_layer: in a room for each layer: the policy's quotas, else as many for each.
        whole_layers: the device begins with the first layers' experts.
        prompt: tokens of a prompt, which is timed after as many others have been read
            in one batch; 0: tokens are decoded.
        execution, low, widths: as of `DeviceBuffer`.
        tokens: how many of the recording at most, which has gate inputs if the
            strategy's predictor reads them.

    Raises:
        BudgetError: the device has room for fewer than twice what one gate selects.
        OptionError: the strategy needs a profile.
    """
    model = recording.model
    nbytes = sum(t.nbytes * t.n_experts for t in model.tensors) * (
        1.0 if widths is None else float(widths.mean())
    )
    buffer = DeviceBuffer(
        model,
        speeds,
        int(share * nbytes),
        keep=strategy.keep,
        execution=execution,
        low=low,
        widths=widths,
    )
    precision = LOSSLESS if low is None else low.precision()
    driver = Driver(cast(ExpertBuffer, buffer))
    driver.attach(strategy, model_index, profile=profile, precision=precision)
    if by_layer:
        buffer.divide(driver.policy)
    if whole_layers:
        buffer.fill_layers()
    if not prompt:
        return DeviceResult(
            decode(buffer, recording, driver, tokens),
            buffer.now,
            buffer.counts["stall_ns"],
            **buffer.sent,
        )
    read_prompt(buffer, recording, driver, 0, prompt)
    before, ns, stall_ns = dict(buffer.sent), buffer.now, buffer.counts["stall_ns"]
    read_prompt(buffer, recording, driver, prompt, prompt)
    sent = {name: value - before[name] for name, value in buffer.sent.items()}
    return DeviceResult(prompt, buffer.now - ns, buffer.counts["stall_ns"] - stall_ns, **sent)


def read_prompt(
    buffer: DeviceBuffer, recording: Recording, driver: Driver, start: int, n_tokens: int
) -> None:
    """Compute a prompt as one batch, which is a text of its own.

    All of its tokens must have inputs if the strategy's predictor reads them.
    """
    part = recording.part(start, start + n_tokens)
    driver.begin(part.tokens, {0: Span(0, n_tokens, n_tokens, False)}, False)
    for gate in range(recording.model.n_gates):
        x = None if part.inputs is None else part.inputs[:, gate].astype(np.float32)
        buffer.compute(
            GateEvent(gate, part.ids[:, gate], part.weights[:, gate], None, x, decode=False)
        )
