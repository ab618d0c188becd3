"""A strategy on a simulated clock: what `Llama` would put together for it, on a recorded text and a disk, or a device, of a given speed."""

from __future__ import annotations

from typing import Any, cast

from ..companion.profile import Profile
from ..engine.batch_spans import Span
from ..engine.driver import Driver
from ..engine.driver_factory import attach_driver
from ..engine.expert_buffer import ExpertBuffer
from ..engine.strategy import Strategy
from ..gguf.layout import Layout
from ..predict.recording import Recording
from ..simulate.bandwidths import Bandwidths
from ..simulate.tiered import LowVersions, TieredBuffer
from ..simulate.tiered_result import TieredResult
from ..simulate.timed import TimedBuffer, TimedResult, replay

__all__ = ["on_clock", "on_device"]

GATE_NS = 1_000_000  # any: all that matters is how reads compare with it


def on_clock(recording: Recording, strategy: Strategy, layout: Layout, *, share: float, read: float, profile: Profile | None = None, tokens: int = 256,
             **options: Any) -> tuple[TimedResult, Driver | None]:  # fmt: skip
    """Decodes the text's first tokens; the same arguments give the same result.

    Args:
        recording: with gate inputs, if the strategy's predictor reads them.
        share: of the experts, that the arena holds.
        read: time of a slice's read, as a share of what a layer takes to compute.
        tokens: how many of the recording at most.
        options: of `attach_driver`.

    Raises:
        BudgetError: the arena holds fewer experts than a gate selects.
        OptionError: the strategy needs a profile.
    """
    model = recording.model
    buffer = TimedBuffer(model, int(model.full_bytes * share), max(int(read * GATE_NS), 1), GATE_NS, keep=strategy.keep, serial=strategy.serial)
    driver = attach_driver(cast(ExpertBuffer, buffer), strategy, layout, n_lanes=1, profile=profile, **options)
    return _decode(buffer, recording, driver, tokens), driver


def on_device(recording: Recording, strategy: Strategy, layout: Layout, speeds: Bandwidths, *, share: float, low: LowVersions | None = None,
              profile: Profile | None = None, tokens: int = 256, **options: Any) -> TieredResult:  # fmt: skip
    """The same with all experts in host memory and a device that computes with them: it holds some, and the others are sent to it before
    they are used, as the papers' systems do. One pool for all layers; prefetches go to the device.

    Args:
        share: of the experts' bytes, that the device holds.
        low: copies in lower precision that are sent in the place of experts of little weight.
        profile, tokens, options: as above.

    Raises:
        BudgetError, OptionError: as above.
    """
    model = recording.model
    vram = int(share * sum(t.nbytes * t.n_experts for t in model.tensors))
    buffer = TieredBuffer(model, speeds, vram, model.full_bytes, "centric", one_pool=True, keep=strategy.keep, serial=strategy.serial, low=low)
    driver = attach_driver(cast(ExpertBuffer, buffer), strategy, layout, n_lanes=1, profile=profile, **options)
    _decode(buffer, recording, driver, tokens)
    return buffer.result()


def _decode(buffer: TimedBuffer, recording: Recording, driver: Driver | None, tokens: int) -> TimedResult:
    position, n_gates = 0, recording.model.n_gates

    def begin(n: int) -> None:
        nonlocal position
        token = n // n_gates
        position = 0 if recording.starts[token] else position + 1
        if driver is not None:
            driver.begin(recording.tokens[token : token + 1], {0: Span(position, position + 1, 1, True)}, True)

    return replay(buffer, recording.events(0, tokens), begin)
