"""Expert slots in device memory: their number for each layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

from ..budget.plan import DeviceBound, DeviceRoom, slots_that_fit, stage_that_fits
from ..errors import BudgetError, MoeoffError, OptionError
from ..llamacpp import native
from ..llamacpp.devices import devices
from ..llamacpp.llama import api
from ..system.memory import MIB, format_size
from .buffer import ExpertBuffer

AUTO = "auto"  # the fastest as measured

# how devices compute with experts; docs/internals/gpu.md
WAVES = "waves"  # centric, also for batches that need more experts than slots
MODES = {
    "cooperative": native.DEVICE_COOPERATIVE,
    "centric": native.DEVICE_CENTRIC,
    "reordered": native.DEVICE_REORDERED,
    WAVES: native.DEVICE_WAVES,
}
_UPLOADS = -1  # uploads per layer and step: as many as end in time


class DeviceTier:
    """The device slots of a running buffer's experts.

    Args:
        ctx: The llama_context that computes. Graphs of others do not use the slots.
        mode: One of `MODES`, or `AUTO`, which starts cooperative until `use`.
        n_used: Experts per token.
        free: Bytes free before the model was loaded, by device.
        low_share: Share of the slots for low versions, if the mode uploads any.
        staged: True to compute large batches in `WAVES` with a stage, if it takes at
            most a quarter of the memory.
        divide: Function that divides a number of experts among gates (Fate §4.4).

    Attributes:
        slots: Slots of each gate; 0: computed by the CPU.
        uses: By device name: fewest and most slots of a layer, and bytes of `experts`
            (with the stage) and `llama_cpp`.

    Raises:
        OptionError: No layer with experts is on a device, or a device cannot compute
            with them.
        BudgetError: No slot fits, or the bound exceeds a device's memory.
    """

    def __init__(
        self,
        buffer: ExpertBuffer,
        ctx: int,
        bound: DeviceBound,
        mode: str,
        n_used: int,
        free: dict[int, int],
        low_share: float,
        *,
        staged: bool,
        divide: Callable[[int], Sequence[int]],
    ):
        self._buffer, self._ctx, self._n_used, self._free = buffer, ctx, n_used, free
        self._staged, self._divide = staged, divide
        self._needs_slots = staged or mode != "cooperative"
        self._mode = "cooperative" if mode == AUTO else mode
        layers = {tensor.gate: tensor.layer for tensor in buffer.tensors}
        self._devices = [native.layer_device(ctx, layers[gate]) or 0 for gate in sorted(layers)]
        if not any(self._devices):
            raise OptionError(
                "`vram`: no layer with experts is computed on a device", hint={"n_gpu_layers": ...}
            )
        self._has_low = buffer.low_arena_full > 0 and mode != "cooperative"
        # a block with several types, or an unsupported one, has no slots
        self._devices = [
            handle if handle and self._can_compute(handle, gate) else 0
            for gate, handle in enumerate(self._devices)
        ]
        if not any(self._devices):
            raise OptionError(
                "`vram`: the experts of no layer are of one type that its device can compute with"
            )
        self._n_experts = buffer.priorities.shape[1]
        self._low_for_high = (
            low_share / max(1 - low_share, 0.01) * buffer.arena_full / max(buffer.low_arena_full, 1)
        )
        self._stage = (0, 0)
        self.slots: list[int] = []
        self.uses: dict[str, dict[str, int]] = {}
        self._is_placed = False
        self._place(bound)
        self._is_placed = True

    @property
    def ways(self) -> tuple[str, ...]:
        """The `MODES` that these slots allow; `AUTO` starts with the first."""
        return (
            ("cooperative", "centric")
            if min(use["n_slots"] for use in self.uses.values()) >= self._n_used
            else ("cooperative",)
        )

    def use(self, mode: str) -> None:
        """Switch between batches to one of `MODES` or "cpu". Slots keep experts."""
        if mode == self._mode:
            return
        api.llama_synchronize(self._ctx)
        self._buffer.set_device_mode(MODES.get(mode, native.DEVICE_OFF))
        self._mode = mode
        self._replan()

    def _place(self, bound: DeviceBound) -> None:
        self._free_slots()
        less: dict[int, int] = {}
        # llama.cpp's buffers grow a little once its graphs have a device's part
        for is_last in (False, True):
            rooms = self._rooms(bound, less)
            if self._staged:
                needs = [
                    (room, partial(self._stage_bytes, h), self._bytes_of_one(h, 0))
                    for h, room in rooms.items()
                ]
                self._stage = stage_that_fits(needs, self._n_experts, self._wave)
            slots = {handle: self._slots_in(room, handle) for handle, room in rooms.items()}
            if reason := self._allocate(slots):
                raise self._no_room(rooms, slots, reason)
            self.uses = {
                room.name: {
                    "n_slots": min(slots[handle]),
                    "most_slots": max(slots[handle]),
                    "experts": self._bytes(handle, slots[handle], self._stage[1]),
                    "llama_cpp": self._llama_cpp(handle),
                }
                for handle, room in rooms.items()
            }
            less = {
                handle: (
                    self.uses[room.name]["experts"] + self.uses[room.name]["llama_cpp"] - room.bound
                )
                for handle, room in rooms.items()
            }
            if is_last or max(less.values()) <= 0:
                return
            self._free_slots()

    @property
    def _wave(self) -> int:
        """Slots of a layer that suffice for the largest number of waves."""
        return -(-int(self._n_experts) // native.MAX_WAVES)

    def _slots_in(self, room: DeviceRoom, handle: int) -> list[int]:
        """Return the slots of each gate of a device, as the policy divides them.

        They hold a token's experts where all are uploaded, and a wave where large
        batches have no stage for a whole layer.
        """
        gates, (n_staged, n_stages) = self._gates(handle), self._stage
        in_waves = self._staged and n_staged < self._n_experts
        least = max(self._n_used, self._wave if in_waves else 0) if self._needs_slots else 0

        def divide(capacity: int) -> list[int]:
            # the policy divides among all layers, also those on other devices
            quotas = self._divide(capacity * len(self._devices) // len(gates))
            return [quotas[gate] for gate in gates]

        bytes_of = [partial(self._layer_bytes, handle, gate) for gate in gates]
        fixed = self._bytes(handle, [], n_stages)
        return slots_that_fit(room, bytes_of, self._n_experts, divide, least=least, fixed=fixed)

    def _allocate(self, slots: dict[int, list[int]]) -> str:
        """Allocate slots and llama.cpp's buffers. Return "" or an error."""
        left = {handle: iter(numbers) for handle, numbers in slots.items()}
        self.slots = [next(left[handle]) if handle else 0 for handle in self._devices]
        try:
            rows = [(handle, n, self._n_low(n)) for handle, n in zip(self._devices, self.slots)]
            self._buffer.set_device_slots(
                rows, MODES[self._mode], self._n_used, _UPLOADS, self._stage
            )
            self._replan()
        except MoeoffError as error:
            self._free_slots()
            return str(error)
        return ""

    def _free_slots(self) -> None:
        self._buffer.set_device_slots([])
        self._replan()

    def _rooms(self, bound: DeviceBound, less: dict[int, int]) -> dict[int, DeviceRoom]:
        rooms = {}
        for device in devices():
            if device.handle in self._devices:
                free = device.memory[0]
                limit, llama_cpp = (
                    bound.of(self._free.get(device.handle, free)),
                    self._llama_cpp(device.handle),
                )
                if bound.auto:  # other programs and the backend may have allocated since
                    limit = min(limit, llama_cpp + bound.of(free))
                rooms[device.handle] = DeviceRoom(
                    device.name, limit, llama_cpp + max(less.get(device.handle, 0), 0), free
                )
        return rooms

    def _can_compute(self, handle: int, gate: int) -> bool:
        return all(
            self._buffer.device_slot_bytes(handle, gate, 1, self._n_used, low=low)
            for low in (False, True)[: 1 + self._has_low]
        )

    def _n_low(self, n: int) -> int:
        """Return the slots for low versions: their memory share, but enough for a token
        and for the waves of any batch.
        """
        least = max(self._n_used, -(-self._n_experts // native.MAX_WAVES))
        return (
            min(max(math.ceil(n * self._low_for_high), least), self._n_experts)
            if n and self._has_low
            else 0
        )

    def _gates(self, handle: int) -> list[int]:
        return [gate for gate, device in enumerate(self._devices) if device == handle]

    def _stage_bytes(self, handle: int, n: int) -> int:
        return (
            self._buffer.device_stage_bytes(handle, self._gates(handle), n, self._n_used)
            if n
            else 0
        )

    def _layer_bytes(self, handle: int, gate: int, n: int) -> int:
        if not n:
            return 0
        low = self._n_low(n)
        low_bytes = (
            self._buffer.device_slot_bytes(handle, gate, low, self._n_used, low=True) if low else 0
        )
        return self._buffer.device_slot_bytes(handle, gate, n, self._n_used) + low_bytes

    def _bytes(self, handle: int, slots: Sequence[int], n_stages: int) -> int:
        """Return the bytes of slots and stages."""
        of_slots = sum(
            self._layer_bytes(handle, gate, n) for gate, n in zip(self._gates(handle), slots)
        )
        return of_slots + n_stages * self._stage_bytes(handle, self._stage[0])

    def _bytes_of_one(self, handle: int, n_stages: int) -> int:
        return self._bytes(handle, [1] * len(self._gates(handle)), n_stages)

    def _llama_cpp(self, handle: int) -> int:
        """Return llama.cpp's bytes on the device."""
        return native.device_memory_of(self._ctx, handle)

    def _replan(self) -> None:
        """Replan buffers before the first batch; later only graphs.

        Replacing a scheduler that has computed corrupted the heap on Mesa 22.3.6, also
        without slots.
        """
        planned = (
            native.memory_of_context(self._ctx) is not None
            if self._is_placed
            else native.replan(self._ctx) == 0
        )
        if not planned:
            raise MoeoffError("llama.cpp has no memory for its buffers as well")

    def _no_room(
        self, rooms: dict[int, DeviceRoom], slots: dict[int, list[int]], reason: str
    ) -> BudgetError:
        """Return an error with what fits, after a driver gave less than reported."""
        handle = max(rooms, key=lambda h: self._bytes(h, slots[h], self._stage[1]))
        room, fewer, n_stages = rooms[handle], slots, self._stage[1]
        sentence = (
            f"{format_size(room.bound)} on {room.name}: {reason}; {format_size(room.llama_cpp)} are"
            " llama.cpp's there"
        )
        while any(n > 1 for numbers in fewer.values() for n in numbers):
            fewer = {h: [(n + 1) // 2 for n in numbers] for h, numbers in fewer.items()}
            if not self._allocate(fewer):
                self._free_slots()
                least = {
                    h: max(self._bytes(h, fewer[h], n_stages), self._bytes_of_one(h, n_stages))
                    for h in rooms
                }
                needed = max(least[h] + rooms[h].llama_cpp for h in rooms)
                return BudgetError(sentence, hint={"vram": -(-needed // MIB) * MIB})
        return BudgetError(
            f"{sentence}, and not one expert of each layer has room besides; open the model without"
            " `vram`"
        )
