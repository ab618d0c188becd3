"""llama_cpp, and the one place that depends on its internals. docs/patches.md lists each of them with its reason.

Importing this module loads llama.cpp. Modules that need llama_cpp import it from here, so that the process is prepared first.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from .errors import OptionError

# OpenMP's barriers spin for milliseconds by default. On a busy machine, and the I/O workers make it one, every barrier then
# waits until the scheduler has given a lost core back: 3.5 tok/s instead of 10.4 beside two busy processes on 2 cores, no
# difference on an idle machine. Read by the OpenMP runtime when llama.cpp is loaded.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

import llama_cpp
from llama_cpp import llama_cpp as api

__all__ = ["PatchedLlama", "api", "lib", "llama_cpp", "quiet_log", "serve_model", "set_log", "supports_gpu"]

lib: ctypes.CDLL = api._lib  # llama_cpp's own handle: a second load could bring a second ggml into the process

# keyword arguments of llama_cpp.Llama
KEYWORDS = frozenset(
    name for name, p in inspect.signature(llama_cpp.Llama.__init__).parameters.items() if name != "self" and p.kind is not inspect.Parameter.VAR_KEYWORD
)

_LOGGER = logging.getLogger("llama-cpp-python")
# enum ggml_log_level: NONE, DEBUG, INFO, WARN, ERROR, CONT. llama_cpp's own table is older than the order of today:
# it takes warnings for errors and hides errors as debug messages.
_LOG_LEVELS = {0: logging.CRITICAL, 1: logging.DEBUG, 2: logging.INFO, 3: logging.WARNING, 4: logging.ERROR, 5: logging.DEBUG}


def set_log(verbose: bool) -> None:
    """Shows everything that llama.cpp logs, or errors alone: its warnings ("n_ctx_seq > n_ctx_train") are for its developers."""
    from llama_cpp import _logger

    _logger.GGML_LOG_LEVEL_TO_LOGGING_LEVEL.update(_LOG_LEVELS)
    _logger.set_verbose(verbose)


@contextlib.contextmanager
def quiet_log() -> Iterator[Callable[[], None]]:
    """Yields a function that silences llama.cpp until the end of the block: it logs three errors about a graph that was ended on purpose."""
    level = _LOGGER.level
    active = True

    def silence() -> None:
        if active:
            _LOGGER.setLevel(logging.CRITICAL)

    try:
        yield silence
    finally:
        active = False
        _LOGGER.setLevel(level)


def supports_gpu() -> bool:
    """Whether this build of llama.cpp can offload layers to a GPU."""
    return bool(api.llama_supports_gpu_offload())


def serve_model(proxy: Any) -> Any:
    """The module of llama_cpp.server's routes, made to answer with `proxy`, which is called with a model's name and iterated for names.

    One at a time in a process: the routes keep their model in a global.
    """
    from llama_cpp.server import app
    from llama_cpp.server.settings import ServerSettings

    # made without reading the environment, which pydantic's settings would do
    app.set_server_settings(ServerSettings.model_construct(api_key=None, interrupt_requests=False))
    app._llama_proxy = proxy  # what set_llama_proxy() does after opening a llama_cpp.Llama
    return app


class PatchedLlama(llama_cpp.Llama):
    """llama_cpp.Llama with what it lacks: a say in how the model is loaded, a wrapper around every decode, and batches of one's own.

    A subclass sets `_overrides`, `_progress` and `_one_output` before it calls `load`.
    """

    _overrides: Any  # array of llama_model_tensor_buft_override, ended by an empty one
    _progress: Callable[[float], None] | None = None
    # Batches give the logits of one token, unless an option wants those of all. llama.cpp plans for all by default: a vocabulary of
    # 150,000 and batches of 512 tokens are 297 MiB that no answer uses.
    _one_output = False
    _latest_sampler: Any = None

    def load(self, model_path: str, **options: Any) -> None:
        """llama_cpp.Llama's constructor. Raises ValueError for every load that failed; llama.cpp's log has the reason."""
        self._progress_callback = _progress_callback(self._progress)
        wants_all = options.get("logits_all") or options.get("embedding") or options.get("draft_model") is not None
        self._n_outputs_max = 1 if self._one_output and not wants_all else 0
        super().__init__(model_path, **options)

    # llama_cpp.Llama.__init__ assigns its parameters once, then loads: the place to put ours in
    @property
    def model_params(self) -> Any:
        return self._model_params

    @model_params.setter
    def model_params(self, params: Any) -> None:
        params.tensor_buft_overrides = ctypes.cast(self._overrides, ctypes.c_void_p)
        params.progress_callback = self._progress_callback
        params.use_extra_bufts = False  # repacked kernels round differently from the ones experts are computed with
        self._model_params = params

    # likewise
    @property
    def context_params(self) -> Any:
        return self._context_params

    @context_params.setter
    def context_params(self, params: Any) -> None:
        params.n_outputs_max = self._n_outputs_max
        self._context_params = params

    @property
    def loaded(self) -> bool:
        return getattr(self, "_stack", None) is not None

    @property
    def context_handle(self) -> int:
        """struct llama_context *"""
        handle: int = self._ctx.ctx
        return handle

    def wrap_decode(self, wrapper: Callable[[Callable[[], None], Any], None]) -> None:
        """From now on every decode is `wrapper(decode, llama_batch)`, which calls decode() once; it raises RuntimeError if llama.cpp fails."""
        ctx = self._ctx
        decode = type(ctx).decode

        def checked(batch: Any) -> None:
            self._check_outputs(batch.batch)
            wrapper(lambda: decode(ctx, batch), batch.batch)

        ctx.decode = checked  # type: ignore[method-assign]  # of this one object

    def _check_outputs(self, batch: Any) -> None:
        """Raises OptionError for a batch over which llama.cpp would end the process."""
        if self._n_outputs_max and batch.n_tokens > 1:
            wanted = batch.n_tokens - ctypes.string_at(batch.logits, batch.n_tokens).count(0)
            if wanted > self._n_outputs_max:
                raise OptionError(f"logits of {wanted} tokens of a batch: open the model with logits_all=True")

    def on_close(self, function: Callable[[], None]) -> None:
        """Calls it when the model is closed, before the model is freed."""
        self._stack.callback(function)

    def set_abort_callback(self, callback: Any, data: int | None) -> None:
        """A ggml_abort_callback, asked between the nodes of a graph."""
        api.llama_set_abort_callback(self._ctx.ctx, callback, data)

    @property
    def output_bytes(self) -> int:
        """Bytes of the logits that llama.cpp and llama_cpp keep."""
        rows = self.n_batch + self.scores.shape[0] if self._logits_all else 1
        return 4 * self._n_vocab * rows

    @property
    def keeps_logits(self) -> bool:
        """Opened with logits_all: the logits of every token can be asked for."""
        return self._logits_all

    # llama_cpp makes a sampler for each answer and leaves the one before to the garbage collector, which does not see that a
    # vocabulary of 150,000 makes it 1.8 MB large and comes by after dozens of answers
    def _init_sampler(self, *args: Any, **options: Any) -> Any:
        if self._latest_sampler is not None:
            self._latest_sampler.close()
        self._latest_sampler = super()._init_sampler(*args, **options)
        return self._latest_sampler

    # --- batches of one's own, beside `generate` ---

    def clear_context(self) -> None:
        """Empties the KV cache: the next batch begins a text."""
        self.reset()  # type: ignore[no-untyped-call]  # not annotated in llama_cpp
        self._ctx.kv_cache_clear()  # type: ignore[no-untyped-call]  # likewise

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
        self._ctx.decode(batch)

    def batch_logits(self, n: int) -> np.ndarray:
        """[n, n_vocab] float32 of the last batch's n outputs: a view that the next batch overwrites."""
        logits = self._ctx.get_logits()  # type: ignore[no-untyped-call]  # not annotated in llama_cpp
        return np.ctypeslib.as_array(logits, (n, self.n_vocab()))

    # --- vocabulary ---

    def adds_bos(self) -> bool:
        """The model wants a beginning-of-text token."""
        return self._model.add_bos_token()

    def is_end_token(self, token: int) -> bool:
        """The token ends an answer; models have several."""
        return bool(api.llama_vocab_is_eog(self._model.vocab, token))

    def token_text(self, token: int) -> str:
        """A token as its vocabulary writes it; empty for -1, no token."""
        return self._model.token_get_text(token) if token != -1 else ""


def _progress_callback(progress: Callable[[float], None] | None) -> Any:
    """`bool (*llama_progress_callback)(float progress, void * user_data)` around a Python function; false would end the load."""

    if progress is None:
        return api.llama_progress_callback()

    def report(fraction: float, _user: Any) -> bool:
        with contextlib.suppress(Exception):  # must not cross the C frame below, and a progress bar is not worth a model
            progress(fraction)
        return True

    return api.llama_progress_callback(report)
