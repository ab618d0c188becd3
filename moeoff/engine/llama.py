"""`Llama`: llama_cpp's class whose routed experts stay on disk and share a bounded arena in memory."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace

from .. import native  # first: it prepares the process for llama.cpp  # isort: skip

import llama_cpp
from llama_cpp import llama_cpp as _binding

from ..budget.footprint import require_room, usual_share
from ..budget.loss_contract import SECTION as CONTRACT_SECTION
from ..budget.loss_contract import LossContract, parse_loss
from ..budget.memory_plan import Needs, Plan
from ..budget.precision import LOSSLESS, Precision
from ..companion.file import KEEP, Companion
from ..companion.profile import Profile
from ..companion.source import ExpertSource
from ..errors import Cancelled, ModelError, MoeoffError, OptionError
from ..gguf.layout import Layout
from ..memory import DEFAULT_SHARE, available, parse_size, peak_rss, rss
from ..threads import CoreBinding
from .arena_sizer import ArenaSizer
from .cancellation import Cancellation
from .driver import Driver
from .driver_factory import attach_driver, sections, wants_gate_input
from .expert_buffer import ExpertBuffer, GateEvent
from .log import set_log
from .stats import Stats, Timing
from .strategy import Strategy, get_strategy
from .warm_start import recall, remember

_KEYWORDS = {name for name, p in inspect.signature(llama_cpp.Llama.__init__).parameters.items() if p.kind is not inspect.Parameter.VAR_KEYWORD} - {"self"}


def _progress_callback(progress):
    """`bool (*llama_progress_callback)(float progress, void * user_data)` around a Python function; false would end the load."""

    def report(fraction: float, _user) -> bool:
        with contextlib.suppress(Exception):  # must not cross the C frame below, and a progress bar is not worth a model
            progress(fraction)
        return True

    return _binding.llama_progress_callback(report) if progress else _binding.llama_progress_callback()


class Llama(llama_cpp.Llama):
    """A Mixture-of-Experts model that needs less memory than its file.

    Args:
        model_path: a GGUF with routed experts; of a split model the first part.
        memory: bound of this process's resident memory, "6G", "80%" or bytes. The default is 80 % of what is available.
        expert_memory: bound of the experts' arena alone, instead of `memory`.
        strategy: what stays in memory and what is prefetched, by name: `moeoff.engine.strategy.strategy_names()`, docs/strategies.md.
        profile: of `moeoff calibrate`; "auto" takes the one beside the model if there is one, False none.
        n_lanes: I/O threads.
        direct_io: False reads through the page cache.
        experts: companion file of `moeoff convert`; "auto" takes the one beside the model if there is one, False none.
        tier: of the companion, as "Q2_K". The default, "keep", is the model's own precision.
        verify_reads: compares everything read of the experts with its hash in the companion; `ReadError` if it differs.
        gate_input: gate events carry the router's input (see `set_gate_callback`).
        trace: file that gets every gate event, for `moeoff simulate`; a trace of the same model is continued.
        warm: remembers on closing which experts were resident, in which version, and loads them in the background on the next start.
        precision: which experts may be served in lower precision, or not at all; the default is lossless.
        max_loss: instead of `precision`: the bound of lost perplexity, as "1%"; takes what `moeoff calibrate --max-loss` measured
            on this very model.
        deterministic: lossy decisions look at the gates alone and not at what is resident, so that the text does not depend on
            timing, memory or what was asked before. An expert that is resident may then be served in low precision.
        replay: trace of an earlier run with the same prompts: its decisions are taken again instead of new ones, so that the
            results are the same bit for bit whatever is resident.
        progress: called with the loaded fraction, 0 to 1, while the weights outside the experts are read.
        on_stats: called with the `Stats` of each answer when it ends.
        **llama_cpp_kwargs: those of `llama_cpp.Llama`; `n_threads` is every core this process may use by default, and
            `use_mmap` and `use_mlock` are not available, because the experts are not mapped.

    Raises:
        ModelError: the file is missing, damaged, or has no routed experts.
        BudgetError: the budget is below what the model needs; the message says what would do.
        OptionError: an unknown keyword or strategy, or a value that makes no sense.
    """

    def __init__(
        self,
        model_path: str,
        *,
        memory: str | int | None = None,
        expert_memory: str | int | None = None,
        strategy: str | Strategy = "auto",
        profile: str | os.PathLike | bool = "auto",
        n_lanes: int = 4,
        direct_io: bool = True,
        experts: Companion | str | os.PathLike | bool = "auto",
        tier: str | None = None,
        verify_reads: bool = False,
        gate_input: bool = False,
        trace: str | os.PathLike | None = None,
        warm: bool = False,
        precision: Precision = LOSSLESS,
        max_loss: str | float | None = None,
        deterministic: bool = False,
        replay: str | os.PathLike | None = None,
        progress: Callable[[float], None] | None = None,
        on_stats: Callable[[Stats], None] | None = None,
        **llama_cpp_kwargs,
    ):
        self._buffer: ExpertBuffer | None = None
        model_path = os.fspath(model_path)
        unknown = sorted(set(llama_cpp_kwargs) - _KEYWORDS)
        if unknown:
            raise OptionError(f"unknown option {unknown[0]!r}: neither moeoff.Llama nor llama_cpp.Llama takes it")
        if llama_cpp_kwargs.pop("use_mmap", False) or llama_cpp_kwargs.get("use_mlock", False):
            raise OptionError("use_mmap and use_mlock cannot be used: the experts are read from the file, not mapped")
        if llama_cpp_kwargs.get("n_gpu_layers") and not _binding.llama_supports_gpu_offload():
            raise OptionError("n_gpu_layers: this build of llama.cpp has no GPU backend; rebuild with CMAKE_ARGS=-DGGML_CUDA=ON (or METAL, VULKAN)")
        if memory is not None and expert_memory is not None:
            raise OptionError("give memory or expert_memory, not both")
        if max_loss is not None:
            max_loss = parse_loss(max_loss)
            if precision is not LOSSLESS or tier not in (None, KEEP):
                raise OptionError("max_loss finds the precision by itself, measured against the model's own: give no other")
        self.strategy = get_strategy(strategy)
        self._driver: Driver | None = None
        gate_input = gate_input or wants_gate_input(self.strategy, trace)
        budget = parse_size(memory) if memory is not None else None
        arena = parse_size(expert_memory) if expert_memory is not None else None
        if budget is None and arena is None:
            budget = int(available() * DEFAULT_SHARE)

        layout = Layout.read(model_path)
        layout.require_experts()
        n_ctx = llama_cpp_kwargs.get("n_ctx", 512) or layout.n_ctx_train or 512
        require_room(layout, n_ctx, budget or available())
        if profile is True or profile == "auto":
            self.profile = Profile.find(layout)
        else:
            self.profile = Profile.read(profile, layout) if profile else None
        if self.profile is not None:
            self.profile = self.profile.only(sections(self.strategy) | {CONTRACT_SECTION})
        source = ExpertSource.make(layout, experts, KEEP if tier is None and (precision.tier or max_loss) else tier, verify_reads)
        self.selected_precision = None
        if max_loss:
            self.selected_precision = LossContract.find(layout, self.profile, source, max_loss, usual_share(layout, n_ctx, budget, arena))
            precision, source = self.selected_precision.precision, replace(source, tier=self.selected_precision.tier)
        if not self.strategy.eager and not (precision.lossless and replay is None):
            raise OptionError(f"strategy {self.strategy.name!r} serves every expert in its own precision")
        self.precision = precision
        low = source.low(precision.tier) if precision.tier else None

        n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        llama_cpp_kwargs["n_threads"] = llama_cpp_kwargs.get("n_threads") or n_cores
        llama_cpp_kwargs["n_threads_batch"] = llama_cpp_kwargs.get("n_threads_batch") or llama_cpp_kwargs["n_threads"]
        llama_cpp_kwargs.setdefault("verbose", False)

        set_log(llama_cpp_kwargs["verbose"])

        self._buffer = ExpertBuffer(
            n_lanes=n_lanes,
            keep=self.strategy.keep,
            eager=self.strategy.eager,
            serial=self.strategy.serial,
            direct_io=direct_io,
            gate_input=gate_input,
        )
        self.timing = Timing()
        self._layout = layout
        self._warm = warm
        self._on_stats = on_stats
        self._progress = _progress_callback(progress)
        self._listener: Callable[[GateEvent], None] | None = None
        self.cancellation = Cancellation(self._buffer)
        try:
            with self._buffer.loading() as self._overrides:
                try:
                    super().__init__(model_path, use_mmap=False, **llama_cpp_kwargs)
                except ValueError as error:  # llama_cpp's word for every failed load; llama.cpp's log has the reason
                    raise ModelError(f"{model_path}: llama.cpp cannot load it: {error} (more with verbose=True)") from error
            self._stack.callback(self._buffer.close)
            self._buffer.attach(layout, source, low)
            self._tier = source.tier
            self._sizer = ArenaSizer(self._buffer, budget, arena, self._needs(), precision.low_share)
            self._buffer.start(*self._sizer.arenas)
            if not precision.lossless:
                self._buffer.set_rule(precision.t1, precision.t2, precision.prefill_low_share, blind=deterministic)
            self._attach = functools.partial(
                attach_driver, self._buffer, self.strategy, layout, trace, n_lanes=n_lanes, profile=self.profile, precision=precision, replay=replay
            )
            self._driver = self._attach()
            _binding.llama_set_abort_callback(self._ctx.ctx, native.should_abort, self._buffer.handle)
            self._core_binding = CoreBinding(self._ctx.ctx)
            self._guard_decode()
            if warm and self.strategy.keep:
                recall(self._buffer, layout, self._sizer.arenas)
        except BaseException:
            self.close()
            raise

    # llama_cpp.Llama.__init__ assigns its parameters once, then loads: the place to put ours in
    @property
    def model_params(self):
        return self._model_params

    @model_params.setter
    def model_params(self, params) -> None:
        params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p)
        params.progress_callback = self._progress
        params.use_extra_bufts = False  # repacked kernels round differently from the ones experts are computed with
        self._model_params = params

    def _needs(self) -> Needs:
        weights, state, compute, work = self.context_memory()
        outputs = 4 * self._n_vocab * (self.n_batch + self.scores.shape[0] if self._logits_all else 1)
        python = max(rss() - weights - state, 0)  # both are resident: the weights have been read, the state cleared
        return Needs(python, weights, state, compute + work + outputs, self.n_ctx())

    def _guard_decode(self) -> None:
        """After every decode, what went wrong in a callback or a lane comes first."""
        buffer, ctx, timing = self._buffer, self._ctx, self.timing
        decode = type(ctx).decode

        def guarded(batch) -> None:
            self._layout.check_unchanged()
            if self._driver is not None:
                self._driver.begin(batch.batch)
            started = time.perf_counter()
            with self.cancellation.in_progress(), self._core_binding:
                try:
                    decode(ctx, batch)
                except RuntimeError:
                    buffer.check()
                    if self.cancellation.requested:
                        raise Cancelled("the answer was cancelled") from None
                    raise
            buffer.check()
            timing.add(batch.batch.n_tokens, time.perf_counter() - started)
            self._sizer.look()

        ctx.decode = guarded

    def cancel(self) -> None:
        """Ends what is being computed, from any thread: it raises `Cancelled` there, within a layer. Else does nothing."""
        self.cancellation.request()

    def generate(self, *args, **kwargs):
        before, timing = self.stats(), replace(self.timing)
        self.cancellation.withdraw()
        with self.cancellation.in_progress():
            try:
                yield from super().generate(*args, **kwargs)
            finally:
                if self._on_stats:
                    self._on_stats(self.stats().since(before, self.timing.since(timing)))

    def set_memory(self, memory: str | int) -> None:
        """Moves the budget of a running model, between answers: the arena grows or gives way at once.

        Raises:
            BudgetError: below what the model needs; the old budget stays.
            OptionError: not a size.
        """
        self._sizer.move(parse_size(memory))
        if self._driver is None:  # nobody was needed as long as everything fitted
            self._driver = self._attach()
            self.set_gate_callback(self._listener)

    @property
    def plan(self) -> Plan:
        """How the budget is divided."""
        return self._sizer.plan

    def context_memory(self) -> tuple[int, int, int, int]:
        """Bytes in host memory of: weights without the reserved experts, KV and other state, compute buffers, work area."""
        out = (ctypes.c_uint64 * 4)()
        native.context_memory(self._ctx.ctx, out)
        return tuple(out)

    @property
    def expert_buffer(self) -> ExpertBuffer:
        if self._buffer is None:
            raise MoeoffError("the model is closed")
        return self._buffer

    def set_gate_callback(self, callback) -> None:
        """See `ExpertBuffer.set_gate_callback`; a strategy's own and the trace keep theirs."""
        self._listener = callback
        if self._driver is not None and self._driver.needed:
            self.expert_buffer.drain()
            self._driver.listener = callback
        else:
            self.expert_buffer.set_gate_callback(callback)

    def stats(self) -> Stats:
        """What happened since the model was opened, or since `reset_stats()`."""
        stats = Stats.collect(self.expert_buffer, strategy=self.strategy.name, model=self.model_path, tier=self._tier, budget=self.plan.budget, peak=peak_rss())
        prefetcher = self._driver.prefetcher if self._driver is not None else None
        if prefetcher is not None:
            stats = replace(stats, prefetch_on=prefetcher.on, prefetch_gain=prefetcher.gain)
        if self.selected_precision is None:
            return stats
        return replace(stats, max_loss=self.selected_precision.max_loss, estimated_loss=self.selected_precision.estimated_loss)

    def reset_stats(self) -> None:
        self.expert_buffer.reset_stats()
        self.timing.reset()

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_exc) -> None:
        self.close()

    def close(self) -> None:
        if getattr(self, "_driver", None) is not None and self._buffer.running and not sys.is_finalizing():
            stats = asdict(self.stats())
            self._driver.close({name: stats[name] for name in ("demand_hits", "demand_misses", "evictions", "bytes_read", "low_bytes_read", "arena_bytes")})
        if self._buffer is not None and self._buffer.running and self._warm and not sys.is_finalizing():
            remember(self._buffer, self._layout)
        if getattr(self, "_stack", None) is not None:
            super().close()
        if getattr(self, "_core_binding", None) is not None:
            self._core_binding.close()
        if self._buffer is not None:
            self._buffer.close()
