"""`Ingress`: takes requests, finds each a replica, and sees to it that every one of them gets an answer or an error.

As long as nothing has been sent to the client, a request whose replica dies is asked again of another. An answer that is not streamed is sent when it is
whole; a stream goes out event by event, and one that breaks ends with an event that says so, in the form of its API.
"""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import AsyncIterator
from typing import Any, cast

from ray.exceptions import RayError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from ..errors import MoeoffError
from .forwarding import Forwarded, Head, Taken, affinity_key, passed_on
from .report import prometheus, reports

__all__ = ["Ingress"]

_TRIES = 3
_LOST = (RayError, RayServeException, MoeoffError)  # of a replica, its actor or its machine
_SENTENCE = "the replica that was answering has died: ask again"


class Ingress:
    """An actor of Ray Serve.

    Args:
        patience: seconds in which a replica has to take a request.
    """

    def __init__(self, replicas: DeploymentHandle[Any], patience: float, api_key: str | None):
        self._replicas, self._patience, self._key = replicas.options(method_name="answer", stream=True), patience, api_key

    async def __call__(self, request: Request) -> Response:
        if request.method == "GET" and request.url.path in ("/replicas", "/metrics"):
            return self._reports(request)
        body = await request.body()
        path = request.url.path + (f"?{request.url.query}" if request.url.query else "")
        forwarded = Forwarded(request.method, path, passed_on(request.headers.items()), body, affinity_key(body) if request.method == "POST" else None)
        said = ""
        for _ in range(_TRIES):
            answer = cast(DeploymentResponseGenerator[Any], self._replicas.remote(forwarded))
            begun = False
            try:
                response = await self._begin(answer, path)
                begun = isinstance(response, StreamingResponse)
                return response
            except asyncio.TimeoutError:
                return _error(503, f"no replica has taken the request within {self._patience:g} seconds")
            except BackPressureError:
                return _error(503, "too many requests are waiting: ask again later")
            except _LOST as error:
                said = str(error).strip().splitlines()[-1]
            finally:
                if not begun:
                    answer.cancel()  # type: ignore[no-untyped-call]  # where it has ended nothing happens
        return _error(502, f"the request has been given to {_TRIES} replicas, and each of them died ({said})")

    async def _begin(self, answer: DeploymentResponseGenerator[Any], path: str) -> Response:
        """What is whole, or a stream whose first piece has come."""
        taken: Taken = await asyncio.wait_for(answer.__anext__(), self._patience)
        head: Head = await answer.__anext__()
        headers = dict(head.headers) | {"x-moeoff-replica": taken.replica}
        if not head.streamed:
            return Response(b"".join([piece async for piece in answer]), head.status, headers)
        events = _events(answer, b"\n" if path.startswith("/api/") else b"\n\n")
        first = await anext(events, b"")
        return StreamingResponse(_until_it_breaks(first, events, answer, path), head.status, headers)

    def _reports(self, request: Request) -> Response:
        if self._key and not hmac.compare_digest(request.headers.get("authorization", "").encode(), f"Bearer {self._key}".encode()):
            return _error(401, "this needs the API key")
        return JSONResponse(reports()) if request.url.path == "/replicas" else PlainTextResponse(prometheus(reports()))


async def _events(answer: DeploymentResponseGenerator[Any], end: bytes) -> AsyncIterator[bytes]:
    """Whole events: half of one could not be followed by an error."""
    rest = b""
    async for piece in answer:
        whole, found, half = (rest + piece).rpartition(end)
        if found:
            yield whole + found
        rest = half
    if rest:
        yield rest


async def _until_it_breaks(first: bytes, events: AsyncIterator[bytes], answer: DeploymentResponseGenerator[Any], path: str) -> AsyncIterator[bytes]:
    try:
        yield first
        async for event in events:
            yield event
    except _LOST:
        yield _last_event(path)
    finally:
        answer.cancel()  # type: ignore[no-untyped-call]  # the client may have gone


def _last_event(path: str) -> bytes:
    if path.startswith("/api/"):  # Ollama's
        return json.dumps({"error": _SENTENCE}).encode() + b"\n"
    if path.startswith("/v1/messages"):  # Anthropic's
        return b"event: error\ndata: " + json.dumps({"type": "error", "error": {"type": "api_error", "message": _SENTENCE}}).encode() + b"\n\n"
    return b"data: " + json.dumps({"error": {"code": 502, "message": _SENTENCE, "type": "server_error"}}).encode() + b"\n\n"


def _error(status: int, sentence: str) -> JSONResponse:
    return JSONResponse({"error": {"code": status, "message": sentence, "type": "server_error" if status >= 500 else "authentication_error"}}, status)
