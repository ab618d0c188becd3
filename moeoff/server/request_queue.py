"""The queue in front of the model's routes: API key, order of arrival, and the usage statistics in every answer.

An ASGI application around another one. It knows HTTP and the shape of OpenAI's answers, nothing of llama.cpp. One request at a
time is at the model, in order of arrival; a client that hangs up loses its turn, and its answer ends at the next token.
"""

from __future__ import annotations

import asyncio
import contextvars
import hmac
import json
import logging
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..errors import MoeoffError

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

    from ..engine.llama import Llama
    from ..engine.stats import Stats

OPEN_PATHS = ("/health",)
MODEL_PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/engines/copilot-codex/completions")

_request: contextvars.ContextVar[Request] = contextvars.ContextVar("moeoff_request")


@dataclass
class Request:
    """One request. `left` is read by the thread that computes the answer; `answer` are the tokens it draws."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    left: bool = False
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Generator[int, Sequence[int] | None, None] | None = None

    @property
    def usage(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total}


def current_request() -> Request:
    """The request that this thread works for; a fresh one outside of requests."""
    return _request.get(None) or Request()


def usage_stats(before: Stats, after: Stats) -> dict[str, Any]:
    """What one answer took, from the statistics before and after it."""
    hits, misses = after.demand_hits - before.demand_hits, after.demand_misses - before.demand_misses
    return {
        "hit_rate": round(hits / (hits + misses), 6) if hits + misses else 0.0,
        "hits": hits,
        "misses": misses,
        "bytes_read": after.bytes_read - before.bytes_read,
        "stall_seconds": round(after.stall_seconds - before.stall_seconds, 6),
        "tier": after.tier,
        "served_low": after.served_low - before.served_low,
        "skipped": after.skipped - before.skipped,
        "max_loss": after.max_loss,
        "estimated_loss": after.estimated_loss,
    }


def error_body(message: str, status: int) -> dict[str, Any]:
    """An error as OpenAI's clients expect it."""
    return {"error": {"message": message, "type": "invalid_request_error" if status < 500 else "server_error", "param": None, "code": None}}


async def _refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps(error_body(message, status)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class RequestQueue:
    def __init__(self, app: ASGIApp, llm: Llama, api_key: str | None):
        self.app, self.llm = app, llm
        self._key = api_key.encode() if api_key else None
        self._turn = asyncio.Lock()  # lets waiters in by order of arrival
        self._running: Request | None = None
        self._closing = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self.requests = self.waiting = self.prompt_tokens = self.completion_tokens = 0

    def close(self) -> None:
        """Ends the answer at the model and refuses the requests that wait. Called by a signal handler, which must take no locks."""
        self._closing = True
        if self._running is not None and self._loop is not None:  # the loop is known before the request
            self._running.left = True
            self._loop.call_soon_threadsafe(self._drop, self._running)

    def _drop(self, request: Request) -> None:
        """The client has gone: not even the prompt of its answer is computed to the end."""
        request.left = True
        if self._running is request:
            self.llm.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
        elif scope["path"] not in OPEN_PATHS and not self._allowed(scope):
            await _refuse(send, 401, "wrong API key: give the one the server was started with, as a bearer token")
        elif scope["method"] == "POST" and scope["path"] in MODEL_PATHS:
            await self._queue(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        if self._key is None:
            return True
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)

    async def _queue(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        request = Request()
        watcher = asyncio.create_task(self._watch(receive, request))
        self.waiting += 1
        try:
            await self._turn.acquire()
        except BaseException:
            watcher.cancel()
            raise
        finally:
            self.waiting -= 1
        try:
            if self._closing:
                await _refuse(send, 503, "the server is shutting down")
            elif not request.left:
                await self._answer(scope, bytes(body), request, send)
        finally:
            watcher.cancel()
            self._turn.release()

    async def _watch(self, receive: Receive, request: Request) -> None:
        """Notices that the client has hung up, even while it waits for its turn."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._drop(request)
        request.gone.set()

    async def _answer(self, scope: Scope, body: bytes, request: Request, send: Send) -> None:
        self._loop, self._running = asyncio.get_running_loop(), request
        _request.set(request)  # of this request's task, and of the threads it sends work to
        body, wants_usage = _prepare(body)
        response = ResponseRewriter(send, request, self.llm, wants_usage)
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            if pending:
                return pending.pop()
            await request.gone.wait()
            return {"type": "http.disconnect"}

        try:
            await self.app(scope, replay, response.send)
            await response.finish()
        except Exception as error:
            if not request.left:  # a client that left hears nothing more
                await response.fail(_root_cause(error))
        finally:
            self._running = None
            if request.answer is not None:
                request.answer.close()  # one that was dropped between two tokens would look like an answer in progress
            self.requests += 1
            self.prompt_tokens += request.prompt_tokens
            self.completion_tokens += request.completion_tokens


def _prepare(body: bytes) -> tuple[bytes, bool]:
    """The request with OpenAI's meaning of what is left out, and whether the client wants a last chunk with the usage
    (stream_options.include_usage)."""
    try:
        fields = json.loads(body)
        options = fields.get("stream_options")
    except (ValueError, AttributeError):
        return body, False  # the route will say what is wrong with it
    fields.setdefault("repeat_penalty", 1.0)  # llama_cpp.server's 1.1 spoils sums and code; other servers use none
    return json.dumps(fields).encode(), isinstance(options, dict) and bool(options.get("include_usage"))


def _root_cause(error: BaseException) -> BaseException:
    """The first error of a group: streams run in task groups, which wrap what they raise."""
    while exceptions := getattr(error, "exceptions", None):
        error = exceptions[0]
    return error


class ResponseRewriter:
    """Passes a response on and puts usage and statistics into its JSON, or into the last chunk of a stream."""

    def __init__(self, send: Send, request: Request, llm: Llama, wants_usage: bool):
        self._send, self._request, self._llm, self._wants_usage = send, request, llm, wants_usage
        self._before = llm.stats()
        self._start: Message = {}  # until the application has begun to answer
        self._kind = b""
        self._body = bytearray()
        self._ending = False
        self._last: dict[str, Any] | None = None  # the chunk that ended the answer

    def _usage_stats(self) -> dict[str, Any]:
        return usage_stats(self._before, self._llm.stats())

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            self._kind = dict(message["headers"]).get(b"content-type", b"").partition(b";")[0]
            if not self._is_json:
                await self._send(message)
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._is_json:
            self._body += message.get("body", b"")
            if not message.get("more_body"):
                await self._send_json()
        elif self._kind == b"text/event-stream":
            event = self._event(message.get("body", b""))
            self._ending = not message.get("more_body")  # held back: what went wrong may be known only after it
            if event:
                await self._send({**message, "body": event, "more_body": True})
        else:
            await self._send(message)

    @property
    def _is_json(self) -> bool:
        return self._kind == b"application/json" and self._start["status"] == 200

    async def _send_json(self) -> None:
        answer = json.loads(self._body)
        if isinstance(answer, dict):
            answer["moeoff"] = self._usage_stats()
        body = json.dumps(answer).encode()
        headers = [(name, value) for name, value in self._start["headers"] if name != b"content-length"]
        await self._send({**self._start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self._send({"type": "http.response.body", "body": body})

    def _event(self, event: bytes) -> bytes:
        """One server-sent event, which sse_starlette sends as one piece."""
        data = event.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            if self._wants_usage and self._last is not None:
                return _sse({**self._last, "choices": [], "usage": self._request.usage, "moeoff": self._usage_stats()}) + event
            return event
        if not data.startswith(b"{") or b'"finish_reason": null' in data:
            return event
        chunk = json.loads(data)
        if not any(choice.get("finish_reason") for choice in chunk.get("choices", ())):
            return event
        self._last = chunk
        if self._wants_usage:  # the chunk after this one carries it
            return event
        return _sse({**chunk, "usage": self._request.usage, "moeoff": self._usage_stats()})

    async def finish(self) -> None:
        if self._ending:
            await self._send({"type": "http.response.body", "body": b""})

    async def fail(self, error: BaseException) -> None:
        """Tells the client, in the middle of a stream if need be, and the log."""
        detail = str(getattr(error, "detail", None) or error) or type(error).__name__
        expected = isinstance(error, (MoeoffError, ValueError)) or hasattr(error, "detail")
        logging.getLogger("uvicorn.error").error("answer failed: %s", detail, exc_info=None if expected else error)
        if not self._start:
            await _refuse(self._send, 500, detail)
        elif self._kind == b"text/event-stream":
            await self._send({"type": "http.response.body", "body": _sse(error_body(detail, 500))})
        else:
            raise error


def _sse(data: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(data).encode() + b"\n\n"
