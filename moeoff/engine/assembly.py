"""What belongs to a running model beside llama.cpp itself, put together in steps around llama.cpp's load: the same for `Llama` and `Server`.

Assembly(config)            chooses: budget, settings, micro-batch, profile, precision; nothing is loaded
with loading() as overrides: llama.cpp loads with them
attach()                    where experts are read from
start(sizes, ctx)           the arenas get what is left of the budget
attach_driver()             the strategy's policy and predictor
begin(...), end(...)        around every decode
close()
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from ..binding import api
from ..budget.device_plan import DeviceBound
from ..budget.dry_load import MemorySizes
from ..budget.footprint import Footprint, require_room, usual_share
from ..budget.loss_contract import SECTION as CONTRACT_SECTION
from ..budget.memory_plan import Needs
from ..budget.micro_batch import USUAL, MicroBatch, choose
from ..companion.profile import Profile
from ..companion.settings import Settings
from ..devices import devices
from ..errors import OptionError
from ..gate_event import GateEvent
from ..gguf.layout import Layout
from ..machine import machine_name
from ..memory import DEFAULT_SHARE, available, peak_rss, rss
from .arena_sizer import ArenaSizer
from .batch_rows import BatchRows, Splitting
from .batch_spans import Span
from .cancellation import Cancellation
from .config import Config
from .device_judge import WITHOUT, DeviceJudge
from .device_tier import AUTO, WAVES, DeviceTier
from .driver import Driver
from .driver_factory import attach_driver, sections, wants_gate_input, wants_gate_logits
from .expert_buffer import ExpertBuffer
from .llama_options import check_model
from .precision_control import PrecisionControl
from .prefetcher import SAMPLE
from .process_priority import set_priority
from .prompt_rates import PromptMeter, keep_rates, recall_rates
from .stats import Stats, Timing
from .tensor_placement import tensor_buffers
from .warm_start import fill, recall, remember

_COUNTERS = ("demand_hits", "demand_misses", "evictions", "bytes_read", "low_bytes_read", "arena_bytes")  # that end a trace


class Assembly:
    """Args:
    config: as the user gave it.
    n_sequences: that share the context.
    kept: bytes of prompts outside the context, and of samplers.
    loaded: bytes of other files that will be loaded with the model.
    nextn: drafts are made with the model's next-token layers.

    Attributes:
        config: with what settings have chosen; settings_summary says so in a line, empty if they have not.
        layout, footprint: of the model.
        keywords: of llama_cpp.Llama.
        budget: bytes of the whole process; None: the experts' arena alone is bounded.
        lossy: what is given up.
        buffer: the expert buffer.
        driver: after `attach_driver`, if the strategy needs one.
        sizer, splitting: after `start`.

    Raises:
        ModelError: the file is missing, damaged, or has no routed experts.
        BudgetError: the budget is below what the model needs; its facts say what would do.
        OptionError: a value that makes no sense for this model.
    """

    sizer: ArenaSizer
    splitting: Splitting
    _prompt_meter: PromptMeter
    _ran = False  # arenas have their sizes: it may compute

    def __init__(self, config: Config, *, n_sequences: int = 1, kept: int = 0, loaded: int = 0, nextn: bool = False):
        self._n_sequences, self._kept, self._loaded, self._nextn = n_sequences, kept, loaded, nextn
        set_priority(config.priority)
        self.config = config
        self.timing = Timing()
        self.driver: Driver | None = None
        self._listener: Callable[[GateEvent], None] | None = None
        self.budget = int(available() * DEFAULT_SHARE) if config.memory is None and config.expert_memory is None else config.memory
        self.layout = Layout.read(config.model_path)
        self.layout.require_experts()
        self.config, self.settings_summary = self._apply_settings()
        self.strategy = self.config.strategy
        self._free_on_devices = {device.handle: device.memory[0] for device in devices()} if self.config.vram is not None else {}
        self.device_tier: DeviceTier | None = None
        self._device_judge: DeviceJudge | None = None
        self._plan_memory()
        self.micro_batch = self._choose_micro_batch()
        self.profile = self._find_profile()
        self.lossy = PrecisionControl(
            self.config, self.layout, self.profile, lambda budget: usual_share(self.footprint, budget, self.config.expert_memory), self.budget
        )
        self.buffer = self._make_buffer()
        self.cancellation = Cancellation(self.buffer)

    # --- choosing ---

    def _apply_settings(self) -> tuple[Config, str]:
        """The options with what `moeoff tune` found for them, and a line about that; empty: there was nothing."""
        config = self.config
        if not config.settings or not config.open_options or self.budget is None:
            return config, ""
        wanted = config.settings
        found = Settings.find(self.layout) if wanted is True or wanted == "auto" else Settings.read(wanted, self.layout)
        if found is None:
            return config, ""
        tuning, why_not = found.best(self.budget, machine_name(), config.devices)
        return (config, why_not) if tuning is None else (config.tuned(tuning), tuning.summary)

    def _plan_memory(self) -> None:
        """Whether the model can fit, before anything of it is loaded."""
        config, layout = self.config, self.layout
        check_model(config.llama_cpp, layout, config.context_shift)
        self.tensor_buffers = tensor_buffers(config.override_tensor, layout)
        self.keywords = config.keywords
        self.footprint = self._footprint(config.n_ctx or layout.n_ctx_train or 512)
        require_room(self.footprint, self.budget or available())

    def _footprint(self, n_ctx: int) -> Footprint:
        kept = self._kept + self._loaded
        return Footprint.of(self.layout, n_ctx, self.keywords, self.tensor_buffers, n_sequences=self._n_sequences, kept=kept, nextn=self._nextn)

    def _choose_micro_batch(self) -> MicroBatch:
        """Tokens of a prompt that are computed at once: what the user said, else what memory allows and takes the least time."""
        given, footprint = self.config.llama_cpp, self.footprint
        usual = min(USUAL, footprint.n_ctx)
        if given.get("n_batch") or given.get("n_ubatch"):
            return MicroBatch(min(self.keywords.get("n_ubatch", USUAL), self.keywords.get("n_batch", USUAL), footprint.n_ctx), "as given")
        if self.budget is None:
            return MicroBatch(usual, "the usual one: only the experts' memory is bounded")
        if self.config.repeatable:
            return MicroBatch(usual, "the usual one: the run must be the same at every budget and on every machine")
        needs = footprint.needs()
        found = choose(
            footprint.n_ctx,
            self.budget - (needs.total - needs.computing),
            footprint.arena_full,
            lambda n: needs.computing * n // usual,
            recall_rates(self.layout, self.keywords["n_threads"]),
        )
        if found.n_tokens != usual:
            self.keywords |= {"n_batch": found.n_tokens, "n_ubatch": found.n_tokens}
            self.footprint = self._footprint(footprint.n_ctx)
        return found

    def _find_profile(self) -> Profile | None:
        # what calibration measures of gates has none for next-token layers, which only a server that drafts with them loads
        wanted, needed = self.config.profile, {CONTRACT_SECTION} | (set() if self._nextn else sections(self.strategy))
        if wanted is True or wanted == "auto":
            return Profile.find(self.layout, needed)
        return Profile.read(wanted, self.layout, needed) if wanted else None

    def _make_buffer(self) -> ExpertBuffer:
        config, strategy = self.config, self.strategy
        return ExpertBuffer(
            n_lanes=config.n_lanes,
            keep=strategy.keep,
            eager=strategy.eager,
            serial=strategy.serial,
            direct_io=config.direct_io,
            gate_input=config.gate_input or wants_gate_input(strategy),
            gate_logits=wants_gate_logits(strategy, config.trace),
            routing=self.lossy.routing,
        )

    # --- around the load ---

    @contextlib.contextmanager
    def loading(self) -> Iterator[Any]:
        """While open, this thread loads the model with the yielded overrides: llama.cpp reads everything but what stays on disk, for which it
        reserves address space in the buffer."""
        with self.buffer.loading(self.tensor_buffers, embedding=self.layout.lookup_embedding is not None) as overrides:
            yield overrides

    def attach(self) -> None:
        """The model is loaded."""
        self.buffer.attach(self.layout, self.lossy.source, self.lossy.low_source)

    def start_devices(self, ctx: int, adapters: bool) -> None:
        """Before `start`, because llama.cpp's buffers in host memory depend on it: slots on devices, if that was asked for.

        Args:
            adapters: there are some, whose products are not computed in waves.

        Raises:
            OptionError: no layer with experts is computed on a device, or a device cannot compute with them.
            BudgetError: not one slot fits, or the bound is more than a device has.
        """
        config, buffer = self.config, self.buffer
        if config.vram is None or config.vram_mode == "cpu":
            return
        if not buffer.running:
            buffer.start(buffer.arena_floor, buffer.low_arena_floor)
        self.device_tier = DeviceTier(buffer, ctx, config.vram, config.vram_mode, max(self.layout.n_expert_used, 1), self._free_on_devices)
        ways = self.device_tier.ways if self.lossy.precision.lossless else self.device_tier.ways[:1]
        if config.vram_mode == AUTO:
            self._device_judge = DeviceJudge(ways, (ways[0], WAVES, WITHOUT) if self.lossy.precision.lossless else ())
        elif config.vram_mode == "centric" and not config.repeatable and not adapters:
            self._device_judge = DeviceJudge(("centric",), ("centric", WAVES), compares=False)

    def start(self, size: MemorySizes, ctx: int) -> None:
        """Sizes the arenas from what the loaded model has left of the budget.

        Args:
            size: what it takes.
            ctx: its llama_context.

        Raises:
            BudgetError: too little is left for experts.
        """
        config, precision = self.config, self.lossy.precision
        self.splitting = Splitting.of(ctx)
        python = max(rss() - size.weights - size.state, 0)  # both are resident: the weights have been read, the state cleared
        needs = Needs(python, size.weights, size.state, size.compute, size.work, size.outputs, api.llama_n_ctx(ctx), self.buffer.embedding_bytes, self._kept)
        self.sizer = ArenaSizer(self.buffer, self.budget, config.expert_memory, needs, precision.low_share)
        if self.buffer.running:  # in the smallest arena
            self.buffer.set_arena_bytes(*self.sizer.arenas)
        else:
            self.buffer.start(*self.sizer.arenas)
        self._ran = True
        self._prompt_meter = PromptMeter(self.buffer, config.n_lanes)
        if not precision.lossless:
            self.lossy.use(self.buffer, precision)

    def attach_driver(self) -> None:
        """The strategy's policy and predictor; what their tables take, the experts lose."""
        config, before = self.config, rss()
        if config.trace is None and not config.gate_input:
            self.buffer.set_gate_rows(SAMPLE)
        self.driver = attach_driver(
            self.buffer,
            self.strategy,
            self.layout,
            config.trace,
            n_lanes=config.n_lanes,
            profile=self.profile,
            precision=self.lossy.precision,
            replay=config.replay,
            on_devices=self.device_tier is not None,
        )
        self.sizer.make_room(rss() - before)

    def warm_up(self) -> None:
        """Loads in the background what was resident when the model was last closed, if that was asked for; else what the strategy begins with."""
        if self.config.warm and self.strategy.keep and recall(self.buffer, self.layout, self.sizer.arenas):
            return
        popular = None if self.profile is None or not self.strategy.fill else self.profile.section("popularity")
        if popular is not None:
            fill(self.buffer, popular["counts"], self.sizer.arenas[0])

    # --- around every decode ---

    def begin(self, tokens: np.ndarray, spans: Mapping[int, Span], decodes: bool, rows: BatchRows | None = None) -> None:
        """Before a batch.

        Args:
            tokens: [n].
            spans: of its sequences.
            decodes: its tokens are decoded, not read.
            rows: which is of which sequence, where it holds several (`splitting`).
        """
        self.layout.check_unchanged()
        if self._device_judge is not None and self.device_tier is not None:
            self.device_tier.use(self._device_judge.begin(len(tokens), decodes))
        self.buffer.set_batch_kind(decodes)
        self.lossy.begin(self.buffer, spans)
        if self.driver is not None:
            self.driver.begin(tokens, spans, decodes, rows)
        if not decodes:
            self._prompt_meter.begin()

    def end(self, n_tokens: int, seconds: float, decodes: bool) -> None:
        """After it. Raises what went wrong in a callback or an I/O worker."""
        self.buffer.check()
        self.timing.add(n_tokens, seconds, decodes)
        if self._device_judge is not None:
            self._device_judge.end(n_tokens, seconds, decodes)
        if not decodes:
            self._prompt_meter.end(n_tokens, seconds)
        self.sizer.look()

    # --- watching, moving, closing ---

    def set_memory(self, memory: int) -> None:
        """Moves the budget between answers.

        Raises:
            BudgetError: below what the model needs; the old budget stays.
        """
        self.sizer.move(memory)
        self.lossy.choose_again(self.buffer, memory)
        if self.driver is None:  # as long as all experts fit, no driver is attached
            self.attach_driver()
            self.set_gate_callback(self._listener)

    def lend(self, nbytes: int) -> None:
        """For a while, takes so many bytes of the budget from the experts; negative: gives them back.

        Raises:
            BudgetError: they have not so much.
        """
        self.sizer.lend(nbytes)

    def set_vram(self, vram: str | int) -> None:
        """Moves the bound of what is allocated on each device, between answers.

        Raises:
            OptionError: not a size, or the model was opened without experts on devices.
            BudgetError: too small, or more than a device has; the old bound stays.
        """
        bound = DeviceBound.parse(vram)
        if self.device_tier is None:
            raise OptionError("vram: the model was opened without experts on devices; open it with vram")
        self.device_tier.move(bound)

    def set_gate_callback(self, callback: Callable[[GateEvent], None] | None) -> None:
        """A user's own; the driver keeps its."""
        self._listener = callback
        if self.driver is not None and self.driver.needed:
            self.buffer.drain()
            self.driver.listener = callback
        else:
            self.buffer.set_gate_callback(callback)

    def stats(self) -> Stats:
        """What happened since the start, or since `reset_stats()`."""
        plan = self.sizer.plan
        stats = Stats.collect(
            self.buffer, strategy=self.strategy.name, model=self.config.model_path, tier=self.lossy.source.tier, budget=plan.budget, peak=peak_rss()
        )
        stats = replace(
            stats.timed(self.timing),
            micro_batch=self.micro_batch.n_tokens,
            micro_batch_reason=self.micro_batch.reason,
            memory=plan.items(self.footprint.embedding),
        )
        if self.device_tier is not None:
            stats = replace(stats, device_memory=self.device_tier.items())
        if self._device_judge is not None:
            stats = replace(stats, device_mode=self._device_judge.decode_mode, device_gain=self._device_judge.gain)
        prefetcher = self.driver.prefetcher if self.driver is not None else None
        if prefetcher is not None:
            stats = replace(stats, prefetch_on=prefetcher.on, prefetch_gain=prefetcher.gain)
            if (meter := prefetcher.meter) is not None:
                stats = replace(stats, prediction_accuracy=meter.accuracy, fetch_rate=meter.fetch_rate, good_pred=meter.good_pred)
        if (promised := self.lossy.selected) is None:
            return stats
        return replace(stats, max_loss=promised.max_loss, estimated_loss=promised.estimated_loss)

    def reset_stats(self) -> None:
        self.buffer.reset_stats()
        self.timing.reset()
        if self.driver is not None and self.driver.prefetcher is not None and self.driver.prefetcher.meter is not None:
            self.driver.prefetcher.meter.reset()

    def close_driver(self) -> None:
        """Before the model is freed: closes trace and driver, and remembers what a later start can use. Nothing, if it never ran."""
        if not self._ran or not self.buffer.running or sys.is_finalizing():
            return
        if self.driver is not None:
            stats = asdict(self.stats())
            self.driver.close({name: stats[name] for name in _COUNTERS})
        if self.config.warm:
            remember(self.buffer, self.layout)
        if rates := self._prompt_meter.rates:
            keep_rates(self.layout, self.keywords["n_threads"], rates)

    def close(self) -> None:
        """After the model is freed. May be called twice."""
        self.buffer.close()


def config_of(model_path: str | os.PathLike[str] | Config, options: dict[str, Any]) -> Config:
    """A config as it is, or made of a path and options."""
    return model_path if isinstance(model_path, Config) else Config.make(model_path, **options)
