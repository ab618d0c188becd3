"""`Llama`: llama_cpp's class with routed experts on disk and a bounded arena."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from ..budget.dry_load import memory_sizes
from ..errors import BudgetError, Cancelled, ComputeError, ModelError, MoeoffError, OptionError
from ..llamacpp.compute_thread import ComputeThread
from ..llamacpp.llama import LoadError, PatchedLlama, errors_unless, set_log
from ..llamacpp.model_lock import ModelLock
from ..llamacpp.threads import CoreBinding
from ..options import Config
from ..routing.batch import batch_spans, is_decode
from ..routing.event import GateEvent
from ..system.memory import trim
from .engine import Engine
from .opening import plan
from .stats import Stats

T = TypeVar("T")
_SERVERS = ("spec_type", "draft", "context_shift")  # options of moeoff.Server only


def _require_plain_decoding(config: Config) -> None:
    """Raise `OptionError` for speculative decoding and for context shift."""
    given = [name for name in _SERVERS if getattr(config, name)]
    given += ["draft_model"] if config.llama_cpp.get("draft_model") is not None else []
    if given:
        raise OptionError(
            f"`{given[0]}`: moeoff.Llama has neither speculative decoding nor context shift; use"
            " moeoff.Server"
        )


def _only(answer: Generator[T, None, None]) -> T:
    """Return the first item of an iterator, and close it."""
    with contextlib.closing(answer):
        return next(answer)


def _in_turn(name: str, *, changes: bool = True) -> Any:
    """Run a method of llama_cpp or `PatchedLlama` while no other thread uses the model.

    Args:
        changes: True if it changes the context, and must not interrupt an answer.
    """
    method = getattr(PatchedLlama, name)

    @functools.wraps(method)
    def call(self: Llama, *args: Any, **kwargs: Any) -> Any:
        return self.lock.take(functools.partial(method, self, *args, **kwargs), changes=changes)

    return call


class Llama(PatchedLlama):
    """A Mixture-of-Experts model that needs less memory than its file.

    Threads may share an object; answers exclude each other. A stream holds the model
    from its first token until it is exhausted, closed or dropped. If its thread makes
    another call before, the stream raises `MoeoffError`. An exception, also Ctrl-C,
    ends an answer. The context keeps complete micro-batches for prompts with the same
    prefix. After `close()` and in a fork every call raises `MoeoffError`.

    Args:
        model_path: Path of the GGUF, with `options`, or a `Config` instead of both.
        progress: Callback with the loaded fraction, 0 to 1, of the dense weights.
        on_stats: Callback with the `Stats` of each answer.
        **options: Options of `moeoff.options.Config`: memory, expert_memory, strategy,
            experts, tier, max_loss, ...; and of `llama_cpp.Llama`: n_ctx, n_threads,
            ...

    Raises:
        ModelError: The file is missing, damaged, or has no routed experts.
        BudgetError: The budget is below the model's needs; its hint has a sufficient
            one.
        OptionError: A keyword or strategy is unknown, or a value is invalid.
    """

    # llama_cpp also closes objects that were never opened
    _engine: Engine | None = None
    _core_binding: CoreBinding | None = None
    _decodes: bool | None = None  # `decode` of `batches_as`

    def __init__(
        self,
        model_path: str | os.PathLike[str] | Config,
        *,
        progress: Callable[[float], None] | None = None,
        on_stats: Callable[[Stats], None] | None = None,
        **options: Any,
    ):
        self._progress, self._on_stats = progress, on_stats
        self._lock = ModelLock(ComputeThread())
        try:
            self._lock.thread.call(functools.partial(self._open, model_path, options))
        except BaseException:
            self.close()
            raise

    def _open(
        self, model_path: str | os.PathLike[str] | Config, options: Mapping[str, Any]
    ) -> None:
        config = Config.make(model_path, **options)
        _require_plain_decoding(config)
        engine = self._engine = Engine(plan(config))
        self._one_output = not engine.config.gate_input
        set_log(engine.keywords["verbose"])
        self.lock.thread.set_stop = engine.buffer.set_cancelled
        with engine.loading() as self._overrides:
            try:
                self.load(engine.config.model_path, **engine.keywords)
            except LoadError as error:
                raise ModelError(
                    f"{engine.config.model_path}: llama.cpp cannot load it: {error} (`verbose` says"
                    " more)"
                ) from error
            except (TypeError, OverflowError, ctypes.ArgumentError) as error:
                raise OptionError(
                    f"llama_cpp does not take a value that it was given: {error}"
                ) from error
        self.on_close(engine.close)
        engine.attach(self.context_handle)
        adapters = bool(engine.config.llama_cpp.get("lora_path"))
        engine.loaded(self.context_handle, lambda: memory_sizes(self), adapters=adapters)
        # llama.cpp's NUMA strategies place threads themselves
        self._core_binding = None if self.numa else CoreBinding(self.context_handle)

    def __getstate__(self) -> dict[str, Any]:
        """Return the options, with which a copy opens the model again."""
        return {"model_path": self.engine.config, "on_stats": self._on_stats}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # as llama_cpp's

    @property
    def engine(self) -> Engine:
        """The runtime state: `engine.buffer`, `engine.plan`, `engine.quality`, ..."""
        if self._engine is None:
            raise MoeoffError("the model is closed")
        return self._engine

    # --- lock ---

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function with exclusive access. Ctrl-C or `cancel()` ends it."""
        return self.lock.take(functools.partial(function, *args, **kwargs))

    def _forget_incomplete(self) -> None:
        super()._forget_incomplete()
        if self.engine.quality.simulates:
            self.engine.quality.use(self.engine.quality.precision)

    def load_state(self, state: Any) -> None:
        """Load a state, as llama_cpp does."""
        self.call(self._load_state, state)

    def _load_state(self, state: Any) -> None:
        # the state fills KV cells that experts may have borrowed
        self.engine.sizer.before(1, moves_state=True)
        super().load_state(state)

    def eval(self, tokens: Sequence[int]) -> None:
        """Evaluate tokens, as llama_cpp does."""
        self.lock.take(functools.partial(self._eval, tokens))

    def _eval(self, tokens: Sequence[int]) -> None:
        # recurrent layers cannot rewind a partly computed token
        completes = self._has_state and len(tokens) <= 1
        with self.lock.thread.completing() if completes else contextlib.nullcontext():
            super().eval(tokens)

    def _reserve(self, nbytes: int) -> bool:
        try:
            self.engine.sizer.reserve(nbytes)
        except BudgetError:
            return False
        return True

    reset = _in_turn("reset")
    embed = _in_turn("embed")
    save_state = _in_turn("save_state", changes=False)
    clear_context = _in_turn("clear_context")
    decode_batch = _in_turn("decode_batch")
    batch_logits = _in_turn("batch_logits", changes=False)

    def sample(self, *args: Any, **options: Any) -> int:
        """Sample a token as llama_cpp does, without the previous answer's settings."""
        if self.lock.thread.is_current:
            return super().sample(*args, **options)
        return self.lock.take(functools.partial(self._sample, *args, **options), changes=False)

    def _sample(self, *args: Any, **options: Any) -> int:
        sampler, self._sampler = self._sampler, None
        try:
            return super().sample(*args, **options)
        finally:
            self._sampler = sampler  # of an answer that may continue

    def _create_completion(self, *args: Any, **kwargs: Any) -> Any:
        answer: Generator[Any, None, None]
        answer = super()._create_completion(*args, **kwargs)  # type: ignore[assignment]
        return self.lock.steps(answer) if kwargs.get("stream") else iter([self.call(_only, answer)])

    # --- computing ---

    def _decode(self, decode: Callable[[], None], batch: Any) -> None:
        """Wrap a decode. Errors of callbacks and I/O threads precede llama.cpp's."""
        engine, thread = self.engine, self.lock.thread
        thread.require_uncancelled()
        spans = batch_spans(batch)
        if self._decodes is not None:
            spans = {
                sequence: span._replace(decode=self._decodes) for sequence, span in spans.items()
            }
        decodes = is_decode(spans)
        engine.begin(np.array(batch.token[: batch.n_tokens]), spans, decodes)
        started = time.perf_counter()
        try:
            with (
                errors_unless(lambda: thread.cancelled),
                self._core_binding or contextlib.nullcontext(),
            ):
                decode()
        except RuntimeError as error:
            engine.interrupted(time.perf_counter() - started)
            if thread.cancelled:
                raise Cancelled("the answer was cancelled") from None
            raise ComputeError(
                f"llama.cpp could not compute {batch.n_tokens} tokens: {error}"
            ) from error
        engine.end(batch.n_tokens, time.perf_counter() - started, decodes)

    @contextlib.contextmanager
    def batches_as(self, *, decode: bool) -> Iterator[None]:
        """Set whether batches in this context decode or process a prompt.

        By default a batch with one token per sequence decodes. Use decode=True to
        verify drafts.
        """
        before, self._decodes = self._decodes, decode
        try:
            yield
        finally:
            self._decodes = before

    def cancel(self) -> None:
        """Cancel the computation within a layer: it raises `Cancelled`. Thread-safe.

        Recurrent models first complete an answer's token, to keep their state usable. A
        second call aborts that, too, and rewinds to the prompt's last micro-batch.
        """
        self.lock.cancel()

    def generate(self, *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """Generate tokens as llama_cpp does, and call `on_stats` at the end."""
        return self.lock.steps(self._generate(*args, **kwargs))

    def _generate(self, *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        before = self.stats()
        tokens = args[0] if args else kwargs.get("tokens", ())
        if self.engine.quality.simulates:
            self._forget_what_was_not_followed(tokens)
        if kwargs.get("reset", args[7] if len(args) > 7 else True):
            self._reuse_state(tokens)
        try:
            yield from super().generate(*args, **kwargs)
        finally:
            if self.lock.is_open:
                if self._on_stats:
                    try:
                        self._on_stats(self.stats().since(before))
                    except BaseException as error:
                        self.lock.defer(error)

    def _forget_what_was_not_followed(self, tokens: Sequence[int]) -> None:
        """Reset the context unless the prompt continues all of it.

        The text must not depend on earlier requests.
        """
        n = self.n_tokens
        if (
            n != self.engine.quality.followed
            or len(tokens) <= n
            or self.input_ids[:n].tolist() != list(tokens[:n])
        ):
            self.clear_context()

    # --- memory and statistics ---

    def set_memory(self, memory: str | int) -> None:
        """Set the budget between answers, and resize the arena at once.

        Raises:
            BudgetError: The budget is below the model's needs. The old one stays.
            OptionError: The value is not a size.
        """
        self.lock.take(functools.partial(self.engine.set_memory, memory), changes=False)

    def set_gate_callback(self, callback: Callable[[GateEvent], None] | None) -> None:
        """Set a callback as `ExpertBuffer.set_gate_callback` does."""
        self.lock.take(functools.partial(self.engine.set_gate_callback, callback), changes=False)

    def stats(self) -> Stats:
        """Return the statistics since the start or `reset_stats()`."""
        return self.lock.read(self.engine.stats)

    def reset_stats(self) -> None:
        self.lock.read(self.engine.reset_stats)

    # --- closing ---

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the driver, save the warm start and free the model. Idempotent.

        Computations of other threads are ended with an exception. From inside a call,
        as in a callback, the model is freed when that call returns.
        """
        if self._lock is not None:
            self._lock.close(self._free)

    def _free(self) -> None:
        # in reverse order, each even if an earlier one fails
        with contextlib.ExitStack() as stack:
            # another thread's malloc arena could not reuse this thread's free memory
            stack.callback(trim)
            if self._engine is not None:
                stack.callback(self._engine.close)
            if self._core_binding is not None:
                stack.callback(self._core_binding.close)
            if self.loaded:
                stack.callback(super().close)
            if self._engine is not None:
                self._engine.close_driver()
