"""The client of the served model in this process: it asks over a private socket, and gets an answer piece by piece.

The socket is read in a thread, because Python notices Ctrl-C in the main thread alone, and not while that waits for bytes.
"""

from __future__ import annotations

import contextlib
import json
import queue
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from http.client import HTTPConnection, HTTPException, HTTPResponse
from typing import Any

from ..engine.stats import Stats
from ..errors import ContextError, MoeoffError
from ..server.private import PrivateServer
from ..system.console import ProgressLine, note
from ..system.memory import format_size
from ..system.signals import handling

_TELL = 0.25  # seconds between looks at how much of a prompt is computed
_POLL = 0.02  # seconds between looks whether an answer that was given up has ended
_SETTLE = 0.5  # seconds in which a server that breaks off says why
_REASONS = {"limit": "length", "eos": "stop", "word": "stop"}  # of /completion, in the words of chats
_EVERY = {"stream": True, "return_progress": True, "timings_per_token": True}


@dataclass(frozen=True)
class Completion:
    """An answer's text, and what it took.

    Attributes:
        thought: what a model that reasons has written before it.
        finish_reason: "stop": the model or a stop text ended it; "length": -n or the context did; "cancelled": the user did.
        prompt_tokens: of the whole prompt.
        reused_tokens: those at its beginning that the KV cache still held.
        completion_tokens: drawn, the end token included.
        n_ctx: tokens that the context holds.
        stats: of this answer alone; its prompt_tokens are those that had to be computed.
        seconds: from the question to the end.
    """

    text: str
    thought: str
    finish_reason: str
    prompt_tokens: int
    reused_tokens: int
    completion_tokens: int
    n_ctx: int
    stats: Stats
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return the object that `moeoff run --json` prints."""
        n_prompt, n_completion, stats = self.prompt_tokens, self.completion_tokens, asdict(self.stats)
        usage = {"prompt_tokens": n_prompt, "completion_tokens": n_completion, "total_tokens": n_prompt + n_completion}
        thought = {"reasoning": self.thought} if self.thought else {}
        return {"model": stats["model"], "text": self.text, **thought, "finish_reason": self.finish_reason, "usage": usage, "stats": stats}

    def summary(self) -> str:
        """Return one line for people. Its memory is the most that the process has taken since it began."""
        s = self.stats
        precision = s.precision_summary
        if s.max_loss is not None and not precision:
            precision = f"lossless: nothing that was measured is worth it within {s.max_loss:.2%}"
        reused = f" (+{self.reused_tokens} reused)" if self.reused_tokens else ""
        mb = s.bytes_read / 1e6 / max(s.prompt_tokens + s.gen_tokens, 1)
        stalled = min(s.stall_seconds / max(self.seconds, 1e-9), 1)
        budget = f" of {format_size(s.budget_start_bytes)}" if s.budget_start_bytes else ""
        parts = [
            f"prompt {s.prompt_tokens} tokens{reused}, {s.prompt_tps:.1f} tok/s",
            f"generated {self.completion_tokens}, {s.gen_tps:.1f} tok/s",
            f"{s.hit_summary}, {mb:.2f} MB/token read{'' if s.direct_io else ' (through the page cache)'}, stalled {stalled:.0%}",
            precision,
            f"context {self.n_ctx}",
            f"memory {format_size(s.peak_rss_bytes)}{budget}",
        ]
        return " | ".join(filter(None, parts))


class _Connection(HTTPConnection):
    def __init__(self, server: PrivateServer):
        super().__init__("localhost")
        self._server = server
        self.socket = self.sock = server.connect()

    def ask(self, route: str, request: dict[str, Any] | None = None) -> HTTPResponse:
        """Get a route, or post a request to it."""
        body = None if request is None else json.dumps(request)
        headers = {"Authorization": f"Bearer {self._server.key}", "Content-Type": "application/json"}
        self.request("GET" if body is None else "POST", route, body, headers)
        response = self.getresponse()
        if response.status != 200:
            raise _error(json.loads(response.read())["error"])
        return response


@dataclass
class _Progress:
    """What the stream of an answer has told so far."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str | None = None

    def follow(self, event: Mapping[str, Any]) -> None:
        if progress := event.get("prompt_progress"):
            self.prompt_tokens, self.reused_tokens = progress["total"], progress["cache"]
        if timings := event.get("timings"):
            self.prompt_tokens, self.reused_tokens = timings["cache_n"] + timings["prompt_n"], timings["cache_n"]
            self.completion_tokens = timings["predicted_n"]
        reasons = [_REASONS.get(event.get("stop_type", "")), *(choice["finish_reason"] for choice in event.get("choices", ()))]
        self.finish_reason = next(filter(None, reasons), self.finish_reason)


class Client:
    """Asks a served model, one prompt after the other.

    Args:
        server: stays the caller's.

    Attributes:
        settings: fields of every request, as llama-server names them, for what shall be other than the server's defaults.
        n_tokens: of the context that the last answer has filled.
    """

    def __init__(self, server: PrivateServer):
        self.server = server
        self.settings: dict[str, Any] = {}
        self.n_tokens = 0
        self._cancelled = threading.Event()
        self._socket: socket.socket | None = None

    def check(self, messages: list[dict[str, Any]]) -> None:
        """Raise `MoeoffError` if the model's template refuses this conversation."""
        self._fetch("/apply-template", {"messages": messages})

    def defaults(self) -> dict[str, Any]:
        """Return how answers are drawn unless `settings` say otherwise: the server's parameters, by name."""
        params: dict[str, Any] = json.loads(self._fetch("/props"))["default_generation_settings"]["params"]
        return params

    def say_remarks(self) -> None:
        """Print what the server has said of its budget meanwhile."""
        for remark in self.server.take_remarks():
            note(remark)

    def cancel(self) -> None:
        """End the answer that is being computed, from any thread or a signal handler."""
        self._cancelled.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is closed already
                self._socket.shutdown(socket.SHUT_RDWR)

    def ask(self, prompt: str | list[dict[str, Any]], write: Callable[[str, bool], None]) -> Completion:
        """Answer a prompt.

        Args:
            prompt: a text to go on with as it is, or OpenAI's messages, for the model's template.
            write: called in this thread with each piece of text, and whether it is a thought.

        Raises:
            ContextError: the prompt alone is longer than the context.
            MoeoffError: what went wrong; the model stays usable.
        """
        server, is_text = self.server, isinstance(prompt, str)
        route = "/completion" if is_text else "/v1/chat/completions"
        request = _EVERY | self.settings | {"prompt" if is_text else "messages": prompt}
        self._cancelled.clear()
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        before, started = server.stats(), time.perf_counter()
        texts: dict[bool, list[str]] = {False: [], True: []}
        seen = _Progress()
        # a handler and not `except KeyboardInterrupt`: that could come between taking a piece and writing it
        with handling(signal.SIGINT, lambda _signum, _frame: self.cancel()):
            reader = threading.Thread(target=self._read, args=(route, request, events), daemon=True)
            reader.start()
            line, computed = ProgressLine(slows=True), server.engine.prompt_tokens
            try:
                while True:
                    try:
                        event = events.get(timeout=None if seen.completion_tokens else _TELL)
                    except queue.Empty:
                        line.update("prompt", server.engine.prompt_tokens - computed, seen.prompt_tokens - seen.reused_tokens)
                        continue
                    if event is None or isinstance(event, BaseException):
                        break
                    seen.follow(event)
                    for is_thought, text in _pieces(event):
                        line.clear()
                        texts[is_thought].append(text)
                        write(text, is_thought)
            except BaseException:  # the reader of our output has gone
                self.cancel()
                raise
            finally:
                line.clear()
                reader.join()
            if self._cancelled.is_set():
                self._wait_until_idle()
                seen.finish_reason = "cancelled"
            elif event is not None:
                raise event
        ended, stats = time.perf_counter(), server.stats().since(before)
        if stats.gen_tokens:  # as a reader sees it: sampling and writing are part of the time
            stats = replace(stats, gen_tps=(stats.gen_tokens - stats.drafts_rejected) / (ended - started - stats.prompt_seconds))
        self.n_tokens = seen.prompt_tokens + seen.completion_tokens
        n_ctx = server.n_ctx_each
        return Completion("".join(texts[False]), "".join(texts[True]), seen.finish_reason or "stop", seen.prompt_tokens, seen.reused_tokens,
                          seen.completion_tokens, n_ctx, stats, ended - started)  # fmt: skip

    def _read(self, route: str, request: dict[str, Any], events: queue.SimpleQueue[Any]) -> None:
        """Put what the server sends, then None, or what went wrong. Runs in the thread."""
        try:
            with contextlib.closing(_Connection(self.server)) as connection:
                self._socket = connection.socket
                if self._cancelled.is_set():  # before there was a socket to shut down
                    return
                for line in connection.ask(route, request):
                    if line.startswith(b"data: {"):
                        event = json.loads(line.removeprefix(b"data: "))
                        if "error" in event:
                            raise _error(event["error"])
                        events.put(event)
        except MoeoffError as error:
            events.put(error)
        except (OSError, HTTPException, ValueError) as error:
            events.put(self._failure(error))
        finally:
            events.put(None)

    def _failure(self, error: Exception) -> MoeoffError:
        try:
            self.server.wait(_SETTLE)
        except MoeoffError as why:  # it has ended by itself
            return why
        return MoeoffError(f"the answer broke off: {error}")

    def _fetch(self, route: str, request: dict[str, Any] | None = None) -> str:
        with contextlib.closing(_Connection(self.server)) as connection:
            return connection.ask(route, request).read().decode()

    def _wait_until_idle(self) -> None:
        """Until the server has seen that nobody waits any more: its statistics are those of the whole answer then."""
        while re.search(r"^llamacpp:requests_processing [1-9]", self._fetch("/metrics"), re.MULTILINE):
            time.sleep(_POLL)


def _error(error: Mapping[str, Any]) -> MoeoffError:
    if error.get("type") == "exceed_context_size_error":
        return ContextError(error["n_prompt_tokens"], error["n_ctx"])
    return MoeoffError(str(error["message"]).strip())


def _pieces(event: Mapping[str, Any]) -> list[tuple[bool, str]]:
    """Return the texts of an event, each behind whether it is a thought."""
    parts = [(False, event.get("content"))]
    for choice in event.get("choices", ()):
        parts += [(True, choice["delta"].get("reasoning_content")), (False, choice["delta"].get("content"))]
    return [(is_thought, text) for is_thought, text in parts if text]
