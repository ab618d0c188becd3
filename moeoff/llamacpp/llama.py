"""llama_cpp, and the only module that depends on its internals
(docs/internals/patches.md).

Importing this module prepares the process and loads llama.cpp. Other modules import
llama_cpp from here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import inspect
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import MoeoffError, OptionError, one_line
from ..system import machine
from . import templates
from .compute_thread import computes_here, is_cancelled
from .model_lock import ModelLock

# OpenMP's barriers spin for milliseconds by default, and wait for preempted cores: 3.5
# tok/s instead of 10.4 beside two busy processes on 2 cores, no difference on an idle
# machine. OpenMP reads the variable when llama.cpp is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
machine.load()

# llama_cpp's functions are not annotated: hence the ignored types
import llama_cpp
from llama_cpp import _internals, _logger, llama_chat_format
from llama_cpp import llama_cpp as api

__all__ = ["api", "llama_cpp"]  # re-exported, besides this module's names

# jinja2 would run a model file's template without limits
llama_chat_format.ImmutableSandboxedEnvironment = (  # type: ignore[attr-defined]
    templates.Environment  # type: ignore[assignment]
)

lib: ctypes.CDLL = api._lib  # llama_cpp's handle: a second load could load a second ggml


def build_identity() -> tuple[str, str]:
    """Return the libraries' digest and CPU features, which affect rounding."""
    digest = machine.libraries_digest(Path(lib._name).parent, machine.LEVEL)
    return digest, api.llama_print_system_info().decode()


# keyword arguments of llama_cpp.Llama, and their defaults
KEYWORDS = {
    name: p.default
    for name, p in inspect.signature(llama_cpp.Llama.__init__).parameters.items()
    if p.kind is inspect.Parameter.KEYWORD_ONLY
}

_LOG_ERROR, _LOG_CONTINUED = 4, 5  # enum ggml_log_level


def set_log(verbose: bool) -> None:
    """Show llama.cpp's whole log, or its errors alone."""
    _logger.set_verbose(verbose)


class _ErrorCollector(threading.local):
    errors: list[str] | None = None  # llama.cpp's on this thread, None if not collected
    last = 0  # level of the line that GGML_LOG_LEVEL_CONT continues


_collected = _ErrorCollector()


# void (*ggml_log_callback)(enum ggml_log_level level, const char * text, void *
# user_data); It is set once and never replaced, because another thread may be logging.
@api.llama_log_callback  # type: ignore[untyped-decorator]
def _log(level: int, text: bytes, user: Any) -> None:
    _collected.last = _collected.last if level == _LOG_CONTINUED else level
    if _collected.errors is not None and _collected.last == _LOG_ERROR:
        _collected.errors.append(text.decode("utf-8", "replace"))
    else:
        _logger.llama_log_callback(level, text, user)


api.llama_log_set(_log, ctypes.c_void_p(0))


@contextlib.contextmanager
def _collected_errors() -> Iterator[list[str]]:
    """Collect llama.cpp's errors of this thread instead of showing them."""
    errors: list[str] = []
    outer, _collected.errors = _collected.errors, errors
    try:
        yield errors
    finally:
        _collected.errors = outer


@contextlib.contextmanager
def errors_unless(expected: Callable[[], bool]) -> Iterator[None]:
    """Collect llama.cpp's errors, and show them at the end unless `expected` returns
    True.

    A graph that is cancelled logs three errors.
    """
    errors: list[str] = []
    try:
        with _collected_errors() as errors:
            yield
    finally:
        for text in () if expected() else errors:
            _logger.llama_log_callback(_LOG_ERROR, text.encode(), None)


def _reason(errors: Sequence[str]) -> str:
    """Return the first, most specific error without names of functions and folders."""
    text = " ".join(errors[0].split()) if errors else ""
    text = re.sub(
        r"^\w+: (error loading model: |failed to initialize the context: )?(\w+: )?", "", text
    )
    return re.sub(r"\S*/(?=[\w.-]+:\d+: )", "", text)


@contextlib.contextmanager
def assertions_raise() -> Iterator[None]:
    """Make a failed ggml assertion on this thread an error of the call
    (moeoff-llama.h).
    """
    lib.moeoff_guard(1)
    try:
        yield
    finally:
        lib.moeoff_guard(-1)


def supports_gpu() -> bool:
    """Return True if llama.cpp can offload layers to a GPU.

    Vulkan's software drivers count only if GGML_VK_VISIBLE_DEVICES names them.
    """
    find_devices()
    return bool(api.llama_supports_gpu_offload())


@functools.cache
def find_devices() -> str:
    """Let llama.cpp find devices, once. Return its error about a backend, or ""."""
    with _collected_errors() as errors:
        api.llama_supports_gpu_offload()
    return _reason(errors)


# --- safe subclasses of llama_cpp's objects ---


class _Handle:
    """A pointer that raises `MoeoffError` after the model is closed, or in a fork."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, _type: type | None = None) -> Any:
        if owner is None:
            return self
        owner.lock.require_open()
        return owner.__dict__[self._name]

    def __set__(self, owner: Any, value: Any) -> None:
        owner.__dict__[self._name] = value


class _Model(_internals.LlamaModel):
    model, vocab = _Handle(), _Handle()

    def __init__(self, lock: ModelLock, **options: Any):
        self.lock = lock
        super().__init__(**options)

    def close(self) -> None:
        if self.lock.here:  # not in a fork
            super().close()  # type: ignore[no-untyped-call]


class _Context(_internals.LlamaContext):
    ctx, memory = _Handle(), _Handle()
    is_broken = False  # True after an incomplete batch: recurrent states may be half updated

    def __init__(self, lock: ModelLock, llama: weakref.ref[PatchedLlama], **options: Any):
        self.lock, self._llama = lock, llama
        super().__init__(**options)

    def decode(self, batch: Any) -> None:
        computes_here()
        if (llama := self._llama()) is not None:
            try:
                llama._check_outputs(batch.batch)
                llama._decode(functools.partial(self._compute, batch), batch.batch)
            except BaseException:
                llama._forget_incomplete()
                raise

    def _compute(self, batch: Any) -> None:
        self.is_broken = True
        super().decode(batch)
        self.is_broken = False

    def close(self) -> None:
        if self.lock.here:
            super().close()  # type: ignore[no-untyped-call]

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        """Remove positions, or return False if memory cannot be cut at p0."""
        if self.memory is None:
            raise MoeoffError(
                "the model has no KV cache (a diffusion model): it cannot continue a text"
            )
        if 0 < p0 <= api.llama_memory_seq_pos_max(self.memory, 0):
            window, llama = api.llama_model_n_swa(self.model.model), self._llama()
            if window and llama is not None and not llama._has_state:
                # llama.cpp has overwritten a part of this window
                if api.llama_memory_seq_pos_min(self.memory, 0) > max(p0 - window, 0):
                    return False
        return super().kv_cache_seq_rm(seq_id, p0, p1)


def _reads(kind: type, name: str) -> Any:
    """Let a method run beside a computing thread, but not a closing one."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.lock.read(method, self, *args, **kwargs)
        except ValueError as error:  # token out of range
            raise OptionError(str(error)) from None
        except RuntimeError as error:  # no vocabulary
            raise MoeoffError(str(error)) from None

    return call


for _name, _method in vars(_internals.LlamaModel).items():
    if inspect.isfunction(_method) and not _name.startswith("_") and _name not in vars(_Model):
        setattr(_Model, _name, _reads(_internals.LlamaModel, _name))
for _name in ("n_ctx", "pooling_type"):
    setattr(_Context, _name, _reads(_internals.LlamaContext, _name))


_TOKENS = np.dtype(api.llama_token_data)


class _Sampler(_internals.LlamaSampler):
    """llama_cpp's sampler without a reference cycle, which calls logits processors.

    The garbage collector would keep 1.8 MB for a vocabulary of 150,000. ctypes would
    swallow a processor's exceptions.
    """

    sampler: Any = None
    processors: Sequence[Callable[[Any, Any], Any]] = ()
    llama: weakref.ref[PatchedLlama]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._exit_stack.pop_all()  # holds a function that refers to this object

    def close(self) -> None:
        if self.sampler is not None:
            api.llama_sampler_free(self.sampler)
            self.sampler = None

    def sample(self, ctx: Any, idx: int = -1) -> int:
        llama = self.llama()
        if not self.processors or llama is None:
            try:
                return super().sample(ctx, idx)
            except RuntimeError as error:  # a grammar allows no token
                raise MoeoffError(str(error)) from None
        scores = np.ctypeslib.as_array(ctx.get_logits_ith(idx), (llama.n_vocab(),)).copy()
        for processor in self.processors:
            scores[:] = processor(llama._input_ids, scores)
        tokens = np.zeros(len(scores), _TOKENS)
        tokens["id"], tokens["logit"] = np.arange(len(scores)), scores
        array = api.llama_token_data_array(
            tokens.ctypes.data_as(api.llama_token_data_p), len(tokens), -1, False
        )
        api.llama_sampler_apply(self.sampler, ctypes.byref(array))
        drawn = array.data[array.selected] if 0 <= array.selected < array.size else None
        if drawn is None or drawn.logit == -np.inf:
            raise MoeoffError(
                "no token left to sample: a grammar or a logits processor excludes all"
            )
        api.llama_sampler_accept(self.sampler, drawn.id)
        return int(drawn.id)


def _bytes_of(array: np.ndarray) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


class LoadError(ValueError):
    """llama.cpp cannot load a model."""


_MOST_STATES = 3  # recurrent states kept, as in llama-server; each is as large as the current one
_STATE_COPIES = 5  # copies of a batch's hidden states on their way to next-token layers


class _AnyLlama(llama_cpp.Llama):
    _ctx: Any
    _kept_at = 0  # position of the copy of the recurrent state in tokens; 0: no copy

    def _before_load(self) -> None:
        find_devices()  # not during the load, whose errors would include a driver's

    def adds_bos(self) -> bool:
        """Return True if the model expects a beginning-of-text token."""
        return self._model.add_bos_token()

    def clear_context(self) -> None:
        """Clear the KV cache."""
        self.reset()  # type: ignore[no-untyped-call]
        self._ctx.kv_cache_clear()
        self._kept_at, self._ctx.is_broken = 0, False


class PatchedLlama(_AnyLlama):
    """llama_cpp.Llama with control of loading, a decode hook and single batches.

    After a failed or cancelled batch the context ends at the last complete micro-batch.
    Recurrent layers return to a copy of their state, made before each micro-batch of a
    prompt.

    A subclass sets `_overrides`, `_progress` and `_one_output` before `load`.
    """

    _overrides: Any  # moeoff.llamacpp.native.TensorOverrides
    _no_alloc = False  # True to plan buffers without allocating: only `context_memory` works
    _progress: Callable[[float], None] | None = None
    # True for the logits of one token per batch, unless an option needs all, as
    # llama.cpp plans: 297 MiB for 512 tokens with a vocabulary of 150,000.
    _one_output = False
    _model: Any
    _model_class: Any
    _context_class: Any
    _sampler_class = _Sampler
    _n_sequences = 1  # sequences in the context
    _unified = False  # True if the sequences share the context
    _loads_nextn = False  # True to load next-token layers
    _n_begun = 0  # tokens in the context and in the running batch
    _state = np.empty(0, np.uint8)  # copy of the recurrent state
    _is_refused = False  # True if there was no memory for the copy
    _lock: ModelLock | None = None  # llama_cpp also closes objects that were never opened

    @property
    def lock(self) -> ModelLock:
        if self._lock is None:
            self._lock = ModelLock()
        return self._lock

    def load(self, model_path: str, **options: Any) -> None:
        """Call llama_cpp.Llama's constructor.

        Raises:
            LoadError: llama.cpp cannot load the model or an adapter.
            BaseException: The exception of `_progress`.
        """
        weak = weakref.ref(self)  # avoids a cycle, which would outlive the last user
        self._model_class = functools.partial(_Model, self.lock)
        self._context_class = functools.partial(_Context, self.lock, weak)
        raised: list[BaseException] = []
        progress = self._progress

        # bool (*llama_progress_callback)(float progress, void * user_data);
        def report(fraction: float, _user: Any) -> bool:
            try:
                if progress is not None:
                    progress(fraction)
            except BaseException as error:  # must not cross the C frame below
                raised.append(error)
            return not raised and not is_cancelled()

        self._progress_callback = api.llama_progress_callback(report)
        wants_all = options.get("logits_all") or options.get("embedding")
        self._n_outputs_max = self._n_sequences if self._one_output and not wants_all else 0
        with _collected_errors() as errors:
            try:
                with assertions_raise():
                    super().__init__(model_path, **options)
            except RuntimeError as error:
                if not options.get("lora_path"):
                    raise
                raise LoadError(
                    f"its adapter {options['lora_path']}: {_reason(errors) or error}"
                ) from error
            except ValueError as error:
                if raised:
                    raise raised[0] from None
                raise LoadError(_reason(errors) or str(error)) from error
        if raised:
            raise raised[0]
        sys.stderr.writelines(f"{one_line(text.rstrip())}\n" for text in errors if text.strip())
        # llama.cpp rounds n_ctx up, but llama_cpp's arrays have the requested length
        if (n_ctx := self.n_ctx()) > len(self.input_ids):
            self.input_ids = np.zeros(n_ctx, np.intc)
            if self._logits_all:
                self.scores = np.empty((n_ctx, self._n_vocab), np.single)

    def _before_load(self) -> None:
        super()._before_load()
        model, context = self.model_params, self.context_params
        model.tensor_buft_overrides = self._overrides.address
        model.progress_callback = self._progress_callback
        model.no_alloc = self._no_alloc
        # would map some tensors above 4 GiB, outside the plan
        model.lazy_mode = api.LLAMA_LAZY_MODE_OFF
        # repacked kernels round differently from the experts' kernels
        model.use_extra_bufts = False
        context.n_outputs_max, context.n_seq_max, context.kv_unified = (
            self._n_outputs_max,
            self._n_sequences,
            self._unified,
        )
        model.load_mtp = self._loads_nextn
        if self._loads_nextn:  # a batch must hold all of these states and one more token
            context.n_rs_seq = max(min(_MOST_STATES, context.n_ubatch - 2), 0)

    def new_context(self, **params: Any) -> int:
        """Create another struct llama_context * of the model, which the caller frees.

        Args:
            params: Fields of llama_context_params that differ from this context's.

        Raises:
            LoadError: llama.cpp cannot create the context.
        """
        changed = type(self.context_params).from_buffer_copy(self.context_params)
        for name, value in params.items():
            setattr(changed, name, value)
        with _collected_errors() as errors, assertions_raise():
            ctx: int | None = api.llama_init_from_model(self.model_handle, changed)
        if not ctx:
            raise LoadError(_reason(errors) or f"cannot create a context with {', '.join(params)}")
        return ctx

    @property
    def loaded(self) -> bool:
        return getattr(self, "_stack", None) is not None

    @property
    def context_handle(self) -> int:
        """The struct llama_context *."""
        handle: int = self._ctx.ctx
        return handle

    @property
    def model_handle(self) -> int:
        """The struct llama_model *."""
        handle: int = self._model.model
        return handle

    def _decode(self, decode: Callable[[], None], _batch: Any) -> None:
        """Compute a struct llama_batch with `decode`. A hook."""
        decode()

    def _check_outputs(self, batch: Any) -> None:
        """Raise `OptionError` for more outputs than planned, which would crash."""
        if self._n_outputs_max and batch.n_tokens > 1:
            n_outputs = batch.n_tokens - ctypes.string_at(batch.logits, batch.n_tokens).count(0)
            if n_outputs > self._n_outputs_max:
                raise OptionError(
                    f"logits of {n_outputs} tokens of a batch: open the model with logits_all=True"
                )

    def on_close(self, function: Callable[[], None]) -> None:
        """Register a function to call before the model is freed."""
        self._stack.callback(function)

    @property
    def output_bytes(self) -> int:
        """Bytes of the logits and of the hidden states for next-token layers."""
        rows = self.n_batch + self.scores.shape[0] if self._logits_all else self._n_sequences
        hidden = (
            api.llama_model_n_embd_out(self.model_handle) * self.n_batch * _STATE_COPIES
            if self._loads_nextn
            else 0
        )
        return 4 * (self._n_vocab * rows + hidden)

    def _init_sampler(self, *args: Any, logits_processor: Any = None, **options: Any) -> Any:
        with _collected_errors() as errors, assertions_raise():
            try:
                sampler = super()._init_sampler(*args, **options)
            except ValueError as error:
                raise OptionError(f"{error}: {_reason(errors) or 'see the log above'}") from None
        sampler.processors, sampler.llama = logits_processor or (), weakref.ref(self)
        return sampler

    def sample(self, *args: Any, **options: Any) -> int:
        """Sample as llama_cpp does. Raise `MoeoffError` without logits."""
        if self._requires_eval:
            raise MoeoffError("no logits to sample from: call eval() first")
        token: int = super().sample(*args, **options)
        return token

    # --- a batch that fails ---

    @property
    def _has_state(self) -> bool:
        """True for recurrent layers, whose state cannot be cut."""
        return bool(self._is_recurrent or self._is_hybrid)

    def _forget_incomplete(self) -> None:
        """Cut the context to the last complete micro-batch after a failure, or clear
        it.
        """
        self._requires_eval = True
        if not (self._keep_computed() or self._restore_state()):
            self.clear_context()
        self._n_begun = 0

    def _keep_computed(self) -> bool:
        """Cut the context to its last complete token, or return False."""
        if self._has_state and self._ctx.is_broken:
            return False
        end = api.llama_memory_seq_pos_max(api.llama_get_memory(self._ctx.ctx), 0) + 1
        n = min(max(self.n_tokens, self._n_begun), end)
        if n <= 0 or not self._ctx.kv_cache_seq_rm(0, n, -1):
            return False
        self.n_tokens = n
        return True

    def _reserve(self, _nbytes: int) -> bool:
        """Return True if there is memory for a copy of the recurrent state. A hook."""
        return True

    def _copy_state(self) -> None:
        """Copy the recurrent state at `n_tokens`, if there is memory for the copy."""
        ctx, partial = self._ctx.ctx, api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        if self.n_tokens in (0, self._kept_at):
            return
        if api.llama_model_n_swa(self.model_handle):  # the copy would include the windows
            return
        size, self._kept_at = api.llama_state_seq_get_size_ext(ctx, 0, partial), 0
        if size > len(self._state):  # for most models only at the first call
            if self._is_refused or not self._reserve(size - len(self._state)):
                self._is_refused = True
                return
            self._state = np.empty(size, np.uint8)
        copy = _bytes_of(self._state)
        if api.llama_state_seq_get_data_ext(ctx, copy, len(self._state), 0, partial) == size:
            self._kept_at = self.n_tokens

    def _restore_state(self) -> bool:
        """Restore the copy of the recurrent state. Return False without a copy."""
        n = self._kept_at
        if not n:
            return False
        copy, partial = _bytes_of(self._state), api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        read = api.llama_state_seq_set_data_ext(self._ctx.ctx, copy, len(self._state), 0, partial)
        if not read or not self._ctx.kv_cache_seq_rm(0, n, -1):
            return False
        self.n_tokens, self._requires_eval, self._ctx.is_broken = n, True, False
        return True

    def _reuse_state(self, tokens: Sequence[int]) -> None:
        """Restore the copied state if the prompt diverges after the copy."""
        if self._has_state and 0 < self._kept_at < min(self.n_tokens, len(tokens)):
            n = min(self.n_tokens, len(tokens))
            differs = np.flatnonzero(self.input_ids[:n] != np.asarray(tokens[:n]))
            n_same = int(differs[0]) if len(differs) else n
            goes_on = n_same == self.n_tokens and (n_same < len(tokens) or not self._requires_eval)
            if not goes_on and n_same >= self._kept_at and not self._restore_state():
                self.clear_context()

    def close(self) -> None:
        """Free the model."""
        self._sampler = None
        super().close()

    # --- single batches, outside `generate` ---

    def eval(self, tokens: Sequence[int]) -> None:
        """Compute tokens as llama_cpp does. Complete micro-batches of a failed batch
        stay.

        Raises:
            MoeoffError: Computing fails, or the context cannot be cut to `n_tokens`.
        """
        if not self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1):
            raise MoeoffError(
                f"the context cannot be cut to {self.n_tokens} tokens: call reset(), then eval()"
            )
        step = min(self.n_batch, self.context_params.n_ubatch) if self._has_state else self.n_batch
        for i in range(0, len(tokens), step):
            batch, n = list(tokens[i : i + step]), self.n_tokens
            if n < self._kept_at:
                self._kept_at = 0
            if self._has_state and len(batch) > 1:
                self._copy_state()
            known = self.input_ids[n : n + len(batch)]
            known[:] = batch[: len(known)]
            self._n_begun = n + len(known)
            self._batch.set_batch(batch=batch, n_past=n, logits_all=self._logits_all)
            self._ctx.decode(self._batch)
            if self._logits_all:
                self.scores[n : n + len(batch)] = PatchedLlama.batch_logits(self, len(batch))
            self.n_tokens, self._n_begun, self._requires_eval = n + len(batch), 0, False

    def embed(self, *args: Any, **options: Any) -> Any:
        """Embed texts as llama_cpp does. The context is empty afterwards."""
        self.clear_context()
        return super().embed(*args, **options)

    def load_state(self, state: Any) -> None:
        """Load a state as llama_cpp does. The context is empty if that fails."""
        self._kept_at = 0
        try:
            super().load_state(state)
        except BaseException:
            self.clear_context()
            raise

    def decode_batch(self, tokens: Sequence[int], n_past: int, first_output: int = 0) -> None:
        """Compute at most `n_batch` tokens at positions n_past, n_past + 1, ...

        Args:
            first_output: First position with logits.

        Raises:
            MoeoffError: Computing fails.
            RuntimeError: llama.cpp cannot compute the batch.
        """
        batch = self._batch
        batch.set_batch(batch=list(tokens), n_past=n_past, logits_all=False)
        for i in range(len(tokens)):
            batch.batch.logits[i] = n_past + i >= first_output
        self._kept_at = 0
        self._ctx.decode(batch)

    def batch_logits(self, n: int) -> np.ndarray:
        """Return a view of the last batch's outputs, [n, n_vocab] float32."""
        return np.ctypeslib.as_array(self._ctx.get_logits(), (n, self.n_vocab()))


class StockLlama(_AnyLlama):
    """llama_cpp.Llama from the same library without an expert buffer, for comparisons.

    Args:
        use_extra_bufts: True for repacked kernels, llama.cpp's default.
        overrides: Placement of tensors, `moeoff.llamacpp.native.TensorOverrides`.

    Attributes:
        decode_seconds: Seconds in llama_decode so far, including work on devices.
    """

    def __init__(
        self,
        model_path: str,
        *,
        use_extra_bufts: bool = True,
        overrides: Any = None,
        **options: Any,
    ):
        self._extra, self._overrides, self.decode_seconds = use_extra_bufts, overrides, 0.0
        super().__init__(model_path, **options)
        decode = self._ctx.decode

        def timed(batch: Any) -> None:
            started = time.perf_counter()
            decode(batch)
            llama_cpp.llama_synchronize(self._ctx.ctx)  # llama_decode does not wait for devices
            self.decode_seconds += time.perf_counter() - started

        self._ctx.decode = timed

    def _before_load(self) -> None:
        super()._before_load()
        self.model_params.use_extra_bufts = self._extra
        if self._overrides is not None:  # llama.cpp does not copy them
            self.model_params.tensor_buft_overrides = self._overrides.address


_MTP, _F16 = 1, 1  # LLAMA_CONTEXT_TYPE_MTP; GGML_TYPE_F16, llama-server's KV cache type for drafts


def nextn_params(ctx: int, n_sequences: int = 1) -> dict[str, Any]:
    """Return llama_context_params of the context for next-token layers."""
    return {
        "ctx_type": _MTP,
        "ctx_other": ctx,
        "n_outputs_max": n_sequences,
        "n_rs_seq": 0,
        "type_k": _F16,
        "type_v": _F16,
    }
