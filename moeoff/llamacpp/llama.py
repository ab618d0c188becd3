"""llama_cpp, and the one place that depends on its internals. docs/internals/patches.md lists each of them with its reason.

Importing this module loads llama.cpp. Modules that need llama_cpp import it from here, so that the process is prepared first.
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
from .turns import Turns

# OpenMP's barriers spin for milliseconds by default. On a busy machine, and the I/O threads make it one, every barrier then
# waits until the scheduler has given a lost core back: 3.5 tok/s instead of 10.4 with two busy processes on 2 cores, no
# difference on an idle machine. Read by the OpenMP runtime when llama.cpp is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
machine.load()

import llama_cpp
from llama_cpp import _internals, _logger, llama_chat_format
from llama_cpp import llama_cpp as api

__all__ = [
    "LoadError",
    "PatchedLlama",
    "StockLlama",
    "api",
    "assertions_raise",
    "errors_unless",
    "find_devices",
    "lib",
    "llama_cpp",
    "set_log",
    "supports_gpu",
]

llama_chat_format.ImmutableSandboxedEnvironment = templates.Environment  # type: ignore[attr-defined,assignment]  # templates are the model file's: they may not hang either

lib: ctypes.CDLL = api._lib  # llama_cpp's own handle: a second load could bring a second ggml into the process


def build_identity() -> tuple[str, str]:
    """Return a digest of the libraries that compute, and llama.cpp's list of the CPU features in use: others round differently."""
    return machine.libraries_digest(Path(lib._name).parent), api.llama_print_system_info().decode()


# keyword arguments of llama_cpp.Llama, and their defaults
KEYWORDS = {name: p.default for name, p in inspect.signature(llama_cpp.Llama.__init__).parameters.items() if p.kind is inspect.Parameter.KEYWORD_ONLY}

_LOG_ERROR, _LOG_CONTINUED = 4, 5  # enum ggml_log_level


def set_log(verbose: bool) -> None:
    """Shows everything that llama.cpp logs, or errors alone: its warnings ("n_ctx_seq > n_ctx_train") are for its developers."""
    _logger.set_verbose(verbose)


class _ErrorCollector(threading.local):
    """Errors that llama.cpp logs on the calling thread, while someone collects it."""

    errors: list[str] | None = None
    last = 0  # level, for what continues a line


_collected = _ErrorCollector()


# void (*ggml_log_callback)(enum ggml_log_level level, const char * text, void * user_data);  -- one for ever: another thread may be logging
@api.llama_log_callback  # type: ignore[untyped-decorator]  # not annotated in llama_cpp
def _log(level: int, text: bytes, user: Any) -> None:
    _collected.last = _collected.last if level == _LOG_CONTINUED else level
    if _collected.errors is not None and _collected.last == _LOG_ERROR:
        _collected.errors.append(text.decode("utf-8", "replace"))
    else:
        _logger.llama_log_callback(level, text, user)


api.llama_log_set(_log, ctypes.c_void_p(0))


@contextlib.contextmanager
def _collected_errors() -> Iterator[list[str]]:
    """Keeps what llama.cpp logs on this thread as errors instead of showing it; everything else goes where it went."""
    errors: list[str] = []
    around, _collected.errors = _collected.errors, errors
    try:
        yield errors
    finally:
        _collected.errors = around


@contextlib.contextmanager
def errors_unless(expected: Callable[[], bool]) -> Iterator[None]:
    """Holds back what llama.cpp logs on this thread as errors, and shows it at the end unless it was expected: three lines of a graph that was ended on
    purpose."""
    errors: list[str] = []
    try:
        with _collected_errors() as errors:
            yield
    finally:
        for text in () if expected() else errors:
            _logger.llama_log_callback(_LOG_ERROR, text.encode(), None)


def _reason(errors: Sequence[str]) -> str:
    """The first of llama.cpp's errors, which is the most exact one, without the names of its functions and folders."""
    text = " ".join(errors[0].split()) if errors else ""
    text = re.sub(r"^\w+: (error loading model: |failed to initialize the context: )?(\w+: )?", "", text)
    return re.sub(r"\S*/(?=[\w.-]+:\d+: )", "", text)


@contextlib.contextmanager
def assertions_raise() -> Iterator[None]:
    """Inside, a failed assertion of ggml's on this thread fails the call into llama.cpp instead of ending the process (moeoff-llama.h)."""
    lib.moeoff_guard(1)
    try:
        yield
    finally:
        lib.moeoff_guard(-1)


def supports_gpu() -> bool:
    """True if llama.cpp finds a GPU here that it can offload layers to. Vulkan's software drivers do not count unless
    GGML_VK_VISIBLE_DEVICES names them."""
    find_devices()
    return bool(api.llama_supports_gpu_offload())


@functools.cache
def find_devices() -> str:
    """Lets llama.cpp look for devices, which it does once in a process; why a backend of this build cannot be used, in its words, or nothing."""
    with _collected_errors() as errors:
        api.llama_supports_gpu_offload()
    return _reason(errors)


# --- llama_cpp's own objects, made safe ---


class _Handle:
    """An attribute with a pointer into llama.cpp: whoever asks for it after the model is closed, or in a fork, gets an exception and no pointer."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, owner: Any, _type: type | None = None) -> Any:
        if owner is None:
            return self
        owner.turns.require_open()
        return owner.__dict__[self._name]

    def __set__(self, owner: Any, value: Any) -> None:
        owner.__dict__[self._name] = value


class _Model(_internals.LlamaModel):
    """llama_cpp's, also in the hands of the tokenizers that it has given out."""

    model, vocab = _Handle(), _Handle()

    def __init__(self, turns: Turns, **options: Any):
        self.turns = turns
        super().__init__(**options)

    def close(self) -> None:
        if self.turns.here:
            super().close()  # type: ignore[no-untyped-call]  # not annotated in llama_cpp


class _Context(_internals.LlamaContext):
    ctx, memory = _Handle(), _Handle()
    is_broken = False  # a batch was not computed to its end: recurrent states may be half updated

    def __init__(self, turns: Turns, llama: weakref.ref[PatchedLlama], **options: Any):
        self.turns, self._llama = turns, llama
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
        if self.turns.here:
            super().close()  # type: ignore[no-untyped-call]  # not annotated in llama_cpp

    def kv_cache_seq_rm(self, seq_id: int, p0: int, p1: int) -> bool:
        """As llama_cpp's. Return False, and change nothing, if the memory cannot go back to p0."""
        if self.memory is None:
            raise MoeoffError("the model keeps no memory of a text, as diffusion models do not: it cannot go on with one")
        if 0 < p0 <= api.llama_memory_seq_pos_max(self.memory, 0):
            window, llama = api.llama_model_n_swa(self.model.model), self._llama()
            if window and llama is not None and not llama._has_state:
                # llama.cpp would compute without the part of the window that it has overwritten
                if api.llama_memory_seq_pos_min(self.memory, 0) > max(p0 - window, 0):
                    return False
        return super().kv_cache_seq_rm(seq_id, p0, p1)


def _reads(kind: type, name: str) -> Any:
    """A method that may be called while another thread computes, and not while one closes the model."""
    method = getattr(kind, name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return self.turns.read(method, self, *args, **kwargs)
        except ValueError as error:  # a token that there is not
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
    """llama_cpp's, but it goes with its last user, and not with the garbage collector, which does not see that a vocabulary of 150,000 makes it 1.8 MB large;
    and logits processors are called from here: ctypes would swallow what they raise."""

    sampler: Any = None
    processors: Sequence[Callable[[Any, Any], Any]] = ()
    llama: weakref.ref[PatchedLlama]

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # not annotated in llama_cpp
        self._exit_stack.pop_all()  # a function that refers to this

    def close(self) -> None:
        if self.sampler is not None:
            api.llama_sampler_free(self.sampler)
            self.sampler = None

    def sample(self, ctx: Any, idx: int = -1) -> int:
        llama = self.llama()
        if not self.processors or llama is None:
            try:
                return super().sample(ctx, idx)
            except RuntimeError as error:  # a grammar leaves none
                raise MoeoffError(str(error)) from None
        scores = np.ctypeslib.as_array(ctx.get_logits_ith(idx), (llama.n_vocab(),)).copy()
        for processor in self.processors:
            scores[:] = processor(llama._input_ids, scores)
        tokens = np.zeros(len(scores), _TOKENS)
        tokens["id"], tokens["logit"] = np.arange(len(scores)), scores
        array = api.llama_token_data_array(tokens.ctypes.data_as(api.llama_token_data_p), len(tokens), -1, False)
        api.llama_sampler_apply(self.sampler, ctypes.byref(array))
        drawn = array.data[array.selected] if 0 <= array.selected < array.size else None
        if drawn is None or drawn.logit == -np.inf:
            raise MoeoffError("no token is left to go on with, as by a grammar or a logits processor")
        api.llama_sampler_accept(self.sampler, drawn.id)
        return int(drawn.id)


def _bytes_of(array: np.ndarray) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))


class LoadError(ValueError):
    """llama.cpp cannot load a model."""


_MOST_STATES = 3  # of recurrent layers that are kept, as many as llama-server keeps: each is as large as the one that is computed with
_STATE_COPIES = 5  # of the states of a prompt's batch, on their way to next-token layers


class _AnyLlama(llama_cpp.Llama):
    """llama_cpp.Llama, of which a subclass says in `_before_load` how it is loaded."""

    _ctx: Any
    # tokens of the text after which the state of recurrent layers was copied; 0: there is no copy
    _kept_at = 0

    def _before_load(self) -> None:
        find_devices()  # not while it loads: what a driver lacks is no reason why a model cannot be read

    def adds_bos(self) -> bool:
        """The model wants a beginning-of-text token."""
        return self._model.add_bos_token()

    def clear_context(self) -> None:
        """Empties the KV cache: the next batch begins a text."""
        self.reset()  # type: ignore[no-untyped-call]  # not annotated in llama_cpp
        self._ctx.kv_cache_clear()
        self._kept_at, self._ctx.is_broken = 0, False


class PatchedLlama(_AnyLlama):
    """llama_cpp.Llama with what it lacks: a say in how the model is loaded, a wrapper around every decode, and batches of one's own.

    A batch that fails or is cancelled cuts the context to the last complete micro-batch. Recurrent
    layers that were cancelled within a micro-batch go back to a copy of their state, which is made
    before each micro-batch of a prompt.

    A subclass sets `_overrides`, `_progress` and `_one_output` before it calls `load`.
    """

    _overrides: Any  # moeoff.llamacpp.native.TensorOverrides
    _no_alloc = False  # plans buffers and allocates none: nothing can be computed, but `context_memory` tells the sizes
    _progress: Callable[[float], None] | None = None
    # Batches give the logits of one token, unless an option wants those of all. llama.cpp plans for all by default: a vocabulary of
    # 150,000 and batches of 512 tokens are 297 MiB that no answer uses.
    _one_output = False
    _model: Any
    _model_class: Any
    _context_class: Any
    _sampler_class = _Sampler
    _n_sequences = 1  # that the context holds side by side
    _unified = False  # they share all of it, and have not a part of it each
    _loads_nextn = False  # next-token layers, which else stay in the file
    _n_begun = 0  # tokens of the text with those of a batch that is being computed
    _state = np.empty(0, np.uint8)  # copy of the state of recurrent layers
    _is_refused = False  # there was no memory for it
    _turns: Turns | None = None  # llama_cpp closes objects that were never opened, too

    @property
    def turns(self) -> Turns:
        if self._turns is None:
            self._turns = Turns()
        return self._turns

    def load(self, model_path: str, **options: Any) -> None:
        """llama_cpp.Llama's constructor. Raises LoadError with llama.cpp's reason, or what `_progress` raised."""
        weak = weakref.ref(self)  # an object that refers to itself would outlive its last user
        self._model_class, self._context_class = functools.partial(_Model, self.turns), functools.partial(_Context, self.turns, weak)
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
                raise LoadError(f"its adapter {options['lora_path']}: {_reason(errors) or error}") from error
            except ValueError as error:
                if raised:
                    raise raised[0] from None
                raise LoadError(_reason(errors) or str(error)) from error
        if raised:
            raise raised[0]
        sys.stderr.writelines(f"{one_line(text.rstrip())}\n" for text in errors if text.strip())  # they did not matter
        if (n_ctx := self.n_ctx()) > len(self.input_ids):  # llama.cpp rounds a context up, and llama_cpp's lists stay as long as was asked for
            self.input_ids = np.zeros(n_ctx, np.intc)
            if self._logits_all:
                self.scores = np.empty((n_ctx, self._n_vocab), np.single)

    def _before_load(self) -> None:
        super()._before_load()
        model, context = self.model_params, self.context_params
        model.tensor_buft_overrides = self._overrides.address
        model.progress_callback = self._progress_callback
        model.no_alloc = self._no_alloc
        model.lazy_mode = api.LLAMA_LAZY_MODE_OFF  # above 4 GiB some tensors would be mapped, and be in no plan of memory
        model.use_extra_bufts = False  # repacked kernels round differently from the ones experts are computed with
        context.n_outputs_max, context.n_seq_max, context.kv_unified = self._n_outputs_max, self._n_sequences, self._unified
        model.load_mtp = self._loads_nextn
        if self._loads_nextn:  # a batch must have room for all of these states, and one token more
            context.n_rs_seq = max(min(_MOST_STATES, context.n_ubatch - 2), 0)

    def new_context(self, **params: Any) -> int:
        """struct llama_context * of another context of the model, with these of llama_context_params; the caller frees it. Raises `LoadError`."""
        changed = type(self.context_params).from_buffer_copy(self.context_params)
        for name, value in params.items():
            setattr(changed, name, value)
        with _collected_errors() as errors, assertions_raise():
            ctx: int | None = api.llama_init_from_model(self.model_handle, changed)
        if not ctx:
            raise LoadError(_reason(errors) or f"no context can be made with {', '.join(params)}")
        return ctx

    @property
    def loaded(self) -> bool:
        return getattr(self, "_stack", None) is not None

    @property
    def context_handle(self) -> int:
        """struct llama_context *"""
        handle: int = self._ctx.ctx
        return handle

    @property
    def model_handle(self) -> int:
        """struct llama_model *"""
        handle: int = self._model.model
        return handle

    def _decode(self, decode: Callable[[], None], _batch: Any) -> None:
        """Every decode, of a struct llama_batch: decode() computes it, and raises RuntimeError if llama.cpp fails. A subclass does more around it."""
        decode()

    def _check_outputs(self, batch: Any) -> None:
        """Raises OptionError for a batch over which llama.cpp would end the process."""
        if self._n_outputs_max and batch.n_tokens > 1:
            n_outputs = batch.n_tokens - ctypes.string_at(batch.logits, batch.n_tokens).count(0)
            if n_outputs > self._n_outputs_max:
                raise OptionError(f"logits of {n_outputs} tokens of a batch: open the model with logits_all=True")

    def on_close(self, function: Callable[[], None]) -> None:
        """Call a function when the model is closed, before the model is freed."""
        self._stack.callback(function)

    @property
    def output_bytes(self) -> int:
        """Bytes of the logits that llama.cpp and llama_cpp keep, and of the states that next-token layers read."""
        rows = self.n_batch + self.scores.shape[0] if self._logits_all else self._n_sequences
        hidden = api.llama_model_n_embd_out(self.model_handle) * self.n_batch * _STATE_COPIES if self._loads_nextn else 0
        return 4 * (self._n_vocab * rows + hidden)

    def _init_sampler(self, *args: Any, logits_processor: Any = None, **options: Any) -> Any:
        with _collected_errors() as errors, assertions_raise():
            try:
                sampler = super()._init_sampler(*args, **options)
            except ValueError as error:
                raise OptionError(f"{error}: {_reason(errors) or 'llama.cpp has said above where'}") from None
        sampler.processors, sampler.llama = logits_processor or (), weakref.ref(self)
        return sampler

    def sample(self, *args: Any, **options: Any) -> int:
        """As llama_cpp's.

        Raises:
            MoeoffError: no token was computed since the context was filled or changed in another way: there is nothing to draw from.
        """
        if self._requires_eval:
            raise MoeoffError("there are no logits to draw a token from: compute one with eval() first")
        token: int = super().sample(*args, **options)
        return token

    # --- a batch that fails ---

    @property
    def _has_state(self) -> bool:
        """The model has recurrent layers, whose state cannot go back to an earlier token."""
        return bool(self._is_recurrent or self._is_hybrid)

    def _forget_incomplete(self) -> None:
        """After a batch that failed, cut the context to its last complete micro-batch, or empty it."""
        self._requires_eval = True
        if not (self._keep_computed() or self._restore_state()):
            self.clear_context()
        self._n_begun = 0

    def _keep_computed(self) -> bool:
        """Cut the context to its latest complete token. Return False if it cannot go back there."""
        if self._has_state and self._ctx.is_broken:
            return False
        end = api.llama_memory_seq_pos_max(api.llama_get_memory(self._ctx.ctx), 0) + 1
        n = min(max(self.n_tokens, self._n_begun), end)
        if n <= 0 or not self._ctx.kv_cache_seq_rm(0, n, -1):
            return False
        self.n_tokens = n
        return True

    def _reserve(self, _nbytes: int) -> bool:
        """Return whether there is memory for a copy of the state of recurrent layers.

        A subclass takes it from its budget.
        """
        return True

    def _copy_state(self) -> None:
        """Copy the state of recurrent layers after `n_tokens`, if there is memory for the copy."""
        ctx, partial = self._ctx.ctx, api.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
        if self.n_tokens in (0, self._kept_at):
            return
        if api.llama_model_n_swa(self.model_handle):  # the windows would be copied, too
            return
        size, self._kept_at = api.llama_state_seq_get_size_ext(ctx, 0, partial), 0
        if size > len(self._state):  # of most models at the first time alone
            if self._is_refused or not self._reserve(size - len(self._state)):
                self._is_refused = True
                return
            self._state = np.empty(size, np.uint8)
        copy = _bytes_of(self._state)
        if api.llama_state_seq_get_data_ext(ctx, copy, len(self._state), 0, partial) == size:
            self._kept_at = self.n_tokens

    def _restore_state(self) -> bool:
        """Go back to where the state of recurrent layers was copied. Return False without a copy."""
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
        """Go back to the copied state before `generate`, if the prompt diverges after it."""
        if self._has_state and 0 < self._kept_at < min(self.n_tokens, len(tokens)):
            n = min(self.n_tokens, len(tokens))
            differs = np.flatnonzero(self.input_ids[:n] != np.asarray(tokens[:n]))
            n_same = int(differs[0]) if len(differs) else n
            goes_on = n_same == self.n_tokens and (n_same < len(tokens) or not self._requires_eval)
            if not goes_on and n_same >= self._kept_at and not self._restore_state():
                self.clear_context()

    def close(self) -> None:
        """Frees the model."""
        self._sampler = None
        super().close()

    # --- batches of one's own, besides `generate` ---

    def eval(self, tokens: Sequence[int]) -> None:
        """As llama_cpp's. Of a batch that fails, the complete micro-batches stay.

        Raises:
            MoeoffError: as while answering, or the context cannot be cut to `n_tokens`.
        """
        if not self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1):
            n = self.n_tokens
            raise MoeoffError(f"the context cannot be cut to {n} tokens: call reset(), then eval()")
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
        """As llama_cpp's. The context is empty afterwards, and where it fails."""
        self.clear_context()
        return super().embed(*args, **options)

    def load_state(self, state: Any) -> None:
        """As llama_cpp's. The context is empty if the state cannot be loaded."""
        self._kept_at = 0
        try:
            super().load_state(state)
        except BaseException:
            self.clear_context()
            raise

    def decode_batch(self, tokens: Sequence[int], n_past: int, first_output: int = 0) -> None:
        """Computes tokens at positions n_past, n_past + 1, ...; at most `n_batch` of them.

        Args:
            first_output: tokens before this position of the text give no logits.

        Raises:
            MoeoffError: as while answering.
            RuntimeError: llama.cpp cannot compute it.
        """
        batch = self._batch
        batch.set_batch(batch=list(tokens), n_past=n_past, logits_all=False)
        for i in range(len(tokens)):
            batch.batch.logits[i] = n_past + i >= first_output
        self._kept_at = 0
        self._ctx.decode(batch)

    def batch_logits(self, n: int) -> np.ndarray:
        """[n, n_vocab] float32 of the last batch's n outputs: a view that the next batch overwrites."""
        logits = self._ctx.get_logits()
        return np.ctypeslib.as_array(logits, (n, self.n_vocab()))


class StockLlama(_AnyLlama):
    """llama_cpp.Llama from the same library, without an expert buffer: what everything is compared with.

    Args:
        use_extra_bufts: repacked kernels, llama.cpp's default, which llama_cpp offers no option for.
        overrides: where tensors go (`moeoff.llamacpp.native.TensorOverrides`), likewise; None: as llama.cpp has it.

    Attributes:
        decode_seconds: inside llama_decode so far, and until what it began has ended.
    """

    def __init__(self, model_path: str, *, use_extra_bufts: bool = True, overrides: Any = None, **options: Any):
        self._extra, self._overrides, self.decode_seconds = use_extra_bufts, overrides, 0.0
        super().__init__(model_path, **options)
        decode = self._ctx.decode

        def timed(batch: Any) -> None:
            started = time.perf_counter()
            decode(batch)
            llama_cpp.llama_synchronize(self._ctx.ctx)  # a device goes on after llama_decode has returned
            self.decode_seconds += time.perf_counter() - started

        self._ctx.decode = timed  # of this one object

    def _before_load(self) -> None:
        super()._before_load()
        self.model_params.use_extra_bufts = self._extra
        if self._overrides is not None:  # kept here, since llama.cpp does not copy them
            self.model_params.tensor_buft_overrides = self._overrides.address


_MTP, _F16 = 1, 1  # LLAMA_CONTEXT_TYPE_MTP, GGML_TYPE_F16: llama-server's default for drafts, whatever the model's own cache is


def nextn_params(ctx: int, n_sequences: int = 1) -> dict[str, Any]:
    """Of llama_context_params: those of a model's second context, which computes its next-token layers."""
    return {"ctx_type": _MTP, "ctx_other": ctx, "n_outputs_max": n_sequences, "n_rs_seq": 0, "type_k": _F16, "type_v": _F16}
