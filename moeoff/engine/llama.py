"""`Llama`: llama_cpp's class whose routed experts stay on disk and share a bounded arena in memory."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from .. import native
from ..binding import PatchedLlama, set_log
from ..budget.dry_load import MemorySizes, memory_sizes
from ..budget.footprint import Footprint, require_room, usual_share
from ..budget.loss_contract import SECTION as CONTRACT_SECTION
from ..budget.loss_contract import LossContract, SelectedPrecision
from ..budget.memory_plan import Needs, Plan
from ..budget.micro_batch import USUAL, MicroBatch, choose
from ..budget.precision import Precision
from ..companion.file import KEEP
from ..companion.profile import Profile
from ..companion.settings import Settings
from ..companion.source import ExpertSource
from ..errors import Cancelled, ModelError, MoeoffError
from ..gate_event import GateEvent
from ..gguf.layout import Layout
from ..machine import machine_name
from ..memory import DEFAULT_SHARE, available, parse_size, peak_rss, rss
from ..threads import CoreBinding
from .arena_sizer import ArenaSizer
from .batch_spans import batch_spans, is_decode
from .cancellation import Cancellation
from .config import Config
from .context_shift import ContextShift
from .driver import Driver
from .driver_factory import attach_driver, sections, wants_gate_input, wants_gate_logits
from .expert_buffer import ExpertBuffer
from .llama_options import check_model
from .prefetcher import SAMPLE
from .process_priority import set_priority
from .prompt_rates import PromptMeter, keep_rates, recall_rates
from .stats import Stats, Timing
from .tensor_placement import tensor_buffers
from .warm_start import recall, remember


class Llama(PatchedLlama):
    """A Mixture-of-Experts model that needs less memory than its file.

    Args:
        model_path: of the GGUF, or a `Config` instead of it and of all options.
        progress: called with the loaded fraction, 0 to 1, while the weights outside the experts are read.
        on_stats: called with the `Stats` of each answer when it ends.
        **options: those of `moeoff.engine.config.Config`: memory, expert_memory, strategy, experts, tier, max_loss, ...; and of
            `llama_cpp.Llama`: n_ctx, n_threads, ...

    Raises:
        ModelError: the file is missing, damaged, or has no routed experts.
        BudgetError: the budget is below what the model needs; its facts say what would do.
        OptionError: an unknown keyword or strategy, or a value that makes no sense.
    """

    # llama_cpp closes objects that were never opened, too
    _buffer: ExpertBuffer | None = None
    _driver: Driver | None = None
    _core_binding: CoreBinding | None = None
    _context_shift: ContextShift | None = None
    _decodes: bool | None = None  # what batches are, if a caller says so

    def __init__(
        self,
        model_path: str | os.PathLike[str] | Config,
        *,
        progress: Callable[[float], None] | None = None,
        on_stats: Callable[[Stats], None] | None = None,
        **options: Any,
    ):
        config = model_path if isinstance(model_path, Config) else Config.make(model_path, **options)
        self._listener: Callable[[GateEvent], None] | None = None
        self._config = config
        self._progress, self._on_stats = progress, on_stats
        self._one_output = not config.gate_input
        self.timing = Timing()

        set_priority(config.priority)
        self._budget = self._choose_budget()
        self._layout = self._read_layout()
        self._config, self.settings_summary = self._apply_settings()
        self.strategy = self._config.strategy
        self._plan_memory()
        self.micro_batch = self._choose_micro_batch()
        self.profile = self._find_profile()
        self._source, self._low_source = self._select_experts()
        set_log(self._keywords["verbose"])
        self._buffer = self._make_buffer()
        self.cancellation = Cancellation(self._buffer)
        try:
            self._load_model()
            self._buffer.attach(self._layout, self._source, self._low_source)
            self._start_buffer()
            self._attach_driver()
            self.set_abort_callback(native.should_abort, self._buffer.handle)
            self._core_binding = None if self.numa else CoreBinding(self.context_handle)  # llama.cpp's strategies for NUMA place threads themselves
            self.wrap_decode(self._decode)
            if config.context_shift:
                self._context_shift = ContextShift(self, config.n_keep)
                self.without_end()
            self._warm_up()
        except BaseException:
            self.close()
            raise

    # --- the steps of opening ---

    def _choose_budget(self) -> int | None:
        """Bytes of the whole process; None: the experts' arena alone is bounded."""
        if self._config.memory is None and self._config.expert_memory is None:
            return int(available() * DEFAULT_SHARE)
        return self._config.memory

    def _read_layout(self) -> Layout:
        """The file's headers."""
        layout = Layout.read(self._config.model_path)
        layout.require_experts()
        return layout

    def _apply_settings(self) -> tuple[Config, str]:
        """The options with what `moeoff tune` found for them, and a line about that; empty: there was nothing."""
        config = self._config
        if not config.settings or not config.open_options or self._budget is None:
            return config, ""
        wanted = config.settings
        found = Settings.find(self._layout) if wanted is True or wanted == "auto" else Settings.read(wanted, self._layout)
        if found is None:
            return config, ""
        tuning, why_not = found.best(self._budget, machine_name())
        return (config, why_not) if tuning is None else (config.tuned(tuning), tuning.summary)

    def _plan_memory(self) -> None:
        """Whether the model can fit, before anything of it is loaded."""
        layout = self._layout
        check_model(self._config.llama_cpp, layout, self._config.context_shift)
        self._tensor_buffers = tensor_buffers(self._config.override_tensor, layout)
        n_ctx = self._config.n_ctx or layout.n_ctx_train or 512
        self._keywords = self._config.keywords
        self._footprint = Footprint.of(layout, n_ctx, self._keywords, self._tensor_buffers)
        require_room(self._footprint, self._budget or available())

    def _choose_micro_batch(self) -> MicroBatch:
        """Tokens of a prompt that are computed at once: what the user said, else what memory allows and takes the least time."""
        given, footprint = self._config.llama_cpp, self._footprint
        usual = min(USUAL, footprint.n_ctx)
        if given.get("n_batch") or given.get("n_ubatch"):
            return MicroBatch(min(self._keywords.get("n_ubatch", USUAL), self._keywords.get("n_batch", USUAL), footprint.n_ctx), "as given")
        if self._budget is None:
            return MicroBatch(usual, "the usual one: only the experts' memory is bounded")
        if self._config.repeatable:
            return MicroBatch(usual, "the usual one: the run must be the same at every budget and on every machine")
        needs = footprint.needs()
        found = choose(
            footprint.n_ctx,
            self._budget - (needs.total - needs.computing),
            footprint.arena_full,
            lambda n: needs.computing * n // usual,
            recall_rates(self._layout, self._keywords["n_threads"]),
        )
        if found.n_tokens != usual:
            self._keywords |= {"n_batch": found.n_tokens, "n_ubatch": found.n_tokens}
            self._footprint = Footprint.of(self._layout, footprint.n_ctx, self._keywords, self._tensor_buffers)
        return found

    def _find_profile(self) -> Profile | None:
        wanted = self._config.profile
        if wanted is True or wanted == "auto":
            profile = Profile.find(self._layout)
        else:
            profile = Profile.read(wanted, self._layout) if wanted else None
        return profile and profile.only(sections(self.strategy) | {CONTRACT_SECTION})

    def _select_experts(self) -> tuple[ExpertSource, ExpertSource | None]:
        """Where experts are read from, and their low versions if there are any. Sets `precision` and `selected_precision`."""
        config = self._config
        self.precision: Precision = config.precision
        self.selected_precision: SelectedPrecision | None = None
        tier = KEEP if config.tier is None and (self.precision.tier or config.max_loss) else config.tier
        source = ExpertSource.make(self._layout, config.experts, tier, config.verify_reads)
        if config.max_loss:
            share = usual_share(self._footprint, self._budget, config.expert_memory)
            self.selected_precision = LossContract.find(self._layout, self.profile, source, config.max_loss, share)
            self.precision = self.selected_precision.precision
            source = replace(source, tier=self.selected_precision.tier)
            config.check_precision(self.precision)
        return source, source.low(self.precision.tier) if self.precision.tier else None

    def _make_buffer(self) -> ExpertBuffer:
        config = self._config
        return ExpertBuffer(
            n_lanes=config.n_lanes,
            keep=self.strategy.keep,
            eager=self.strategy.eager,
            serial=self.strategy.serial,
            direct_io=config.direct_io,
            gate_input=config.gate_input or wants_gate_input(self.strategy),
            gate_logits=wants_gate_logits(self.strategy, config.trace),
        )

    def _load_model(self) -> None:
        """llama.cpp loads everything but what stays on disk, for which it reserves address space in the buffer."""
        with self.expert_buffer.loading(self._tensor_buffers, embedding=self._layout.lookup_embedding is not None) as self._overrides:
            try:
                self.load(self._config.model_path, **self._keywords)
            except ValueError as error:
                raise ModelError(f"{self._config.model_path}: llama.cpp cannot load it: {error} (more with verbose=True)") from error
        self.on_close(self.expert_buffer.close)

    def _start_buffer(self) -> None:
        """Sizes the arenas from what the loaded model has left of the budget."""
        buffer, precision = self.expert_buffer, self.precision
        self._sizer = ArenaSizer(buffer, self._budget, self._config.expert_memory, self._needs(), precision.low_share)
        buffer.start(*self._sizer.arenas)
        self._prompt_meter = PromptMeter(buffer, self._config.n_lanes)
        if not precision.lossless:
            buffer.set_thresholds(precision.t1, precision.t2, precision.prefill_low_share, blind=self._config.deterministic)

    def _needs(self) -> Needs:
        size = self.memory_sizes()
        python = max(rss() - size.weights - size.state, 0)  # both are resident: the weights have been read, the state cleared
        return Needs(python, size.weights, size.state, size.compute, size.work, size.outputs, self.n_ctx(), self.expert_buffer.embedding_bytes)

    def _attach_driver(self) -> None:
        """The strategy's policy and predictor; what their tables take, the experts lose."""
        config, before = self._config, rss()
        if config.trace is None and not config.gate_input:
            self.expert_buffer.set_gate_rows(SAMPLE)
        self._driver = attach_driver(
            self.expert_buffer,
            self.strategy,
            self._layout,
            config.trace,
            n_lanes=config.n_lanes,
            profile=self.profile,
            precision=self.precision,
            replay=config.replay,
        )
        self._sizer.make_room(rss() - before)

    def _warm_up(self) -> None:
        if self._config.warm and self.strategy.keep:
            recall(self.expert_buffer, self._layout, self._sizer.arenas)

    # --- computing ---

    def _decode(self, decode: Callable[[], None], batch: Any) -> None:
        """Around every decode: what went wrong in a callback or an I/O worker comes before what llama.cpp says of it."""
        buffer = self.expert_buffer
        self._layout.check_unchanged()
        spans = batch_spans(batch)
        decodes = is_decode(spans) if self._decodes is None else self._decodes
        buffer.set_batch_kind(decodes)
        if self._driver is not None:
            self._driver.begin(batch, spans, decodes)
        if not decodes:
            self._prompt_meter.begin()
        started = time.perf_counter()
        with self.cancellation.in_progress(), self._core_binding or contextlib.nullcontext():
            try:
                decode()
            except RuntimeError:
                buffer.check()
                if self.cancellation.requested:
                    raise Cancelled("the answer was cancelled") from None
                raise
        buffer.check()
        seconds = time.perf_counter() - started
        self.timing.add(batch.n_tokens, seconds, decodes)
        if not decodes:
            self._prompt_meter.end(batch.n_tokens, seconds)
        self._sizer.look()

    @contextlib.contextmanager
    def batches_as(self, *, decode: bool) -> Iterator[None]:
        """While open, batches are taken for what the caller says they are.

        By itself a batch that has one token of each of its sequences is taken for decoding, and any other for a prompt: say
        decode=True where several tokens of a sequence are a draft that is verified.
        """
        before, self._decodes = self._decodes, decode
        try:
            yield
        finally:
            self._decodes = before

    def cancel(self) -> None:
        """Ends what is being computed, from any thread: it raises `Cancelled` there, within a layer. Else does nothing."""
        self.cancellation.request()

    def generate(self, *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """As llama_cpp's, with a context shift if that was asked for; `on_stats` is told when it ends."""
        before, timing = self.stats(), replace(self.timing)
        answer = super().generate
        self.cancellation.withdraw()
        with self.cancellation.in_progress():
            try:
                yield from self._context_shift.generate(answer, *args, **kwargs) if self._context_shift else answer(*args, **kwargs)
            finally:
                if self._on_stats:
                    self._on_stats(self.stats().since(before, self.timing.since(timing)))

    @property
    def n_lanes(self) -> int:
        """I/O workers."""
        return self._config.n_lanes

    @property
    def n_discarded(self) -> int:
        """Tokens that a context shift has forgotten of the last prompt and its answer."""
        return self._context_shift.n_discarded if self._context_shift else 0

    # --- memory ---

    def set_memory(self, memory: str | int) -> None:
        """Moves the budget of a running model, between answers: the arena is resized at once.

        Raises:
            BudgetError: below what the model needs; the old budget stays.
            OptionError: not a size.
        """
        self._sizer.move(parse_size(memory))
        if self._driver is None:  # as long as all experts fit, no driver is attached
            self._attach_driver()
            self.set_gate_callback(self._listener)

    @property
    def plan(self) -> Plan:
        """How the budget is divided."""
        return self._sizer.plan

    def memory_sizes(self) -> MemorySizes:
        """What lies in host memory beside Python and the experts."""
        return memory_sizes(self)

    # --- watching ---

    @property
    def expert_buffer(self) -> ExpertBuffer:
        if self._buffer is None:
            raise MoeoffError("the model is closed")
        return self._buffer

    def set_gate_callback(self, callback: Callable[[GateEvent], None] | None) -> None:
        """See `ExpertBuffer.set_gate_callback`; a strategy's own and the trace keep theirs."""
        self._listener = callback
        if self._driver is not None and self._driver.needed:
            self.expert_buffer.drain()
            self._driver.listener = callback
        else:
            self.expert_buffer.set_gate_callback(callback)

    def stats(self) -> Stats:
        """What happened since the model was opened, or since `reset_stats()`."""
        stats = Stats.collect(
            self.expert_buffer, strategy=self.strategy.name, model=self.model_path, tier=self._source.tier, budget=self.plan.budget, peak=peak_rss()
        )
        stats = replace(
            stats, micro_batch=self.micro_batch.n_tokens, micro_batch_reason=self.micro_batch.reason, memory=self.plan.items(self._footprint.embedding)
        )
        prefetcher = self._driver.prefetcher if self._driver is not None else None
        if prefetcher is not None:
            stats = replace(stats, prefetch_on=prefetcher.on, prefetch_gain=prefetcher.gain)
        if self.selected_precision is None:
            return stats
        return replace(stats, max_loss=self.selected_precision.max_loss, estimated_loss=self.selected_precision.estimated_loss)

    def reset_stats(self) -> None:
        self.expert_buffer.reset_stats()
        self.timing.reset()

    # --- closing ---

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes trace and driver, remembers what is resident for a warm start, and frees the model. May be called twice."""
        buffer = self._buffer
        if buffer is not None and buffer.running and not sys.is_finalizing():
            if self._driver is not None:
                stats = asdict(self.stats())
                self._driver.close({name: stats[name] for name in ("demand_hits", "demand_misses", "evictions", "bytes_read", "low_bytes_read", "arena_bytes")})
            if self._config.warm:
                remember(buffer, self._layout)
            if rates := self._prompt_meter.rates:
                keep_rates(self._layout, self._keywords["n_threads"], rates)
        if self.loaded:
            super().close()
        if self._core_binding is not None:
            self._core_binding.close()
        if buffer is not None:
            buffer.close()
