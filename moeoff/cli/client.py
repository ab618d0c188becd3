"""The client of a `PrivateServer`: sends a request over its socket and streams the
answer.

A thread reads the socket: Python handles Ctrl-C only in the main thread, and not while
that thread waits for bytes.
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

_PROGRESS_INTERVAL = 0.25  # seconds between updates of a prompt's progress
_POLL = 0.02  # seconds between checks whether a cancelled answer has ended
_EXIT_WAIT = 0.5  # seconds in which a failing server reports its error
_REASONS = {"limit": "length", "eos": "stop", "word": "stop"}  # stop_type to finish_reason
_REQUEST = {"stream": True, "return_progress": True, "timings_per_token": True}


@dataclass(frozen=True)
class Completion:
    """An answer and its statistics.

    Attributes:
        thought: Reasoning before the answer.
        finish_reason: "stop" (end token or stop text), "length" (-n or full context) or
            "cancelled".
        reused_tokens: Prompt tokens found in the KV cache.
        completion_tokens: Sampled tokens, including the end token.
        stats: Statistics of this answer. Their prompt_tokens exclude reused tokens.
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
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        return {
            "model": self.stats.model,
            "text": self.text,
            **({"reasoning": self.thought} if self.thought else {}),
            "finish_reason": self.finish_reason,
            "usage": usage,
            "stats": asdict(self.stats),
        }

    def summary(self) -> str:
        """Return one line with speeds, hit rate and the process's peak memory."""
        s = self.stats
        precision = s.precision_summary
        if s.max_loss is not None and not precision:
            precision = f"lossless: no measured lower precision is faster within {s.max_loss:.2%}"
        reused = f" (+{self.reused_tokens} reused)" if self.reused_tokens else ""
        mb = s.bytes_read / 1e6 / max(s.prompt_tokens + s.gen_tokens, 1)
        stalled = min(s.stall_seconds / max(self.seconds, 1e-9), 1)
        budget = f" of {format_size(s.budget_start_bytes)}" if s.budget_start_bytes else ""
        parts = [
            f"prompt {s.prompt_tokens} tokens{reused}, {s.prompt_tps:.1f} tok/s",
            f"generated {self.completion_tokens}, {s.gen_tps:.1f} tok/s",
            (
                f"{s.hit_summary}, {mb:.2f} MB/token"
                f" read{'' if s.direct_io else ' (through the page cache)'}, stalled {stalled:.0%}"
            ),
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
        """Return the response to a GET, or to a POST of `request`."""
        body = None if request is None else json.dumps(request)
        headers = {
            "Authorization": f"Bearer {self._server.key}",
            "Content-Type": "application/json",
        }
        self.request("GET" if body is None else "POST", route, body, headers)
        response = self.getresponse()
        if response.status != 200:
            raise _error(json.loads(response.read())["error"])
        return response


@dataclass
class _Progress:
    prompt_tokens: int = 0
    reused_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = "stop"

    def update(self, event: Mapping[str, Any]) -> None:
        if progress := event.get("prompt_progress"):
            self.prompt_tokens, self.reused_tokens = progress["total"], progress["cache"]
        if timings := event.get("timings"):
            self.prompt_tokens, self.reused_tokens = (
                timings["cache_n"] + timings["prompt_n"],
                timings["cache_n"],
            )
            self.completion_tokens = timings["predicted_n"]
        reasons = [
            _REASONS.get(event.get("stop_type", "")),
            *(choice["finish_reason"] for choice in event.get("choices", ())),
        ]
        self.finish_reason = next(filter(None, reasons), self.finish_reason)


class Client:
    """A client of a server that the caller closes. It sends one prompt at a time.

    Attributes:
        settings: llama-server's request fields that override the server's defaults.
        n_tokens: Tokens in the context after the last answer.
    """

    def __init__(self, server: PrivateServer):
        self.server = server
        self.settings: dict[str, Any] = {}
        self.n_tokens = 0
        self._cancelled = threading.Event()
        self._socket: socket.socket | None = None

    def check(self, messages: list[dict[str, Any]]) -> None:
        """Render a conversation. Raise `MoeoffError` if the model's template refuses
        it.
        """
        self._fetch("/apply-template", {"messages": messages})

    def defaults(self) -> dict[str, Any]:
        """Return the server's default sampling parameters by name."""
        params: dict[str, Any] = json.loads(self._fetch("/props"))["default_generation_settings"][
            "params"
        ]
        return params

    def say_remarks(self) -> None:
        """Print what the server has said of its budget meanwhile."""
        for remark in self.server.take_remarks():
            note(remark)

    def cancel(self) -> None:
        """Cancel the running answer, from any thread or a signal handler."""
        self._cancelled.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):  # already closed
                self._socket.shutdown(socket.SHUT_RDWR)

    def ask(
        self, prompt: str | list[dict[str, Any]], write: Callable[[str, bool], None]
    ) -> Completion:
        """Answer a prompt. Ctrl-C cancels the answer.

        Args:
            prompt: Text to continue, or OpenAI's messages for the chat template.
            write: Callback in this thread with a piece of text, and True for a thought.

        Raises:
            ContextError: The prompt alone is longer than the context.
            MoeoffError: The request failed. The model stays usable.
        """
        server, is_text = self.server, isinstance(prompt, str)
        route = "/completion" if is_text else "/v1/chat/completions"
        request = _REQUEST | self.settings | {"prompt" if is_text else "messages": prompt}
        self._cancelled.clear()
        events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        before, started = server.stats(), time.perf_counter()
        texts: dict[bool, list[str]] = {False: [], True: []}
        seen = _Progress()
        # `except KeyboardInterrupt` could lose a piece that is taken, but not written.
        with handling(signal.SIGINT, lambda _signum, _frame: self.cancel()):
            reader = threading.Thread(target=self._read, args=(route, request, events), daemon=True)
            reader.start()
            line, computed = ProgressLine(slows=True), server.engine.prompt_tokens
            try:
                while True:
                    try:
                        timeout = None if seen.completion_tokens else _PROGRESS_INTERVAL
                        event = events.get(timeout=timeout)
                    except queue.Empty:
                        line.update(
                            "prompt",
                            server.engine.prompt_tokens - computed,
                            seen.prompt_tokens - seen.reused_tokens,
                        )
                        continue
                    if event is None or isinstance(event, BaseException):
                        break
                    seen.update(event)
                    for is_thought, text in _pieces(event):
                        line.clear()
                        texts[is_thought].append(text)
                        write(text, is_thought)
            except BaseException:  # e.g. stdout is a closed pipe
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
        if stats.gen_tokens:  # the user's view: sampling and writing are part of the time
            gen_seconds = ended - started - stats.prompt_seconds
            gen_tps = (stats.gen_tokens - stats.drafts_rejected) / gen_seconds
            stats = replace(stats, gen_tps=gen_tps)
        self.n_tokens = seen.prompt_tokens + seen.completion_tokens
        text, thought = ("".join(texts[is_thought]) for is_thought in (False, True))
        seconds, n_ctx = ended - started, server.n_ctx_each
        return Completion(text, thought, **asdict(seen), n_ctx=n_ctx, stats=stats, seconds=seconds)

    def _read(self, route: str, request: dict[str, Any], events: queue.SimpleQueue[Any]) -> None:
        """Put the server's events, or an exception, and then None."""
        try:
            with contextlib.closing(_Connection(self.server)) as connection:
                self._socket = connection.socket
                if self._cancelled.is_set():  # before the socket existed
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
            self.server.wait(_EXIT_WAIT)
        except MoeoffError as reason:  # the server has ended
            return reason
        return MoeoffError(f"the answer broke off: {error}")

    def _fetch(self, route: str, request: dict[str, Any] | None = None) -> str:
        with contextlib.closing(_Connection(self.server)) as connection:
            return connection.ask(route, request).read().decode()

    def _wait_until_idle(self) -> None:
        """Wait until a cancelled answer has ended, and its statistics are complete."""
        while re.search(
            r"^llamacpp:requests_processing [1-9]", self._fetch("/metrics"), re.MULTILINE
        ):
            time.sleep(_POLL)


def _error(error: Mapping[str, Any]) -> MoeoffError:
    if error.get("type") == "exceed_context_size_error":
        return ContextError(error["n_prompt_tokens"], error["n_ctx"])
    return MoeoffError(str(error["message"]).strip())


def _pieces(event: Mapping[str, Any]) -> list[tuple[bool, str]]:
    """Return (is_thought, text) of each text in an event."""
    parts = [(False, event.get("content"))]
    for choice in event.get("choices", ()):
        parts += [
            (True, choice["delta"].get("reasoning_content")),
            (False, choice["delta"].get("content")),
        ]
    return [(is_thought, text) for is_thought, text in parts if text]
