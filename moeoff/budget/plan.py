"""Division of memory: the budget of the process, and the bound of a device."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..errors import BudgetError, OptionError
from ..system.memory import MIB, Budget, format_size, parse_percent, parse_size, rss

# Bytes that cannot be measured before the first token: queued events and rows, Python
# objects, sampler.
RESERVE = 16 * MIB
# Bytes of a process without a model. Planned for every process that is not larger, so
# that all commands report the same needs.
_PROCESS = 76 << 20
_LIBRARIES = 8 << 20  # bytes that llama.cpp and numpy take in addition with a model
CELLS = 64  # tokens of the KV cache that are reclaimed at a time
_CTX_STEP = 256  # llama.cpp rounds contexts up to this
ALLOCATED = ("weights", "state", "compute", "work", "outputs")  # of a MemoryPlan, by llama.cpp


@dataclass(frozen=True)
class MemoryPlan:
    """The host memory of a planned or loaded model in bytes, without a GPU's memory.

    Attributes:
        n_ctx: Context length in tokens.
        weights: Weights outside the routed experts, without row tables on disk.
        embedding: The token embedding's part of `weights`.
        on_disk: Row tables on disk. They are in no total.
        row_cache: Cache of recently used rows of these tables.
        state: KV cache and recurrent state.
        compute: Graph buffers of the largest batch. `compute`, `work` and `outputs`
            become resident with the first batch of that size.
        work: The CPU backend's work area for that batch. A planned model counts
            ordinary experts, which need a little more than an expert buffer.
        outputs: Logits that llama.cpp and llama_cpp keep.
        process: Interpreter, libraries and the app.
        extras: Other loaded files, such as a draft model; for a server also samplers
            and prompts outside the context.
        arena_floor: Smallest arena for experts.
        arena_full: Arena that holds all experts.
        budget: Budget of the process, 0 if only the arena is bounded.
        arena: Arena for high and low versions together.
    """

    n_ctx: int = 0
    weights: int = 0
    embedding: int = 0
    on_disk: int = 0
    row_cache: int = 0
    state: int = 0
    compute: int = 0
    work: int = 0
    outputs: int = 0
    process: int = 0
    extras: int = 0
    arena_floor: int = 0
    arena_full: int = 0
    budget: int = 0
    arena: int = 0

    @property
    def computing(self) -> int:
        return self.compute + self.work + self.outputs

    @property
    def llama_cpp(self) -> int:
        """The bytes that llama.cpp allocates."""
        return self.weights + self.state + self.computing

    @property
    def fixed(self) -> int:
        """The bytes of everything but the experts."""
        return self.process + self.llama_cpp + self.row_cache + self.extras + RESERVE

    @property
    def floor(self) -> int:
        """The smallest budget that is not refused at this context, in whole MiB."""
        return -(-(self.fixed + self.arena_floor) // MIB) * MIB

    def default_share(self, budget: Budget) -> float:
        """Return the resident share of experts within a budget.

        The process counts with its default size, so that decisions by this share depend
        on the budget alone and can be repeated.
        """
        usual = replace(self, process=_PROCESS)
        if budget.process is not None and budget.process < usual.floor:
            return 0.0
        return min(1.0, budget.left(usual.fixed) / self.arena_full) if self.arena_full else 1.0

    def within(
        self, budget: int, planned_at: Callable[[int], MemoryPlan] | None = None
    ) -> MemoryPlan:
        """Return this plan with the rest of a budget as its arena.

        Call it for a planned model before it is loaded: llama.cpp would clear the whole
        KV cache first, and the system would end the process.

        Args:
            budget: Budget of the process in bytes.
            planned_at: Plan of the same model by context length, None to keep the
                context.

        Raises:
            BudgetError: The budget is below the floor. The hint names the floor, and a
                context that fits.
        """
        if budget < self.floor:
            raise self._refusal(
                budget, 0 if planned_at is None else self._context_within(budget, planned_at)
            )
        return replace(self, budget=budget, arena=min(budget - self.fixed, self.arena_full))

    def _context_within(self, budget: int, planned_at: Callable[[int], MemoryPlan]) -> int:
        """Find the longest shorter context that fits into a budget, in tokens; 0 if
        there is none.
        """
        lengths = range(_CTX_STEP, self.n_ctx, _CTX_STEP)
        n = bisect.bisect_right(lengths, budget, key=lambda n_ctx: planned_at(n_ctx).floor)
        return lengths[n - 1] if n else 0

    def items(self) -> dict[str, int]:
        """Return the bytes of each part of the process's memory, by name."""
        embedding = min(self.embedding, self.weights)
        return {
            "python": self.process,
            "token_embedding": embedding,
            "weights": self.weights - embedding,
            **({"row_cache": self.row_cache} if self.row_cache else {}),
            "state": self.state,
            "compute_buffers": self.compute,
            "work_area": self.work,
            "outputs": self.outputs,
            **({"extras": self.extras} if self.extras else {}),
            "reserve": RESERVE,
            "experts": self.arena,
        }

    def _refusal(self, budget: int, n_ctx: int) -> BudgetError:
        needed = self.floor
        rows = (
            f"{format_size(self.row_cache)} for rows of tables on disk, " if self.row_cache else ""
        )
        extras = (
            f"{format_size(self.extras)} for prompts outside the context, samplers and other"
            " files, "
            if self.extras
            else ""
        )
        return BudgetError(
            f"a budget of {format_size(budget)} is too small: this model needs"
            f" {format_size(needed)}: {format_size(self.weights)} for weights outside the experts,"
            f" {rows}{format_size(self.state)} for the KV cache at {self.n_ctx} tokens,"
            f" {format_size(self.computing)} for computing,"
            f" {extras}{format_size(self.process + RESERVE)} for Python and a reserve, and at least"
            f" {format_size(self.arena_floor)} for experts",
            hint={"memory": needed} | ({"n_ctx": n_ctx} if n_ctx else {}),
        )


def require_header_room(path: str, header_memory: int, budget: int) -> None:
    """Check that llama.cpp can read a file's header within a budget.

    Args:
        header_memory: `ModelIndex.header_memory` of the file in bytes.
        budget: Budget of the process in bytes.

    Raises:
        BudgetError: The header exceeds the budget.
    """
    room = budget - rss()
    if header_memory > max(room, RESERVE):
        raise BudgetError(
            f"{path}: what its header says takes about {format_size(header_memory)} to read, and"
            f" there is room for {format_size(max(room, 0))}",
            hint={"memory": rss() + header_memory},
        )


def as_rounded(n_ctx: int) -> int:
    """Return the context length that llama.cpp makes of a requested one."""
    return -(-n_ctx // _CTX_STEP) * _CTX_STEP


def planned_process(nbytes: int) -> int:
    """Return the bytes to plan for a process that takes nbytes before it loads."""
    return max(_PROCESS, nbytes + _LIBRARIES)


# experts of a layer for each that a token uses, as Mixtral's and gpt-oss-20b's routers
# have at most
_TYPICAL_CHOICE = 8.0


def expected_bytes(nbytes: float, resident: float, choice: float = _TYPICAL_CHOICE) -> float:
    """Return the bytes that a token reads of the `nbytes` that it uses.

    Accesses are skewed, the more the fewer experts of a layer a token uses: misses are
    1 / (1 + returns * resident) of those of random accesses. `returns` is fitted to
    docs/results (cache-policies.md, real-sizes.md), which a test compares.

    Args:
        resident: Resident share of the experts.
        choice: Experts of a layer per expert that a token uses.
    """
    returns = min(max(1.1 * choice - 6.0, 0.0), 8.0)
    return nbytes * max(1.0 - resident, 0.0) / (1.0 + returns * resident)


@dataclass(frozen=True)
class Pools:
    """The limits of the arenas for high and low versions in bytes.

    Attributes:
        floor: Smallest arena for high versions.
        full: Arena that holds all high versions.
        low_floor: Smallest arena for low versions, 0 without them.
        low_full: Arena that holds all low versions, 0 without them.
        low_share: Share of both arenas for low versions, within these limits.
    """

    floor: int
    full: int
    low_floor: int = 0
    low_full: int = 0
    low_share: float = 0.0

    def split(self, arena: int) -> tuple[int, int]:
        """Return the arenas for high and low versions, together at most `arena`.

        Args:
            arena: Bytes, at least both floors together.
        """
        low = max(min(int(arena * self.low_share), self.low_full), self.low_floor)
        high = max(min(arena - low, self.full), self.floor)
        return high, min(arena - high, self.low_full)


_DEVICE_RESERVE = 512 * MIB


@dataclass(frozen=True)
class DeviceBound:
    """A bound of the memory on each device, for experts and llama.cpp together.

    Attributes:
        nbytes: Bound in bytes, 0 if not given so.
        share: Share of the memory that is free before a model is loaded.
        auto: True for all free memory but `device_reserve`, and no experts on devices
            where that is too little for them.
    """

    nbytes: int = 0
    share: float = 0.0
    auto: bool = False

    @classmethod
    def parse(cls, text: str | int) -> DeviceBound:
        """Parse 2 << 30, "2G", "80%" or "auto".

        Raises:
            OptionError: The text is neither a size nor a share.
        """
        if text == "auto":
            return cls(auto=True)
        if isinstance(text, str) and text.strip().endswith("%"):
            try:
                share = parse_percent(text)
            except ValueError:
                share = 0.0
            if not 0 < share <= 1:
                raise OptionError(
                    f"a share of the device's memory lies between 0% and 100%, not {text!r}"
                )
            return cls(share=share)
        return cls(nbytes=parse_size(text))

    def __str__(self) -> str:
        if self.auto:
            return "auto"
        return format_size(self.nbytes) if self.nbytes else f"{self.share:.0%}"

    def of(self, free: int) -> int:
        """Return the bound in bytes on a device with `free` free bytes."""
        if self.auto:
            return max(free - device_reserve(free), 0)
        return self.nbytes or int(self.share * free)


def device_reserve(free: int) -> int:
    """Return the bytes that `auto` leaves free on a device.

    They are for other programs and for a backend's work memory, which llama.cpp does
    not count.
    """
    return max(_DEVICE_RESERVE, free // 32)


@dataclass(frozen=True)
class DeviceRoom:
    """The memory of one device in bytes.

    Attributes:
        bound: Bound of all allocations on the device.
        llama_cpp: Weights, caches and compute buffers on the device.
        free: Free memory now, as the driver reports it.
    """

    name: str
    bound: int
    llama_cpp: int
    free: int

    @property
    def for_experts(self) -> int:
        return min(self.bound - self.llama_cpp, self.free)


def slots_that_fit(
    room: DeviceRoom,
    bytes_of: Sequence[Callable[[int], int]],
    n_experts: int,
    divide: Callable[[int], Sequence[int]],
    *,
    least: int = 0,
    fixed: int = 0,
) -> list[int]:
    """Return the slots of each of the device's layers with experts: as many as fit.

    Args:
        bytes_of: Bytes of n slots, for each layer.
        divide: Experts that each layer keeps if all layers together keep so many.
        least: Slots that a layer needs; fewer if not every layer can have as many.
        fixed: Bytes that the device takes beside the slots.

    Raises:
        BudgetError: No slot fits, or the bound exceeds the device's memory.
    """

    def total(slots: Sequence[int]) -> int:
        return fixed + sum(of(n) for of, n in zip(bytes_of, slots, strict=True))

    def equal(n: int) -> list[int]:
        return [n] * len(bytes_of)

    if room.bound > room.llama_cpp + room.free:
        most = (room.llama_cpp + room.free) // MIB * MIB
        raise BudgetError(
            f"{format_size(room.bound)} is more than {room.name} has: {format_size(room.llama_cpp)}"
            f" taken by llama.cpp and {format_size(room.free)} free",
            hint={"vram": most},
        )
    one = total(equal(1))
    if one > room.for_experts:
        needed = -(-(room.llama_cpp + one) // MIB) * MIB
        raise BudgetError(
            f"{format_size(max(room.bound, 0))} on {room.name} is too small: llama.cpp takes"
            f" {format_size(room.llama_cpp)} there, and one expert of each layer"
            f" {format_size(one)}",
            hint={"vram": needed},
        )

    def largest(of: Callable[[int], list[int]], most: int) -> int:
        return bisect.bisect_right(range(1, most + 1), room.for_experts, key=lambda n: total(of(n)))

    least = min(least, largest(equal, n_experts))

    def divided(capacity: int) -> list[int]:
        return [max(n, least) for n in divide(capacity)]

    return divided(largest(divided, n_experts * len(bytes_of)))


# of a device's room for experts: what prompts gain by a stage, tokens lose by fewer
# slots
_STAGE_SHARE = 0.25


def stage_that_fits(
    devices: Sequence[tuple[DeviceRoom, Callable[[int], int], int]], n_experts: int, least: int
) -> tuple[int, int]:
    """Return the slots of a stage and the number of stages.

    That is two stages with all experts of a layer, else one, else one with as many as
    fit, else none: (0, 0).

    Args:
        devices: For each device its memory, the bytes of a stage of n slots (0 if the
            device cannot have one), and the bytes of one slot of each layer.
        least: Smallest number of slots of a stage.
    """

    def fits(n: int, n_stages: int = 1) -> bool:
        return all(
            0 < n_stages * stage(n) <= _STAGE_SHARE * room.for_experts for room, stage, _ in devices
        )

    if any(slots > (1 - _STAGE_SHARE) * room.for_experts for room, _, slots in devices):
        return 0, 0
    if fits(n_experts):
        return n_experts, 1 + fits(n_experts, 2)
    sizes = range(least, n_experts)
    n = bisect.bisect_left(sizes, True, key=lambda size: not fits(size))
    return (sizes[n - 1], 1) if n else (0, 0)
