"""`Server`: llama-server's engine in a thread of this process."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from ctypes import c_int32
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..budget.draft_model import uses_nextn
from ..budget.dry_load import (
    answer_bytes,
    context_sizes,
    default_ctx,
    dry_load,
    sequence_state,
    tensor_buffers,
    with_drafts,
)
from ..budget.plan import MemoryPlan, require_header_room
from ..engine.engine import Engine
from ..engine.explanation import explain
from ..engine.opening import plan
from ..engine.stats import Metric, Stats
from ..errors import BudgetError, MoeoffError, OptionError
from ..gguf.model_index import ModelIndex
from ..llamacpp.compute_thread import computes_here
from ..llamacpp.threads import CoreBinding
from ..options import Config, ServerOptions
from ..routing.batch import is_decode, spans_of
from ..system.console import note
from ..system.memory import Budget, format_size, rss, share_malloc_arenas, trim, unmap_files
from .arguments import CommandLine, PassedFile, arguments, check_files, in_use
from .extra_models import extra_models
from .library import (
    c_arguments,
    check_arguments,
    check_templates,
    hooks,
    library,
    states,
    write_text,
)
from .log import ErrorPipe, first_error
from .prompts_on_disk import EvictedPrompt, PromptsOnDisk, StoredPrompt, folder, identity
from .sizes import PARALLEL, ContextSize, PromptMemory, choose_sizes

if TYPE_CHECKING:
    from typing_extensions import Self

_POLL = 0.05  # seconds
_IDLE = 0.25  # seconds without a batch until the server counts as idle
_STEP = 1 << 20  # bytes: step of the prompt cache's reservations
_KV_DISK = 4 << 30  # default in bytes
_MEASURED = 256  # prompt tokens until the speed is reliable
# requests that programs and pages repeat, which are not logged
POLLED_PATHS = ("/health", "/v1/health", "/metrics", "/moeoff", "/", "/tools")
_AT_THE_END = 5.0  # seconds for writing prompts after a stop
_LONGEST_PATH = 200  # characters
_PAGE = Path(__file__).with_name("page.html")
_LONG = 256 << 10  # bytes of a long request
_ABORTED = 2  # llama_decode's result for an aborted graph
_POOLING = "pooling_type"  # key of embedding models
# options that move cached tokens, as a context shift does
_CACHE_REUSE = ("--cache-reuse", "LLAMA_ARG_CACHE_REUSE")
# callbacks of llama-server, and their results after an exception
_HOOKS = {
    "loaded": 1,
    "ready": 1,
    "listening": None,
    "draft_max": 0,
    "before": None,
    "after": 1,
    "borrow": 1,
    "metrics": None,
    "resize_prompt_cache": 1,
    "answered": None,
    "accept_prompt": 0,
    "store_prompt": None,
    "find_prompt": 0,
    "read_prompt": 1,
    "fill_cells": None,
}
_serving = threading.Lock()  # llama-server keeps state in globals


class Server:
    """A model behind HTTP with the routes of OpenAI, Anthropic and llama.cpp.

    Args:
        model: Path of a GGUF, or a `Config`.
        on_request: Callback on the answering thread with a line about each request:
            method, path, status, duration and tokens.
        on_remark: Callback on its own thread with a sentence when the default budget
            moves.
        proxied: True to check Host and Origin on Unix sockets, too, as requests come
            from a proxy.
        **options: Options of `moeoff.options.ServerOptions` (host, port, parallel, ...)
            and `moeoff.Llama`. `args` has llama-server's own, as words or a
            `CommandLine`; moeoff's equivalents become its options.

    Attributes:
        engine: Runtime state of the model.

    Raises:
        MoeoffError: The model, the budget or an option is invalid; nothing is loaded.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | Config,
        *,
        on_request: Callable[[str], None] | None = None,
        on_remark: Callable[[str], None] | None = None,
        proxied: bool = False,
        **options: Any,
    ):
        self._on_request, self._on_remark, self._proxied = on_request, on_remark, proxied
        ours = {f.name for f in fields(ServerOptions)}
        line = (
            args
            if isinstance(args := options.get("args", ()), CommandLine)
            else CommandLine.read(args)
        )
        options |= line.options | {"args": tuple(line.passed_on)}
        self._remarks = list(line.left_out)
        self._options = ServerOptions.make(
            **{name: value for name, value in options.items() if name in ours}
        )
        config = Config.make(
            model, **{name: value for name, value in options.items() if name not in ours}
        )
        unmap_files()  # the plan counts the process's current memory
        self.engine = self._open(config, line.files)
        self._tells = on_request is not None or config.verbose
        self._argv = arguments(
            self.engine.config,
            self.engine.planned.n_ctx,
            self.engine.keywords,
            self._options,
            self.prompt_memory,
        )
        check_arguments(self._argv)
        self.url = ""
        self._error: BaseException | None = None
        self._log_error = ""
        self._serves, self._ended = threading.Event(), threading.Event()
        # deadline (time.monotonic) for writing prompts at the end
        self._stopping, self._deadline = False, 0.0
        self._loading = contextlib.ExitStack()
        self._started, self._decodes = 0.0, True
        self._batch_error: Exception | None = None
        # work between decodes, by the serving thread and others
        self._between = threading.Lock()
        self._ending = c_int32(0)
        self._core_binding: CoreBinding | None = None
        self._thread = threading.Thread(target=self._serve, name="moeoff-server", daemon=True)
        self._n_batches, self._computes = 0, False
        # bytes of prompts outside the context: total, in the cache, and being written
        # to disk
        self._reserved = self._cached = self._evicted = 0
        self._disk: PromptsOnDisk | None = None
        self._stored: StoredPrompt | None = None
        if self._options.kv_disk:
            try:
                window, prompts = (
                    self.engine.model_index.hparams.get("attention.sliding_window"),
                    self.prompt_memory,
                )
                cuttable = (
                    window
                    if self.engine.config.swa_full is False and isinstance(window, int) and window
                    else math.inf
                )
                cuttable = 0 if prompts.checkpoint else cuttable
                self._disk = PromptsOnDisk(
                    folder(),
                    self._options.kv_disk,
                    self._identity,
                    self._prompt_rate,
                    lambda nbytes: self._reserve(more=-nbytes),
                    cuttable,
                    prompts.n_checkpoints,
                )
            except OSError as error:
                self._remarks.append(f"prompts are not kept on disk: {error}")
        self._closing = threading.Event()
        self._idle = threading.Thread(target=self._use_idle, name="moeoff-idle", daemon=True)

    def _open(self, config: Config, passed_on: Sequence[PassedFile]) -> Engine:
        options = self._options
        model_index = ModelIndex.read(config.model_path)
        model_index.require_text()
        loaded = check_files(passed_on, in_use(model_index.files, config, options))
        budget = Budget.of(config.memory, config.expert_memory)
        require_header_room(config.model_path, model_index.header_memory, budget.most)
        check_templates(config.model_path, options.args)
        self._size = size = self._choose_context(config, model_index, budget)
        if size.remark is not None:
            self._remarks.append(size.remark)
        n_ctx, options = size.n_ctx, replace(options, parallel=size.n_parallel)
        config = replace(config, n_ctx=n_ctx)
        resident, computing, spec_type = extra_models(
            model_index, n_ctx, config, options, budget.most
        )
        pools = (
            options.embedding
            and not options.rerank
            and options.pooling is None
            and _POOLING not in model_index.hparams
        )
        config = replace(config, spec_type=spec_type)
        self._options = replace(options, pooling="mean" if pools else options.pooling)
        computing += answer_bytes(model_index, size.n_parallel)

        def remembered(planned: MemoryPlan) -> int:
            """Return the bytes of rewind states, which are allocated at the start."""
            room = budget.most - planned.fixed
            own = sequence_state(model_index, planned.n_ctx, config.keywords) if room > 0 else 0
            self.prompt_memory = PromptMemory.of(planned, room, own, size.n_parallel, self._options)
            return self.prompt_memory.checkpoints

        opening = plan(
            config,
            model_index,
            budget,
            n_sequences=size.n_parallel,
            unified=options.kv_unified,
            extras=computing,
            loaded=resident + loaded,
            more=remembered,
        )
        moves = any(name.startswith(_CACHE_REUSE) for name in (*options.args, *os.environ))
        engine = Engine(opening, moves=moves, on_remark=self._on_remark)
        self._options = replace(self._options, kv_disk=self._disk_bound())
        self._identity = identity(
            engine, self._options, in_use(model_index.files, config, self._options)
        )
        if engine.quality.simulates:
            if size.n_parallel > 1:
                raise OptionError(
                    "`deterministic`: a simulated cache follows one text", hint={"parallel": 1}
                )
            args = (*self._options.args, "--no-cache-prompt")  # from the first token on
            self._options = replace(self._options, args=args)
        return engine

    def _disk_bound(self) -> int:
        """Return the limit of prompts on disk, 0 if they cannot be continued."""
        options = self._options
        bound = _KV_DISK if options.kv_disk is None else options.kv_disk
        if options.embedding or options.rerank or not bound:
            return 0
        why = ""
        if options.mmproj:
            why = "prompts may hold pictures"
        elif any(argument.startswith("--lora") for argument in options.args):
            why = "requests choose adapters"
        if why and options.kv_disk:
            self._remarks.append(f"--kv-disk has no effect: {why}")
        return 0 if why else bound

    def _choose_context(
        self, config: Config, model_index: ModelIndex, budget: Budget
    ) -> ContextSize:
        """Choose the context length of all slots, the user's or by the budget."""
        usual, fixed, options = (
            default_ctx(model_index, config.n_ctx),
            config.n_ctx is not None,
            self._options,
        )
        if fixed or budget.process is None:
            n = options.parallel or PARALLEL
            return ContextSize(usual if fixed else usual * n, n)
        config.check_model(model_index)
        overrides = tensor_buffers(config.override_tensor, model_index)

        def planned(n_ctx: int, n: int) -> MemoryPlan:
            return dry_load(
                model_index,
                n_ctx,
                config.keywords,
                overrides,
                n_sequences=n,
                nextn=uses_nextn(config.spec_type),
                unified=options.kv_unified,
            )

        return choose_sizes(planned, usual, options.parallel, budget.process)

    # --- life ---

    def start(self) -> Server:
        """Load the model and listen, once. Return when requests can be answered.

        Raises:
            MoeoffError: The model does not fit or cannot be loaded, the address is
                taken, or a server runs in this process already.
        """
        if self._thread.ident is not None:
            raise MoeoffError("this server was started before: it serves once; make another")
        lib = library()
        _check_address(self._options.host, self._options.port)
        if not _serving.acquire(blocking=False):
            raise MoeoffError(
                "a server runs in this process already: llama-server keeps its state in globals;"
                " stop that one, or start another process"
            )
        self._lib = lib
        share_malloc_arenas()
        unmap_files()  # pages read by planning
        try:
            self._thread.start()
        except RuntimeError:
            _serving.release()
            raise MoeoffError("the system gives this process no more threads") from None
        try:
            while not self._serves.is_set() and not self._ended.is_set():
                time.sleep(_POLL)
        except BaseException:
            self.stop()
            raise
        if self._ended.is_set():
            self.wait()
        return self

    def stop(self) -> None:
        """End all answers, then the server, which writes prompts to disk for some
        seconds.

        Thread-safe; may be called twice.
        """
        self._stopping, self._deadline = True, self._deadline or time.monotonic() + _AT_THE_END
        self._ending.value = 1
        if self._thread.is_alive():
            self.engine.buffer.set_cancelled(True)
            # an earlier stop has no effect
            while self._thread.is_alive():
                self._lib.moeoff_serve_stop()
                self._thread.join(0.2)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end. Return True if the server has ended.

        Raises:
            MoeoffError: The server failed.
        """
        # sleep instead of waiting for a lock: a signal just before that, or to another
        # thread, would not run its handler
        end = math.inf if timeout is None else time.monotonic() + timeout
        while not self._ended.is_set() and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _POLL))
        ended = self._ended.is_set()
        if ended and not self._stopping:
            self._thread.join()
            why = self._log_error or "llama-server has ended by itself (`verbose` says more)"
            raise self._error or MoeoffError(f"{self.engine.config.model_path}: {why}")
        return ended

    def __enter__(self) -> Self:
        if not self._thread.is_alive():
            self.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()

    @property
    def remarks(self) -> list[str]:
        """Remarks for the user, a sentence each."""
        out = list(self._remarks)
        if self.engine.device_remark:
            out.append(self.engine.device_remark)
        if (host := self._options.open_to) is not None:
            out.append(open_warning(host))
        return out

    def explain(self) -> dict[str, str]:
        """Return the choices and reasons, a sentence each."""
        prompts, disk = self.prompt_memory, self._options.kv_disk
        divided = "share" if self._options.kv_unified else "divide"
        return explain(self.engine) | {
            "slots": (
                self._size.remark
                or f"answers at a time: {self.n_parallel}, which {divided} the context (-np)"
            ),
            "prompt cache": (
                f"at most {format_size(prompts.cache_ram)} of the experts' memory for prompts"
                f" outside the context: {prompts.reason} (--cache-ram)"
            ),
            "on disk": (
                f"at most {format_size(disk)} of them (--kv-disk)"
                if disk
                else "none of them (--kv-disk)"
            ),
            "checkpoints": (
                f"{prompts.n_checkpoints} of {format_size(prompts.checkpoint)} for each slot"
                " (--ctx-checkpoints)"
                if prompts.checkpoint
                else "none: no slot has a state of its own"
            ),
        }

    @property
    def n_parallel(self) -> int:
        """Number of slots."""
        return max(self._options.parallel or 1, 1)

    @property
    def n_ctx_each(self) -> int:
        """Context length of a slot in tokens when all are busy."""
        return self.engine.planned.n_ctx // self.n_parallel

    @property
    def has_page(self) -> bool:
        """True if this build has llama-server's web page, at the URL itself."""
        return bool(library().moeoff_serve_has_page())

    def stats(self) -> Stats:
        """Return the statistics since the start."""
        with self._between:
            return self.engine.stats()

    def set_memory(self, memory: str | int) -> None:
        """Set the budget; running answers continue.

        Raises:
            BudgetError: The budget is below the model's needs. The old one stays.
        """
        with self._between:
            self.engine.set_memory(memory)

    # --- the serving thread ---

    def _serve(self) -> None:
        engine, args = self.engine, self._options.args
        logs = [path for name, path in zip(args, args[1:]) if name == "--log-file"]
        pipe = None
        try:
            pipe = ErrorPipe() if not logs and "--log-disable" not in args else None
            argv = [*self._argv, *(["--log-file", pipe.path] if pipe else [])]
            overrides = self._loading.enter_context(engine.loading())  # for the loading thread
            sites = self._options.sites
            calls = hooks(
                buffer=engine.buffer.handle,
                overrides=overrides.address,
                ending=ctypes.pointer(self._ending),
                expert_uses=engine.experts_per_token,
                page=_PAGE.read_bytes(),
                allowed_hosts=None if sites is None else ",".join(sites).encode(),
                checks_sockets=self._proxied,
                **{
                    name: self._guarded(getattr(self, f"_{name}"), failed)
                    for name, failed in _HOOKS.items()
                    if name != "answered" or self._tells
                },
            )
            self._lib.moeoff_serve(len(argv), c_arguments(argv), ctypes.byref(calls))
        except BaseException as error:
            self._error = self._error or error
        finally:
            # in reverse order, each even if an earlier one fails
            with contextlib.ExitStack() as stack:
                stack.callback(self._ended.set)
                stack.callback(
                    lambda: setattr(
                        self,
                        "_log_error",
                        pipe.close() if pipe else first_error(logs[-1]) if logs else "",
                    )
                )
                stack.callback(_serving.release)
                stack.callback(engine.close)
                stack.callback(engine.close_driver)
                stack.callback(self._loading.close)
                if self._core_binding is not None:
                    stack.callback(self._core_binding.close)
                if self._idle.is_alive():
                    stack.callback(self._idle.join)
                stack.callback(self._closing.set)
                if self._disk is not None:
                    stack.callback(self._disk.close, self._deadline)

    def _use_idle(self) -> None:
        """Give experts, or the system, the memory that the last batches left.

        It runs once after each request, when no batch has come for a while, and after
        the budget has moved.
        """
        last = seen = (-1, 0)
        while not self._closing.wait(_IDLE):
            with self._between:
                now = self._n_batches, self.engine.sizer.budget
                if seen == now != last and not self._computes:
                    last = now
                    self.engine.idle(lambda: self._computes)
                seen = now

    def _guarded(self, function: Callable[..., Any], failed: Any) -> Callable[..., Any]:
        """Keep exceptions for `start()`, because they must not cross C frames."""

        def call(*args: Any) -> Any:
            try:
                return function(*args)
            except BaseException as error:
                self._error = self._error or error
                return failed

        return call

    def _loaded(self, model: int, ctx: int) -> int:
        """Start with the smallest arena for llama-server's warm-up."""
        self._loading.close()
        engine = self.engine
        engine.attach(ctx)
        # at its final size, which decides about huge pages
        engine.buffer.start(*engine.expected_arenas)
        engine.buffer.set_cache_bytes(engine.buffer.arena_floor, engine.buffer.low_arena_floor)
        return 0

    def _ready(self, ctx: int, ctx_draft: int | None, no_drafts: bytes | None) -> int:
        """Give the arena the memory that is left after the server's allocations."""
        if self.engine.drafts is not None and no_drafts is not None:
            raise OptionError(
                "drafts cannot be made:"
                f" {no_drafts.decode('utf-8', 'replace') or 'not with this context'}"
            )
        engine = self.engine
        unmap_files()  # pages read by loading
        adapters = any(argument.startswith("--lora") for argument in self._options.args)
        engine.loaded(
            ctx,
            lambda: with_drafts(context_sizes(ctx), ctx_draft),
            adapters=adapters,
            watches=engine.config.warm,
        )
        # llama.cpp's NUMA strategies place threads themselves; threads also compute
        # drafts and images, unbound
        if (
            engine.keywords.get("numa") is None
            and engine.drafts is None
            and not self._options.mmproj
        ):
            self._core_binding = CoreBinding(ctx)
        return int(self._stopping)

    def _listening(self, url: bytes) -> None:
        self.url = url.decode()
        self._idle.start()
        self._serves.set()

    def _draft_max(self, token: int) -> int:
        """Return the longest next draft in tokens."""
        n = 0 if self.engine.drafts is None else self.engine.drafts.best
        if n:
            with self._between:
                self.engine.expect(token)
        return n

    def _before(self, tokens: Any, positions: Any, slots: Any, is_prompt: Any, n: int) -> None:
        try:
            computes_here()
            slots, is_prompt = slots[:n], is_prompt[:n]
            spans = spans_of(slots, positions[:n], is_prompt)
            self._decodes = is_decode(spans)
            self._n_batches, self._computes = self._n_batches + 1, True
            self._started = time.perf_counter()
            if self._serves.is_set():
                with self._between:
                    self.engine.begin(
                        np.ctypeslib.as_array(tokens, (n,)).copy(), spans, self._decodes
                    )
            if self._core_binding is not None:
                # until `_after`, which runs even if the batch fails
                self._core_binding.__enter__()
        except Exception as error:  # raised after the batch
            self._batch_error = error

    def _after(self, result: int, n: int, message: int, size: int) -> int:
        error, self._batch_error = self._batch_error, None
        self._computes = False
        if self._core_binding is not None:
            self._core_binding.__exit__()
        if self._serves.is_set():
            try:
                with self._between:
                    seconds = time.perf_counter() - self._started
                    if result:
                        self.engine.interrupted(seconds)
                    else:
                        self.engine.end(n, seconds, self._decodes)
                        if not self._decodes:
                            self._lib.moeoff_server_prompt_max(self.engine.prompt_meter.n_beside())
            except Exception as failed:  # the next batch may succeed
                error = error or failed
        if error is None and result == _ABORTED:
            error = MoeoffError(
                "the server is shutting down" if self._stopping else "the computation was ended"
            )
        if error is not None:
            write_text(message, size, _for_clients(error))
        return error is not None

    def _borrow(self, nbytes: int, message: int, size: int) -> int:
        """Reserve memory for a long request and its media."""
        try:
            if nbytes < -_LONG:
                # free the C allocator's memory, which the experts already use
                trim()
            with self._between:
                self.engine.sizer.reserve(nbytes)
        except BudgetError:
            write_text(
                message,
                size,
                f"the request takes {format_size(nbytes)} to read, more than the server has room"
                " for: make it shorter, or its pictures smaller",
            )
            return 1
        except Exception as error:
            write_text(message, size, _for_clients(error))
            return 1
        return 0

    def _resize_prompt_cache(self, nbytes: int) -> int:
        return self._reserve(cached=nbytes)

    def _reserve(self, cached: int | None = None, more: int = 0) -> int:
        """Reserve memory for prompts outside the context. Return nonzero if that fails.

        Args:
            cached: New bytes of the prompt cache, if changed.
            more: Bytes of prompts being written to disk.
        """
        try:
            with self._between:
                cached, evicted, before = (
                    self._cached if cached is None else cached,
                    self._evicted + more,
                    self._reserved,
                )
                reserved = -(-(cached + evicted) // _STEP) * _STEP
                if reserved < before:
                    # free the C allocator's memory, which the experts already use
                    trim()
                if reserved != before:
                    self.engine.sizer.reserve(reserved - before, optional=True)
                self._cached, self._evicted, self._reserved = cached, evicted, reserved
        except BudgetError:
            return 1
        return 0

    # --- prompts on disk; these answer 0 or nothing where there are none ---

    def _prompt_rate(self) -> float:
        """Return the prompt's tokens per second; 0 if unknown."""
        stats = self.stats()
        return (
            stats.prompt_tokens / stats.prompt_seconds
            if stats.prompt_tokens >= _MEASURED and stats.prompt_seconds > 0
            else 0.0
        )

    def _accept_prompt(self, tokens: Any, n: int, nbytes: int) -> int:
        if self._disk is not None and self._stopping:
            self._disk.join(self._deadline)  # one write at a time
        return self._disk is not None and self._disk.accepts(
            np.ctypeslib.as_array(tokens, (n,)), nbytes
        )

    def _store_prompt(self, pointer: Any) -> None:
        assert self._disk is not None  # it was asked before
        raw, free = pointer.contents, self._lib.moeoff_prompt_free
        tokens, checkpoints = (
            np.ctypeslib.as_array(raw.tokens, (raw.n_tokens,)).copy(),
            raw.checkpoints[: 3 * raw.n_checkpoints],
        )
        prompt = EvictedPrompt(tokens, states(raw), lambda: free(pointer), tuple(checkpoints))
        with self._between:
            self._cached, self._evicted = (
                self._cached - prompt.nbytes,
                self._evicted + prompt.nbytes,
            )
        self._disk.store(prompt)

    def _find_prompt(self, tokens: Any, n: int, n_have: int, pointer: Any) -> int:
        self._stored = (
            None
            if self._disk is None
            else self._disk.find(np.ctypeslib.as_array(tokens, (n,)), n_have)
        )
        if self._stored is None:
            return 0
        raw, sizes, checkpoints = pointer.contents, self._stored.sizes, self._stored.checkpoints
        raw.n_tokens, raw.n_checkpoints = len(self._stored.tokens), len(checkpoints) // 3
        raw.sizes[: len(sizes)], raw.checkpoints[: len(checkpoints)] = sizes, checkpoints
        return 1

    def _read_prompt(self, pointer: Any) -> int:
        stored, raw = self._stored, pointer.contents
        if self._disk is None or stored is None or not self._disk.read(stored, states(raw)):
            return 1
        np.ctypeslib.as_array(raw.tokens, (raw.n_tokens,))[:] = stored.tokens
        return 0

    def _fill_cells(self, n_tokens: int) -> None:
        """Give back KV cells for a restored prompt."""
        if self._serves.is_set():
            with self._between:
                self.engine.sizer.fill(n_tokens)

    def _answered(self, method: bytes, path: bytes, status: int, took: bytes) -> None:
        if self._on_request is None:
            return
        line = request_line(
            method.decode("utf-8", "replace"),
            path.decode("utf-8", "replace"),
            status,
            took.decode(),
        )
        if line:
            self._on_request(line)

    def _metrics(self, text: int, size: int) -> None:
        with self._between:
            metrics = [*self.engine.stats().metrics(), *self.engine.layer_metrics()]
        write_text(text, size, metrics_text(metrics, self._disk))


def open_warning(host: str) -> str:
    """Return a warning about a server that other machines may use."""
    return (
        f"warning: everyone who reaches {host} may use this server and read what it is asked: there"
        " is no API key"
    )


def _for_clients(error: Exception) -> str:
    """Return an error message for clients, without Python's wording."""
    if isinstance(error, MoeoffError):
        return str(error)
    note(f"an error in the server: {type(error).__name__}: {error}")
    return "an error in the server, which says more where it was started"


def _check_address(hosts: str, port: int) -> None:
    """Raise `OptionError` if the server cannot listen on comma-separated hosts.

    A path that ends in .sock is a Unix socket.
    """
    for host in filter(None, (part.strip() for part in hosts.split(","))):
        if host.endswith(".sock"):
            continue
        try:
            family, kind, number, _, address = socket.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            with socket.socket(family, kind, number) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
        except OSError as error:
            raise OptionError(
                f"cannot listen on {host}:{port}: {error.strerror}", hint={"host": ..., "port": ...}
            ) from None


def request_line(method: str, path: str, status: int, took: str) -> str:
    """Return the log line of a request; "" for polled paths and page files."""
    if status < 400 and (path in POLLED_PATHS or (method == "GET" and re.search(r"\.\w+$", path))):
        return ""
    path = "".join(c if c.isprintable() else "?" for c in path[:_LONGEST_PATH])
    return f"{method} {path} {status}" + (f": {took}" if took else "")


def metrics_text(metrics: Iterable[Metric], disk: PromptsOnDisk | None = None) -> str:
    """Format all metrics in Prometheus' text format."""
    metrics = [
        *metrics,
        Metric("resident_memory_bytes", "Resident memory of the process.", {"": rss()}),
    ]
    if disk is not None:
        metrics += [
            Metric(
                "prompts_disk_bytes",
                "Prompts on disk, of all servers of this user.",
                {"": disk.nbytes},
            ),
            Metric(
                "prompts_disk_kept_total",
                "Prompts that fell out of memory and went to disk.",
                {"": disk.n_written},
            ),
            Metric(
                "prompts_disk_read_total", "Prompts that came back from there.", {"": disk.n_read}
            ),
            Metric(
                "prompts_disk_read_seconds_total",
                "Time that reading them took.",
                {"": disk.read_seconds},
            ),
        ]
    return "\n".join(map(str, metrics)) + "\n"
