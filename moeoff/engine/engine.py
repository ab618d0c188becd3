"""`Engine`: the runtime state of one model, shared by `Llama` and `Server`.

plan(config)                reads the header, chooses memory, micro-batch, profile (opening.py)
Engine(opening)             precision, expert buffer and driver; nothing is loaded
with loading() as overrides: llama.cpp loads with them
attach(ctx)                 source files of the experts
loaded(ctx, sizes)          device slots, arenas, policy and predictor
begin(...), end(...)        around every decode
close_driver(), close()     before and after the model is freed
"""

from __future__ import annotations

import contextlib
import functools
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ..budget.micro_batch import remember_rates
from ..budget.plan import ALLOCATED, MemoryPlan
from ..errors import BudgetError, OptionError
from ..llamacpp import native
from ..llamacpp.compute_thread import uninterrupted
from ..llamacpp.devices import devices
from ..llamacpp.llama import api
from ..options import LONGEST_DRAFT, in_flags
from ..policies import CacheShape
from ..routing.batch import Span
from ..routing.event import GateEvent
from ..system.arrays import require_arrays
from ..system.memory import parse_size, peak_rss, rss
from ..system.pressure import Pressure
from .arena_sizer import ArenaSizer, BorrowedBuffers, BorrowedCache
from .budget_follower import BudgetFollower
from .buffer import ExpertBuffer
from .comparison import WITHOUT, ModeTuner
from .device_tier import AUTO, WAVES, DeviceTier
from .drafts import DraftLength
from .driver import Callback, Driver, divide, require_calibration, wants_gate_logits
from .opening import Opening
from .prefetcher import SAMPLE
from .prompt_meter import PromptMeter
from .quality import Quality
from .stats import Metric, Stats, Timing
from .token_experts import TokenExperts
from .warm_start import PromptUses, fill_free, preload_popular, restore, save, swap_in

# modes in which a device computes single tokens, and batches that fit its slots
_ONE_BY_ONE = ("centric", "reordered")
# notes at the end of a trace
_COUNTERS = (
    "demand_hits",
    "demand_misses",
    "evictions",
    "bytes_read",
    "low_bytes_read",
    "cache_bytes",
)


class Engine:
    """The runtime state of one model: options, memory, expert buffer and driver.

    Args:
        opening: Result of `plan`.
        moves: True if cached tokens may be moved, as by a context shift.
        on_remark: Callback on another thread with a sentence when the default budget
            moves.

    Attributes:
        planned: Memory plan of llama.cpp before the load.
        keywords: Keywords of llama_cpp.Llama.
        budget: Budget at the start.
        driver: Driver that delivers gate events.
        sizer: Arena sizes, after `loaded`.
        follower: Thread that moves the default budget; None for a fixed one.
        drafts: Length of drafts, if any are made.
        experts_per_token: Number of experts a token uses, summed over all layers.

    Raises:
        BudgetError: The budget is below the strategy's needs.
        OptionError: A value is invalid for this model.
    """

    sizer: ArenaSizer
    prompt_meter: PromptMeter
    _ends: dict[int, int]  # position after each sequence's last token
    _n_cuts = 0  # cuts after which the strategy was checked
    _ran = False  # True once the arenas have their sizes
    # experts routed before the prompt batch in progress
    _uses_before: int | None = None

    def __init__(
        self,
        opening: Opening,
        *,
        moves: bool = False,
        on_remark: Callable[[str], None] | None = None,
    ):
        config, model_index = opening.config, opening.model_index
        self.opening, self.config, self.model_index = opening, config, model_index
        self.budget, self.planned, self.keywords = opening.budget, opening.memory, opening.keywords
        self.micro_batch, self.profile = opening.micro_batch, opening.profile
        self.experts_per_token = (
            model_index if opening.nextn else model_index.without_nextn()
        ).experts_per_token
        self.quality = Quality(
            config, model_index, self.profile, self.planned.default_share, self.budget
        )
        if not self.quality.precision.tau and not opening.may_hold_everything:
            require_calibration(config.strategy, self.profile, model_index)
        strategy = config.strategy
        self.buffer = ExpertBuffer(
            io_threads=config.io_threads or 0,
            keep=strategy.keep,
            eager=strategy.eager,
            direct_io=config.direct_io,
            gate_input=config.gate_input
            or (strategy.predictor is not None and strategy.predictor.wants_gate_input),
            gate_logits=wants_gate_logits(strategy, config.trace),
        )
        self.quality.buffer = self.buffer
        self.driver = Driver(self.buffer)
        self.drafts = (
            DraftLength(config.draft_max or LONGEST_DRAFT)
            if config.spec_type or config.draft
            else None
        )
        self._token_experts: TokenExperts | None = None
        self._callback: Callback | None = None
        self._moves = moves or config.context_shift
        self._watches = False
        self._on_remark = on_remark
        self.follower: BudgetFollower | None = None
        self._prompt_uses: PromptUses | None = None
        self._free_on_devices = (
            {device.handle: device.memory[0] for device in devices()}
            if config.vram is not None
            else {}
        )
        self.device_tier: DeviceTier | None = None
        self.device_remark = ""
        self._mode_tuner: ModeTuner | None = None
        self._timing, self._cpu_start = Timing(), time.process_time()

    # --- around the load ---

    def loading(self) -> AbstractContextManager[Any]:
        """Yield overrides with which this thread loads the model.

        llama.cpp reserves address space in the buffer for experts instead of reading
        them.
        """
        return self.buffer.loading(self.opening.tensor_buffers, self.model_index.row_tables)

    def attach(self, ctx: int) -> None:
        """Attach the buffer to the loaded model, and make its context cancellable.

        Raises:
            OptionError: There is no kernel for attention with f32 sums.
        """
        if self.config.attention == "f32" and not native.attend_context_in_f32(ctx):
            raise OptionError(
                "`attention` f32: there is no such kernel for this model's heads and KV cache"
            )
        self.buffer.attach(self.model_index, self.quality.source, self.quality.low_source)
        api.llama_set_abort_callback(ctx, native.should_abort, self.buffer.handle)

    def loaded(
        self, ctx: int, sizes: Callable[[], MemoryPlan], *, adapters: bool, watches: bool = False
    ) -> None:
        """Set up slots, arenas, strategy and warm start after llama.cpp's allocations.

        Args:
            sizes: Function that returns llama.cpp's allocations (`context_sizes`),
                called after the devices have their slots.
            adapters: True if there are adapters, which waves do not compute.
            watches: True to call `watch_prompts`.

        Raises:
            BudgetError: Too little memory for experts, or for one device slot per
                layer.
            OptionError: No device can compute the experts. With `vram` auto the CPU
                does, and `device_remark` has the reason.
        """
        self._start_devices(ctx, adapters)
        self._start(sizes(), ctx)
        self.attach_strategy()
        if watches:
            self.watch_prompts()
        self._warm_up()
        if self.budget.is_default and not self.config.repeatable:
            # reads through the page cache cause pressure themselves
            pressure = None if self.buffer.buffered else Pressure()
            self.follower = BudgetFollower(self.sizer, pressure, self._on_remark)
            self.follower.start()

    def _start_devices(self, ctx: int, adapters: bool) -> None:
        """Set up devices before the arenas: llama.cpp's host buffers depend on them."""
        config, buffer = self.config, self.buffer
        if config.vram is None or config.vram_mode == "cpu":
            return
        if not buffer.running:
            # estimated size of the arena, which decides its page size
            room = self.budget.left(self.planned.fixed)
            buffer.start(
                min(max(room, buffer.arena_floor), buffer.arena_full), buffer.low_arena_floor
            )
        try:
            reads_in_waves = not config.repeatable and not adapters
            n_used, low_share = (
                max(self.model_index.n_expert_used, 1),
                self.quality.precision.low_share,
            )
            staged = config.vram_mode in (AUTO, WAVES) or (
                config.vram_mode in _ONE_BY_ONE and reads_in_waves
            )
            n_gates, n_experts = buffer.priorities.shape
            shape = CacheShape(n_gates, n_experts, n_used, 0)
            self.device_tier = DeviceTier(
                buffer,
                ctx,
                config.vram,
                config.vram_mode,
                n_used,
                self._free_on_devices,
                low_share,
                staged=staged,
                divide=lambda n: divide(config.strategy, self.profile, replace(shape, capacity=n)),
            )
        except (BudgetError, OptionError) as error:
            if not config.vram.auto:
                raise
            self.device_remark = f"no experts on the GPU: {in_flags(error)}"
            return
        if config.vram_mode == AUTO:
            ways = self.device_tier.ways
            self._mode_tuner = ModeTuner(ways, (WAVES, ways[0], WITHOUT))
        elif config.vram_mode in _ONE_BY_ONE and reads_in_waves:
            self._mode_tuner = ModeTuner(
                (config.vram_mode,), (WAVES, config.vram_mode), compares=False
            )

    def _start(self, allocated: MemoryPlan, ctx: int) -> None:
        precision = self.quality.precision
        borrowed = self._borrowed(ctx)
        plan = replace(
            self.planned,
            **{name: getattr(allocated, name) for name in ALLOCATED},
            n_ctx=api.llama_n_ctx(ctx),
            on_disk=self.buffer.row_table_bytes,
            # everything else is resident
            process=max(
                rss()
                - allocated.weights
                - allocated.state
                + (borrowed[1].borrowed if borrowed else 0),
                0,
            ),
            extras=self.opening.extras,
        )
        self.sizer = ArenaSizer(self.buffer, plan, self.budget, precision.low_share, borrowed)
        if self.buffer.running:
            self.buffer.set_cache_bytes(*self.sizer.arenas)
        else:
            self.buffer.start(*self.sizer.arenas)
        self._ran, self._ends = True, {}
        self.prompt_meter = PromptMeter(self.buffer)
        if not precision.lossless:
            self.quality.use(precision)

    def _borrowed(self, ctx: int) -> tuple[()] | tuple[BorrowedBuffers, BorrowedCache]:
        """Return the memory to borrow: none with a device or for reproducible runs."""
        largest = min(api.llama_n_ubatch(ctx), api.llama_n_ctx(ctx))
        if (
            self.config.repeatable
            or self.device_tier is not None
            or native.memory_of_batches(ctx, largest, False) is None
        ):
            return ()
        buffers = BorrowedBuffers(functools.partial(native.memory_of_batches, ctx), largest)
        return buffers, BorrowedCache(functools.partial(native.unused_state, ctx))

    def attach_strategy(self) -> None:
        """Attach policy and predictor with their memory, unless all experts fit."""
        config, before = self.config, rss()
        if config.trace is None and not config.gate_input:
            self.buffer.set_gate_rows(SAMPLE)
        self.driver.attach(
            config.strategy,
            self.model_index,
            trace=config.trace,
            profile=self.profile,
            precision=self.quality.precision,
            replay=config.replay,
            device_slots=() if self.device_tier is None else self.device_tier.slots,
        )
        self.quality.prefetcher = self.driver.prefetcher
        if (
            (config.draft is not None or self.opening.nextn)
            and self.driver.prefetcher is not None
            and self.device_tier is None
        ):
            n_gates = len(self.model_index.without_nextn().gates)
            self._token_experts = TokenExperts(
                self.buffer, n_gates, max(self.model_index.n_expert_used, 1)
            )
            self.driver.add(self._token_experts)
        self.sizer.make_room(rss() - before)

    def _warm_up(self) -> None:
        """Load the last run's experts in the background, or the most popular ones."""
        if (
            self.config.warm
            and self.config.strategy.keep
            and restore(self.buffer, self.model_index, self.sizer.arenas)
        ):
            return
        popular = (
            None
            if self.profile is None or not self.config.strategy.fill
            else self.profile.section("popularity")
        )
        if self.profile is not None and popular is not None:
            with self.profile.taking("popularity"):
                require_arrays(popular, {"counts": ("i", self.buffer.priorities.shape)})
            preload_popular(self.buffer, popular["counts"], self.sizer.arenas[0])

    def watch_prompts(self) -> None:
        """Let `idle` prefetch for the next prompt, unless runs must be reproducible.

        Prompts are recorded only where the strategy takes gate events.
        """
        self._watches = self.config.strategy.keep and not self.config.repeatable
        if self._watches and self._prompt_uses is None and self.driver.attached:
            self._prompt_uses = PromptUses(self.buffer.priorities.shape)
            self.driver.add(self._prompt_uses)

    def idle(self, ended: Callable[[], bool] = lambda: False) -> None:
        """Use the time without batches for experts, until the next batch.

        Give them memory that batches left, and read those that the next prompt probably
        needs into free slots or in place of less needed ones.

        Args:
            ended: Function that returns True once a batch waits for this call.
        """
        self.sizer.idle()
        if self._watches:
            fill_free(self.buffer, ended)
            if self._prompt_uses is not None:
                swap_in(self.buffer, self._prompt_uses.weights, ended)

    # --- around every decode ---

    def begin(self, tokens: np.ndarray, spans: Mapping[int, Span], decodes: bool) -> None:
        """Prepare for a batch.

        Args:
            tokens: [n].
            spans: Spans of its sequences.
            decodes: True if the batch decodes.
        """
        self.buffer.check_unchanged()
        if self.follower is not None and self.follower.n_cuts != self._n_cuts:
            self._n_cuts = self.follower.n_cuts
            # on failure the buffer's own order serves
            with contextlib.suppress(BudgetError, OptionError):
                self._attach_missing()
        self.sizer.before(len(tokens), self._moves_state(spans))
        if self._mode_tuner is not None and self.device_tier is not None:
            self.device_tier.use(self._mode_tuner.begin(len(tokens), decodes))
        self.buffer.set_batch_kind(decodes)
        if self.drafts is not None:
            self._timing.drafts_rejected += self.drafts.begin(spans, time.perf_counter())
        self.quality.begin(spans)
        self.driver.begin(tokens, spans, decodes)
        if not decodes:
            self.prompt_meter.begin(max(span.first for span in spans.values()))
            self._uses_before = self.buffer.stats().expert_uses

    def expect(self, token: int) -> None:
        """Prefetch the experts of the next batch's token while others are drafted."""
        if self._token_experts is not None and self.quality.precision.lossless:
            self._token_experts.expect(token)

    def _moves_state(self, spans: Mapping[int, Span]) -> bool:
        """Return True if llama.cpp will move cells after a gap in a sequence."""
        moved = self._moves and any(
            span.first != self._ends.get(sequence, 0) for sequence, span in spans.items()
        )
        self._ends |= {sequence: span.end for sequence, span in spans.items()}
        return moved

    def end(self, n_tokens: int, seconds: float, decodes: bool) -> None:
        """Finish a batch. Raise errors of callbacks and I/O threads."""
        self._uses_before = None
        self.buffer.check()
        self._timing.add(n_tokens, seconds, decodes)
        if self._mode_tuner is not None:
            self._mode_tuner.end(n_tokens, seconds, decodes)
        if not decodes:
            self.prompt_meter.end(n_tokens, seconds)
        self.sizer.after()

    def interrupted(self, seconds: float) -> None:
        """Finish an aborted batch. Count the computed prompt tokens, raise as `end`."""
        if self._uses_before is not None:
            n_tokens = self.prompt_tokens - self._timing.prompt_tokens
            self._uses_before = None
            self._timing.add(n_tokens, seconds, False)
        self.buffer.check()

    @property
    def expected_arenas(self) -> tuple[int, int]:
        """Planned bytes for high and for low versions."""
        pools = self.buffer.pools(self.quality.precision.low_share)
        return pools.split(
            min(
                max(self.budget.left(self.planned.fixed), pools.floor + pools.low_floor),
                pools.full + pools.low_full,
            )
        )

    # --- watching, moving, closing ---

    @property
    def plan(self) -> MemoryPlan:
        """The current memory plan."""
        return self.sizer.plan

    @uninterrupted
    def set_memory(self, memory: str | int) -> None:
        """Set a fixed budget between answers, whatever other programs need.

        Raises:
            OptionError: The value is not a size.
            BudgetError: The budget is below the needs of the model and its driver. The
                old one stays.
        """
        nbytes, before = parse_size(memory), self.sizer.budget
        if self.follower is not None:
            self.follower.close()
        try:
            self._move(nbytes, before)
        except BudgetError:
            if self.follower is not None:
                self.follower.start()
            raise

    def _move(self, nbytes: int, before: int) -> None:
        self.sizer.move(nbytes)
        try:
            self._choose_for_budget()
        except BudgetError:
            self.sizer.move(before)
            self._choose_for_budget()
            raise

    def _choose_for_budget(self) -> None:
        self.quality.choose_again(self.plan.budget)
        self._attach_missing()

    def _attach_missing(self) -> None:
        """Attach the strategy, which was not needed while all experts were resident."""
        if not self.driver.attached:
            self.attach_strategy()
        if self._watches:
            self.watch_prompts()

    def set_gate_callback(self, callback: Callable[[GateEvent], None] | None) -> None:
        """Replace the user's callback."""
        if self._callback is not None:
            self.driver.remove(self._callback)
        self._callback = None if callback is None else Callback(callback)
        if self._callback is not None:
            self.driver.add(self._callback)

    def layer_metrics(self) -> Iterator[Metric]:
        """Yield the hits and misses of each layer."""
        layer_of, counters = (
            {t.gate: t.layer for t in self.buffer.tensors},
            self.buffer.gate_stats(),
        )
        for name, text in (
            ("hits", "resident when they were asked for"),
            ("misses", "that had to be read"),
        ):
            by_layer: dict[str, float] = defaultdict(int)
            for gate, count in enumerate(counters[f"demand_{name}"].tolist()):
                by_layer[f'{{layer="{layer_of[gate]}"}}'] += count
            yield Metric(f"layer_{name}_total", f"Expert slices of a layer {text}.", by_layer)

    def stats(self) -> Stats:
        """Return the statistics since the start or `reset_stats()`."""
        plan, counters = self.plan, self.buffer.stats()
        facts: dict[str, Any] = {}
        if self.device_tier is not None:
            facts["device_memory"] = self.device_tier.uses
        if self._mode_tuner is not None:
            facts |= {
                "device_mode": self._mode_tuner.decode_mode,
                "device_gain": self._mode_tuner.gain,
            }
        if (prefetcher := self.driver.prefetcher) is not None:
            facts |= {"prefetch_on": prefetcher.on, "prefetch_gain": prefetcher.gain}
            if (meter := prefetcher.meter) is not None:
                facts |= {
                    "prediction_accuracy": meter.accuracy,
                    "fetch_rate": meter.fetch_rate,
                    "good_pred": meter.good_pred,
                }
        if self.drafts is not None:
            facts |= {"draft_length": self.drafts.best, "drafts_gain": self.drafts.gain}
        if (promised := self.quality.selected) is not None:
            facts |= {"max_loss": promised.max_loss, "estimated_loss": promised.estimated_loss}
        return Stats.of(
            counters,
            self._timing,
            model=self.config.model_path,
            strategy=self.config.strategy.name,
            tier=self.quality.source.tier,
            tau=self.quality.precision.tau,
            cpu_seconds=time.process_time() - self._cpu_start,
            experts_per_token=self.experts_per_token,
            budget_bytes=self.sizer.budget,
            budget_start_bytes=self.sizer.most or plan.budget,
            budget_cuts=0 if self.follower is None else self.follower.n_cuts,
            peak_rss_bytes=peak_rss(),
            direct_io=not self.buffer.buffered and counters.direct_reads == counters.reads,
            row_table_bytes=self.buffer.row_table_bytes,
            micro_batch=self.micro_batch.n_tokens,
            micro_batch_reason=self.micro_batch.reason,
            memory=plan.items(),
            **facts,
        )

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens computed since the last reset. Thread-safe.

        Tokens of a batch in progress are estimated from the routed experts.
        """
        total = self._timing.prompt_tokens  # first, or a batch that ends now would count twice
        before = self._uses_before
        return total + (
            0
            if before is None
            else max(self.buffer.stats().expert_uses - before, 0) // self.experts_per_token
        )

    def reset_stats(self) -> None:
        self.buffer.reset_stats()
        self._timing, self._cpu_start = Timing(), time.process_time()
        if self.driver.prefetcher is not None and self.driver.prefetcher.meter is not None:
            self.driver.prefetcher.meter.reset()

    def close_driver(self) -> None:
        """Close trace and driver and save the warm start, before the model is freed."""
        if self.follower is not None:
            self.follower.close()
        if not self._ran or not self.buffer.running or sys.is_finalizing():
            return
        stats = asdict(self.stats())
        self.driver.close({name: stats[name] for name in _COUNTERS})
        if self.config.warm:
            save(self.buffer, self.model_index)
        if rates := self.prompt_meter.rates:
            remember_rates(self.model_index, self.keywords, self.config.tier, rates)

    def close(self) -> None:
        """Close the buffer after the model is freed. May be called twice."""
        self.buffer.close()
