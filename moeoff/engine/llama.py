"""`Llama`: llama_cpp's class whose routed experts stay on disk and share a bounded
arena in memory.
"""

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
_SERVERS = ("spec_type", "draft", "context_shift")  # options that moeoff.Server alone has


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
    """Return the first item of an answer that is not read on."""
    with contextlib.closing(answer):
        return next(answer)


def _in_turn(name: str, *, changes: bool = True) -> Any:
    """A method of llama_cpp's or of `PatchedLlama`, called when no other thread
    computes with the model.

    Args:
        changes: the context, so that it does not come between two tokens of an answer.
    """
    method = getattr(PatchedLlama, name)

    @functools.wraps(method)
    def call(self: Llama, *args: Any, **kwargs: Any) -> Any:
        return self.lock.take(functools.partial(method, self, *args, **kwargs), changes=changes)

    return call


class Llama(PatchedLlama):
    """A Mixture-of-Experts model that needs less memory than its file.

    Several threads may use one object: they take turns, answer by answer. A stream has
    its turn from its first token until it is read to its end, closed or dropped, and
    other threads wait for that; a thread that asks for something else before has given
    its stream up, which then raises `MoeoffError`. An exception, Ctrl-C among them,
    ends an answer. The context keeps what was computed, up to the last complete
    micro-batch, and the next prompt that begins with it reuses it. `close()` ends what
    runs; after it, and in a fork of the process, every call raises `MoeoffError`.

    Args:
        model_path: of the GGUF and `options`, or instead of both a `Config`.
        progress: called with the loaded fraction, 0 to 1, while the weights outside the
            experts are read.
        on_stats: called with the `Stats` of each answer when it ends.
        **options: those of `moeoff.options.Config`: memory, expert_memory, strategy,
        experts, tier, max_loss, ...; and of `llama_cpp.Llama`: n_ctx, n_threads, ...

    Raises:
        ModelError: the file is missing, damaged, or has no routed experts.
        BudgetError: the budget is below what the model needs; its hint says what would
            do.
        OptionError: an unknown keyword or strategy, or a value that makes no sense.
    """

    # llama_cpp closes objects that were never opened, too
    _engine: Engine | None = None
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
        # llama.cpp's strategies for NUMA place threads themselves
        self._core_binding = None if self.numa else CoreBinding(self.context_handle)

    def __getstate__(self) -> dict[str, Any]:
        """What a copy, here or in another process, is opened with: the same options,
        and a text of its own.
        """
        return {"model_path": self.engine.config, "on_stats": self._on_stats}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # as llama_cpp's

    @property
    def engine(self) -> Engine:
        """The model's runtime state: `engine.buffer`, `engine.plan`, `engine.quality`,
        ...
        """
        if self._engine is None:
            raise MoeoffError("the model is closed")
        return self._engine

    # --- lock ---

    def call(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function on the model's thread, as one turn: what it computes, Ctrl-C
        or `cancel()` ends as a whole.
        """
        return self.lock.take(functools.partial(function, *args, **kwargs))

    def _forget_incomplete(self) -> None:
        super()._forget_incomplete()
        if self.engine.quality.simulates:
            self.engine.quality.use(self.engine.quality.precision)

    def load_state(self, state: Any) -> None:
        """As llama_cpp's."""
        self.call(self._load_state, state)

    def _load_state(self, state: Any) -> None:
        # it fills the KV cache: experts give back what they have of that
        self.engine.sizer.before(1, moves_state=True)
        super().load_state(state)

    def eval(self, tokens: Sequence[int]) -> None:
        """As llama_cpp's."""
        self.lock.take(functools.partial(self._eval, tokens))

    def _eval(self, tokens: Sequence[int]) -> None:
        # recurrent layers cannot go back behind a token of which a part is computed
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
        """As llama_cpp's, but not with the settings of the answer before."""
        if self.lock.thread.is_current:
            return super().sample(*args, **options)
        return self.lock.take(functools.partial(self._sample, *args, **options), changes=False)

    def _sample(self, *args: Any, **options: Any) -> int:
        sampler, self._sampler = self._sampler, None
        try:
            return super().sample(*args, **options)
        finally:
            self._sampler = sampler  # of an answer that may be read on

    def _create_completion(self, *args: Any, **kwargs: Any) -> Any:
        answer: Generator[Any, None, None]
        answer = super()._create_completion(*args, **kwargs)  # type: ignore[assignment]
        return self.lock.steps(answer) if kwargs.get("stream") else iter([self.call(_only, answer)])

    # --- computing ---

    def _decode(self, decode: Callable[[], None], batch: Any) -> None:
        """Around every decode: what went wrong in a callback or an I/O thread comes
        before what llama.cpp says of it.
        """
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
        """While open, batches are taken for what the caller says they are.

        By itself a batch that has one token of each of its sequences is taken for
        decoding, and any other for a prompt: say decode=True where several tokens of a
        sequence are a draft that is verified.
        """
        before, self._decodes = self._decodes, decode
        try:
            yield
        finally:
            self._decodes = before

    def cancel(self) -> None:
        """End what is being computed, from any thread: the call raises `Cancelled`
        within a layer.

        A model with recurrent layers first completes the token of an answer, so that
        the next turn can reuse its state. A second call ends that, too, and the context
        goes back to the last micro-batch of the prompt.
        """
        self.lock.cancel()

    def generate(self, *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """As llama_cpp's; `on_stats` is told when it ends."""
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
        """The text must not depend on what was asked before: unless a prompt goes on
        behind all of it, it is computed from its start.
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
        """Moves the budget of a running model, between answers: the arena is resized at
        once.

        Raises:
            BudgetError: below what the model needs; the old budget stays.
            OptionError: not a size.
        """
        self.lock.take(functools.partial(self.engine.set_memory, memory), changes=False)

    def set_gate_callback(self, callback: Callable[[GateEvent], None] | None) -> None:
        """See `ExpertBuffer.set_gate_callback`; a strategy's own and the trace keep
        theirs.
        """
        self.lock.take(functools.partial(self.engine.set_gate_callback, callback), changes=False)

    def stats(self) -> Stats:
        """Statistics since the model was opened, or since `reset_stats()`."""
        return self.lock.read(self.engine.stats)

    def reset_stats(self) -> None:
        self.lock.read(self.engine.reset_stats)

    # --- closing ---

    def __enter__(self) -> Llama:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes trace and driver, remembers what is resident for a warm start, and
        frees the model. May be called twice.

        What another thread computes ends first, with an exception there. From inside a
        call, as in a callback, the model is freed when that returns.
        """
        if self._lock is not None:
            self._lock.close(self._free)

    def _free(self) -> None:
        # each of them whatever becomes of the ones before it, the last first
        with contextlib.ExitStack() as stack:
            # another thread's malloc arena would not use what is free in this thread's
            stack.callback(trim)
            if self._engine is not None:
                stack.callback(self._engine.close)
            if self._core_binding is not None:
                stack.callback(self._core_binding.close)
            if self.loaded:
                stack.callback(super().close)
            if self._engine is not None:
                self._engine.close_driver()
