"""How memory is divided: the budget of the process, and the bound of a device; and what
to say when it cannot be.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..errors import BudgetError, OptionError
from ..system.memory import MIB, Budget, format_size, parse_percent, parse_size, rss

# for what cannot be measured before the first token: events and rows that wait, Python
# objects, sampler
RESERVE = 16 * MIB
# without the model: planned for every process that is not larger, so that every command
# names the same needs
_PROCESS = 76 << 20
_LIBRARIES = 8 << 20  # llama.cpp and numpy take this much more once a model is loaded
CELLS = 64  # tokens: so much of the KV cache is taken back at a time
_CTX_STEP = 256  # llama.cpp rounds contexts up to this
ALLOCATED = ("weights", "state", "compute", "work", "outputs")  # of a MemoryPlan, by llama.cpp


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of host memory at a context of `n_ctx` tokens, what a model takes and what
    that leaves for its experts: as llama.cpp plans it before it is loaded, as it is
    once it is loaded, and within a budget. What lies on a GPU does not count.

    Attributes:
        weights: outside the routed experts, without tables that stay on disk.
        embedding: of the weights, the token embedding.
        on_disk: of tables whose rows are read as they are used, as the token embedding.
            Not in memory, and in no total.
        row_cache: for rows of these tables that were used last.
        state: KV cache and recurrent state.
        compute: graph buffers for the largest batch; they, `work` and `outputs` are
            resident only once such a batch has come.
        work: the CPU backend's work area for it; of a planned model as ordinary experts
            would need it, a little more than those in an expert buffer.
        outputs: logits that llama.cpp and llama_cpp keep.
        process: without the rest: interpreter, libraries, the app.
        extras: other files that are loaded, as a draft model; of a server also prompts
            outside the context, and samplers.
        arena_floor, arena_full: the smallest arena for experts, and the one that holds
            all of them.
        budget: of the process; 0: only the arena is bounded.
        arena: for experts, high and low versions together.
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
        """Bytes that llama.cpp allocates."""
        return self.weights + self.state + self.computing

    @property
    def fixed(self) -> int:
        """Everything but the experts."""
        return self.process + self.llama_cpp + self.row_cache + self.extras + RESERVE

    @property
    def floor(self) -> int:
        """What the model needs at this context, as every command names it: the smallest
        budget that is not refused, in whole MiB.
        """
        return -(-(self.fixed + self.arena_floor) // MIB) * MIB

    def default_share(self, budget: Budget) -> float:
        """Share of the experts that stay in memory within a budget, in a process of the
        usual size: the same for the same bound, so that what is decided by it can be
        repeated.
        """
        usual = replace(self, process=_PROCESS)
        if budget.process is not None and budget.process < usual.floor:
            return 0.0
        return min(1.0, budget.left(usual.fixed) / self.arena_full) if self.arena_full else 1.0

    def within(
        self, budget: int, planned_at: Callable[[int], MemoryPlan] | None = None
    ) -> MemoryPlan:
        """Gives the experts what the rest leaves of a budget, at most what holds all of
        them. Of a planned model asked before anything is loaded:
        llama.cpp would first clear the whole KV cache, and be killed for it.

        Args:
            planned_at: plans the same model at another context; None: its context stays
                as it is.

        Raises:
            BudgetError: less than their floor is left; its hint is what the model
                needs, and what would fit.
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
        """Bytes of each thing that the process holds or plans for, by name."""
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
    """Before llama.cpp reads a file's header, be it only to plan with it.

    Args:
        header_memory: of the file's `ModelIndex`.
        budget: of the process.

    Raises:
        BudgetError: it takes more than there is room for.
    """
    room = budget - rss()
    if header_memory > max(room, RESERVE):
        raise BudgetError(
            f"{path}: what its header says takes about {format_size(header_memory)} to read, and"
            f" there is room for {format_size(max(room, 0))}",
            hint={"memory": rss() + header_memory},
        )


def as_rounded(n_ctx: int) -> int:
    """Tokens that a context has where so many are asked for."""
    return -(-n_ctx // _CTX_STEP) * _CTX_STEP


def planned_process(nbytes: int) -> int:
    """Bytes that a process is planned to take without the model once it is loaded, of
    those that it takes now.
    """
    return max(_PROCESS, nbytes + _LIBRARIES)


# experts of a layer for each that a token uses, as Mixtral's and gpt-oss-20b's routers
# have at most
_TYPICAL_CHOICE = 8.0


def expected_bytes(nbytes: float, resident: float, choice: float = _TYPICAL_CHOICE) -> float:
    """Bytes that a token reads of `nbytes` that it uses, if this share of the experts
    is resident. Tokens come back to their experts, the more often the fewer of a layer
    they use: of what a share of the experts would miss by chance they miss one part in
    1 + returns * resident. The returns are fitted to docs/results: cache-policies.md,
    real-sizes.md, from which a test takes that they tell what was missed there.

    Args:
        choice: experts of a layer for each that a token uses.
    """
    returns = min(max(1.1 * choice - 6.0, 0.0), 8.0)
    return nbytes * max(1.0 - resident, 0.0) / (1.0 + returns * resident)


@dataclass(frozen=True)
class Pools:
    """Limits of the arenas for high and low versions, in bytes. Without low versions
    the low side is 0.

    Attributes:
        floor, full: smallest arena for high versions, and the one that holds all.
        low_floor, low_full: the same of the low versions.
        low_share: of both together, for low versions, as far as floors and fulls allow.
    """

    floor: int
    full: int
    low_floor: int = 0
    low_full: int = 0
    low_share: float = 0.0

    def split(self, arena: int) -> tuple[int, int]:
        """Arenas for high and low versions, together at most `arena`, which is at least
        both floors.
        """
        low = max(min(int(arena * self.low_share), self.low_full), self.low_floor)
        high = max(min(arena - low, self.full), self.floor)
        return high, min(arena - high, self.low_full)


_DEVICE_RESERVE = 512 * MIB


@dataclass(frozen=True)
class DeviceBound:
    """Bound of the memory on each device, experts and llama.cpp's own together: bytes,
    a share of what is free before a model is loaded, or `auto`: all of that but
    `device_reserve`, and no experts on devices where it is too little for them.
    """

    nbytes: int = 0
    share: float = 0.0
    auto: bool = False

    @classmethod
    def parse(cls, text: str | int) -> DeviceBound:
        """Reads 2 << 30, "2G", "80%" or "auto".

        Raises:
            OptionError: neither a size nor a share.
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
        """Bytes, on a device that had so many free."""
        if self.auto:
            return max(free - device_reserve(free), 0)
        return self.nbytes or int(self.share * free)


def device_reserve(free: int) -> int:
    """Of so many free bytes on a device, those that `auto` leaves alone: a backend's
    own work memory, which llama.cpp does not count, and other programs'.
    """
    return max(_DEVICE_RESERVE, free // 32)


@dataclass(frozen=True)
class DeviceRoom:
    """One device, in bytes.

    Attributes:
        bound: of everything that is allocated there.
        llama_cpp: what that takes there: weights, caches, compute buffers.
        free: by the driver's count, now.
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
        BudgetError: not one fits, or the bound is more than the device has.
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
    """(slots of a stage, stages): two with all experts of a layer, else one, else one
    with as many as fit, at least so many, else none (0, 0).

    Args:
        devices: of each, its room, what a stage of n slots takes there (0: it cannot
            have one), and what one slot of each layer takes.
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
