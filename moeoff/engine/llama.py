"""`Llama`: llama_cpp's class whose routed experts stay on disk and share a bounded arena in memory."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from .. import native
from ..binding import PatchedLlama, set_log
from ..budget.dry_load import MemorySizes, memory_sizes
from ..budget.loss_contract import SelectedPrecision
from ..budget.memory_plan import Plan
from ..budget.micro_batch import MicroBatch
from ..budget.precision import Precision
from ..companion.profile import Profile
from ..errors import Cancelled, ComputeError, ModelError, MoeoffError
from ..gate_event import GateEvent
from ..memory import parse_size
from ..threads import CoreBinding
from .assembly import Assembly, config_of
from .batch_rows import BatchRows
from .batch_spans import batch_sequences, batch_spans, is_decode
from .cancellation import Cancellation
from .config import Config
from .context_shift import ContextShift
from .expert_buffer import ExpertBuffer
from .stats import Stats, Timing
from .strategy import Strategy


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
    _assembly: Assembly | None = None
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
        config = config_of(model_path, options)
        self._progress, self._on_stats = progress, on_stats
        self._one_output = not config.gate_input
        parts = self._assembly = Assembly(config)
        set_log(parts.keywords["verbose"])
        try:
            self._load_model()
            parts.attach()
            parts.start_devices(self.context_handle, adapters=bool(parts.config.llama_cpp.get("lora_path")))
            parts.start(self.memory_sizes(), self.context_handle)
            parts.attach_driver()
            self.set_abort_callback(native.should_abort, parts.buffer.handle)
            self._core_binding = None if self.numa else CoreBinding(self.context_handle)  # llama.cpp's strategies for NUMA place threads themselves
            self.wrap_decode(self._decode)
            if config.context_shift:
                self._context_shift = ContextShift(self, config.n_keep)
                self.without_end()
            parts.warm_up()
        except BaseException:
            self.close()
            raise

    @property
    def _parts(self) -> Assembly:
        if self._assembly is None:
            raise MoeoffError("the model is closed")
        return self._assembly

    def _load_model(self) -> None:
        parts = self._parts
        with parts.loading() as self._overrides:
            try:
                self.load(parts.config.model_path, **parts.keywords)
            except ValueError as error:
                raise ModelError(f"{parts.config.model_path}: llama.cpp cannot load it: {error} (more with verbose=True)") from error
        self.on_close(parts.close)

    # --- computing ---

    def _decode(self, decode: Callable[[], None], batch: Any) -> None:
        """Around every decode: what went wrong in a callback or an I/O worker comes before what llama.cpp says of it."""
        parts = self._parts
        spans = batch_spans(batch)
        if self._decodes is not None:
            spans = {sequence: span._replace(decode=self._decodes) for sequence, span in spans.items()}
        decodes = is_decode(spans)
        parts.begin(np.array(batch.token[: batch.n_tokens]), spans, decodes, self._batch_rows(batch) if len(spans) > 1 else None)
        started = time.perf_counter()
        with parts.cancellation.in_progress(), self._core_binding or contextlib.nullcontext():
            try:
                decode()
            except RuntimeError as error:
                parts.buffer.check()
                if parts.cancellation.requested:
                    raise Cancelled("the answer was cancelled") from None
                raise ComputeError(f"llama.cpp could not compute {batch.n_tokens} tokens: {error}") from error
        parts.end(batch.n_tokens, time.perf_counter() - started, decodes)

    def _batch_rows(self, batch: Any) -> BatchRows | None:
        outputs = np.array(batch.logits[: batch.n_tokens], bool)  # NO or YES
        return self._parts.splitting.rows(np.array(batch_sequences(batch), np.int32), outputs)

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
        if self._parts.lossy.simulates:
            self._forget_what_was_not_followed(args[0] if args else kwargs["tokens"])
        self.cancellation.withdraw()
        with self.cancellation.in_progress():
            try:
                yield from self._context_shift.generate(answer, *args, **kwargs) if self._context_shift else answer(*args, **kwargs)
            finally:
                if self._on_stats:
                    self._on_stats(self.stats().since(before, self.timing.since(timing)))

    def _forget_what_was_not_followed(self, tokens: Sequence[int]) -> None:
        """The text must not depend on what was asked before: unless a prompt goes on behind all of it, it is computed from its start."""
        n = self.n_tokens
        if n != self._parts.lossy.followed or len(tokens) <= n or self.input_ids[:n].tolist() != list(tokens[:n]):
            self.clear_context()

    @property
    def n_lanes(self) -> int:
        """I/O workers."""
        return self._parts.config.n_lanes

    @property
    def n_discarded(self) -> int:
        """Tokens that a context shift has forgotten of the last prompt and its answer."""
        return self._context_shift.n_discarded if self._context_shift else 0

    # --- memory ---

    def set_memory(self, memory: str | int | None = None, *, vram: str | int | None = None) -> None:
        """Moves the budget of a running model, between answers: the arena is resized at once.

        Args:
            vram: of what is allocated on each device, of a model that was opened with one: its slots are empty then.

        Raises:
            BudgetError: below what the model needs, or more than a device has; the old budget stays.
            OptionError: not a size, or the model has no experts on devices.
        """
        if vram is not None:
            self._parts.set_vram(vram)
        if memory is not None:
            self._parts.set_memory(parse_size(memory))

    @property
    def plan(self) -> Plan:
        """How the budget is divided."""
        return self._parts.sizer.plan

    def memory_sizes(self) -> MemorySizes:
        """What lies in host memory beside Python and the experts."""
        return memory_sizes(self)

    # --- watching ---

    @property
    def expert_buffer(self) -> ExpertBuffer:
        return self._parts.buffer

    @property
    def cancellation(self) -> Cancellation:
        return self._parts.cancellation

    @property
    def timing(self) -> Timing:
        return self._parts.timing

    @property
    def strategy(self) -> Strategy:
        return self._parts.strategy

    @property
    def micro_batch(self) -> MicroBatch:
        return self._parts.micro_batch

    @property
    def profile(self) -> Profile | None:
        """What of it the strategy may take."""
        return self._parts.profile

    @property
    def precision(self) -> Precision:
        return self._parts.lossy.precision

    def use_precision(self, precision: Precision) -> None:
        """Another one than the model was opened with, from the next answer on.

        Raises:
            OptionError: it reroutes and the first one did not, or it needs low versions that are not there.
        """
        self._parts.lossy.use(self._parts.buffer, precision)

    @property
    def selected_precision(self) -> SelectedPrecision | None:
        """What `max_loss` has chosen."""
        return self._parts.lossy.selected

    @property
    def settings_summary(self) -> str:
        """What `moeoff tune` has chosen, in a line; empty: nothing."""
        return self._parts.settings_summary

    def set_gate_callback(self, callback: Callable[[GateEvent], None] | None) -> None:
        """See `ExpertBuffer.set_gate_callback`; a strategy's own and the trace keep theirs."""
        self._parts.set_gate_callback(callback)

    def stats(self) -> Stats:
        """What happened since the model was opened, or since `reset_stats()`."""
        return self._parts.stats()

    def reset_stats(self) -> None:
        self._parts.reset_stats()

    # --- closing ---

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes trace and driver, remembers what is resident for a warm start, and frees the model. May be called twice."""
        with contextlib.ExitStack() as stack:  # each of them whatever becomes of the ones before it, the last first
            if self._assembly is not None:
                stack.callback(self._assembly.close)
            if self._core_binding is not None:
                stack.callback(self._core_binding.close)
            if self.loaded:
                stack.callback(super().close)
            if self._assembly is not None:
                self._assembly.close_driver()
