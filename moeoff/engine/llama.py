"""`Llama`: llama_cpp's class whose routed experts stay on disk and share a bounded arena in memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from .. import native
from ..binding import PatchedLlama, set_log
from ..budget.footprint import require_room, usual_share
from ..budget.loss_contract import SECTION as CONTRACT_SECTION
from ..budget.loss_contract import LossContract, SelectedPrecision
from ..budget.memory_plan import Needs, Plan
from ..budget.precision import Precision
from ..companion.file import KEEP
from ..companion.profile import Profile
from ..companion.source import ExpertSource
from ..errors import Cancelled, ModelError, MoeoffError
from ..gate_event import GateEvent
from ..gguf.layout import Layout
from ..memory import DEFAULT_SHARE, available, parse_size, peak_rss, rss
from ..threads import CoreBinding
from .arena_sizer import ArenaSizer
from .batch_spans import batch_spans, is_decode
from .cancellation import Cancellation
from .config import Config
from .driver import Driver
from .driver_factory import attach_driver, sections, wants_gate_input, wants_gate_logits
from .expert_buffer import ExpertBuffer
from .prefetcher import SAMPLE
from .stats import Stats, Timing
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
        self._config, self.strategy = config, config.strategy
        self._progress, self._on_stats = progress, on_stats
        self.timing = Timing()

        self._budget = self._choose_budget()
        self._layout = self._read_layout()
        self.profile = self._find_profile()
        self._source, self._low_source = self._select_experts()
        set_log(config.keywords["verbose"])
        self._buffer = self._make_buffer()
        self.cancellation = Cancellation(self._buffer)
        try:
            self._load_model()
            self._buffer.attach(self._layout, self._source, self._low_source)
            self._start_buffer()
            self._driver = self._make_driver()
            self.set_abort_callback(native.should_abort, self._buffer.handle)
            self._core_binding = None if self.numa else CoreBinding(self.context_handle)  # llama.cpp's strategies for NUMA place threads themselves
            self.wrap_decode(self._decode)
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
        """The file's headers, and whether the model can fit, before anything is loaded."""
        layout = Layout.read(self._config.model_path)
        layout.require_experts()
        require_room(layout, self._n_ctx_of(layout), self._budget or available())
        return layout

    def _n_ctx_of(self, layout: Layout) -> int:
        return self._config.n_ctx or layout.n_ctx_train or 512

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
            share = usual_share(self._layout, self._n_ctx_of(self._layout), self._budget, config.expert_memory)
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
        """llama.cpp loads everything but the experts, for which it reserves address space in the buffer."""
        with self.expert_buffer.loading() as self._overrides:
            try:
                self.load(self._config.model_path, **self._config.keywords)
            except ValueError as error:
                raise ModelError(f"{self._config.model_path}: llama.cpp cannot load it: {error} (more with verbose=True)") from error
        self.on_close(self.expert_buffer.close)

    def _start_buffer(self) -> None:
        """Sizes the arenas from what the loaded model has left of the budget."""
        buffer, precision = self.expert_buffer, self.precision
        self._sizer = ArenaSizer(buffer, self._budget, self._config.expert_memory, self._needs(), precision.low_share)
        buffer.start(*self._sizer.arenas)
        if not precision.lossless:
            buffer.set_thresholds(precision.t1, precision.t2, precision.prefill_low_share, blind=self._config.deterministic)

    def _needs(self) -> Needs:
        weights, state, compute, work = self.context_memory()
        python = max(rss() - weights - state, 0)  # both are resident: the weights have been read, the state cleared
        return Needs(python, weights, state, compute + work + self.output_bytes, self.n_ctx())

    def _make_driver(self) -> Driver | None:
        config = self._config
        if config.trace is None and not config.gate_input:
            self.expert_buffer.set_gate_rows(SAMPLE)
        return attach_driver(
            self.expert_buffer,
            self.strategy,
            self._layout,
            config.trace,
            n_lanes=config.n_lanes,
            profile=self.profile,
            precision=self.precision,
            replay=config.replay,
        )

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
        self.timing.add(batch.n_tokens, time.perf_counter() - started, decodes)
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
        """As llama_cpp's; `on_stats` is told when it ends."""
        before, timing = self.stats(), replace(self.timing)
        self.cancellation.withdraw()
        with self.cancellation.in_progress():
            try:
                yield from super().generate(*args, **kwargs)
            finally:
                if self._on_stats:
                    self._on_stats(self.stats().since(before, self.timing.since(timing)))

    # --- memory ---

    def set_memory(self, memory: str | int) -> None:
        """Moves the budget of a running model, between answers: the arena is resized at once.

        Raises:
            BudgetError: below what the model needs; the old budget stays.
            OptionError: not a size.
        """
        self._sizer.move(parse_size(memory))
        if self._driver is None:  # as long as all experts fit, no driver is attached
            self._driver = self._make_driver()
            self.set_gate_callback(self._listener)

    @property
    def plan(self) -> Plan:
        """How the budget is divided."""
        return self._sizer.plan

    def context_memory(self) -> tuple[int, int, int, int]:
        """Bytes in host memory of: weights without the reserved experts, KV and other state, compute buffers, work area."""
        out = (ctypes.c_uint64 * 4)()
        if native.context_memory(self.context_handle, out) != 0:
            raise MoeoffError("no memory for the graph of the largest batch")
        weights, state, compute, work = out
        return weights, state, compute, work

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
        if self.loaded:
            super().close()
        if self._core_binding is not None:
            self._core_binding.close()
        if buffer is not None:
            buffer.close()
