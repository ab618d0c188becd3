"""`ModelRouter`: one address for several models, of which one at a time is open.

Each model runs in a `ServerProcess` on a Unix socket. The router opens the model that a
request names, and forwards the request. Before it acts on a request for another model,
it asks the open server for its properties with the request's key and site, which checks
access.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from yarl import URL

from ..errors import ModelError, MoeoffError, OptionError
from ..gguf.local_models import LocalModel
from ..gguf.model_index import ModelIndex
from .process import ServerProcess
from .proxy import forwarded, open_session
from .server import request_line

_BODY = 64 << 20  # most bytes of a request's body, which is held until its model is open
_LARGE = 1 << 20  # bytes above which few bodies are held at a time
_READING = 300.0  # time limit of receiving a body in seconds
_POLL = 0.2  # seconds between checks for changes to report
_ALIVE = 15.0  # seconds without events until a keep-alive comment
# headers that authenticate a request
_ASKED_WITH = ("Host", "Origin", "Authorization", "X-Api-Key")
_LISTS = ("/v1/models", "/models", "/api/tags")
_BROKEN = (aiohttp.ClientError, OSError)  # broken connection to either side


class _RequestError(Exception):
    """A request that the router answers with this error status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass
class _Open:
    """The open model and its number of running requests."""

    model: LocalModel
    process: ServerProcess
    session: aiohttp.ClientSession
    n_answers: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class ModelRouter:
    """A server of several models, one at a time.

    Args:
        models: Models by name; the first is opened at the start.
        options: Options of `Server` for each model, without alias.
        on_remark: Callback with a sentence whenever a model is opened.
        on_request: Callback with a line about each answered request.
    """

    def __init__(
        self,
        models: Sequence[LocalModel],
        options: dict[str, Any],
        on_remark: Callable[[str], None] = lambda _text: None,
        on_request: Callable[[str], None] | None = None,
    ):
        self._models: dict[str, LocalModel] = {}
        for model in models:
            self._models.setdefault(model.name, model)
        self._options, self._on_remark, self._on_request = options, on_remark, on_request
        self._open: _Open | None = None
        self._opening = ""  # model that is being opened
        self._runner: web.AppRunner | None = None
        self._large = asyncio.Semaphore(4)
        # a waiter for another model holds the lock, so that later requests wait, too
        self._turn = asyncio.Lock()

    # --- models ---

    async def start(self, n_tries: int = 1) -> None:
        """Open the first model that can be opened.

        Raises:
            MoeoffError: None can be opened; about the last one.
        """
        async with self._turn:
            tried = list(self._models.values())[:n_tries]
            for model in tried:
                try:
                    return await self._switch(model)
                except MoeoffError as error:
                    if model is tried[-1]:
                        raise
                    self._on_remark(f"{model.name} cannot be opened: {error}")

    async def stop(self) -> None:
        """End the open model's server, its answers, and the router's connections."""
        await self._close()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _close(self) -> None:
        server, self._open = self._open, None
        if server is not None:
            await asyncio.to_thread(server.process.stop)
            await server.session.close()

    async def _switch(self, model: LocalModel) -> None:
        await self._close()
        self._opening = model.name
        self._on_remark(f"opening {model.name}")
        # a comma separates names
        options = self._options | {"alias": model.name.replace(",", " "), "proxied": True}
        try:
            process = await asyncio.to_thread(ServerProcess, model.path, **options)
        finally:
            self._opening = ""
        self._open = _Open(model, process, open_session(process.socket))

    @contextlib.asynccontextmanager
    async def _server(self, model: LocalModel | None = None) -> AsyncIterator[_Open]:
        """Yield the open server, of this model if given, and count the answer."""
        async with self._turn:
            server = self._open
            if server is not None and server.process.popen.poll() is not None:
                await self._close()
            before = server.model if server is not None else next(iter(self._models.values()))
            model = model or before
            if self._open is None or self._open.model is not model:
                while self._open is not None and self._open.n_answers:
                    self._open.idle.clear()
                    await self._open.idle.wait()
                try:
                    await self._switch(model)
                except MoeoffError as error:
                    with contextlib.suppress(MoeoffError):
                        await self._switch(before)
                    raise _RequestError(500, f"{model.name} cannot be opened: {error}") from None
            server = self._open
            assert server is not None
            server.n_answers += 1
        try:
            yield server
        finally:
            server.n_answers -= 1
            if not server.n_answers:
                server.idle.set()

    @staticmethod
    def _names(name: str, model: LocalModel) -> bool:
        """Return True if the name is the model's, ignoring case and Ollama's tag."""
        return name.lower().removesuffix(":latest") == model.name.lower().removesuffix(":latest")

    def _find(self, name: str) -> LocalModel:
        """Return the model of this name.

        Raises:
            _RequestError: There is none.
        """
        for model in self._models.values():
            if self._names(name, model):
                return model
        raise _RequestError(404, f"model '{name}' not found")

    # --- requests ---

    async def listen(self, hosts: str, port: int) -> list[str]:
        """Listen on addresses, and return their URLs.

        Args:
            hosts: Comma-separated hosts, or paths of Unix sockets that end in .sock.

        Raises:
            OptionError: An address is unavailable.
        """
        log = logging.getLogger("moeoff.router")
        log.addHandler(logging.NullHandler())  # do not log invalid HTTP, answered with 400
        log.propagate = False
        app = web.Application(client_max_size=_BODY)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, logger=log, handler_cancellation=True)
        await self._runner.setup()
        urls = []
        for host in filter(None, (part.strip() for part in hosts.split(","))):
            is_socket = host.endswith(".sock")
            site: web.BaseSite = (
                web.UnixSite(self._runner, host)
                if is_socket
                else web.TCPSite(self._runner, host, port)
            )
            try:
                await site.start()
            except OSError as error:
                why, hint = error.strerror or str(error), {"host": ..., "port": ...}
                raise OptionError(f"cannot listen on {host}:{port}: {why}", hint=hint) from None
            if is_socket:
                urls.append(f"unix://{host}")
            else:
                port = self._runner.addresses[-1][1]
                urls.append(f"http://{f'[{host}]' if ':' in host else host}:{port}")
        return urls

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        try:
            response = await self._read_and_answer(request)
        except _RequestError as error:
            response = _error(request.path, error.status, str(error))
        except web.HTTPException as error:  # the body is too long
            response = _error(request.path, error.status, error.text or error.reason)
        except asyncio.TimeoutError:
            response = _error(request.path, 408, "the request's body does not come")
        except _BROKEN:
            why = "the model's server has ended; the next request starts it again"
            response = _error(request.path, 502, why)
        if self._on_request:
            line = request_line(request.method, request.path, response.status, "")
            if line:
                self._on_request(line)
        return response

    async def _read_and_answer(self, request: web.Request) -> web.StreamResponse:
        length = request.content_length
        if length is not None and length > _BODY:
            raise web.HTTPRequestEntityTooLarge(_BODY, length)
        is_large = request.can_read_body and (length is None or length > _LARGE)
        async with self._large if is_large else contextlib.nullcontext():
            await asyncio.wait_for(request.read(), _READING)
            return await self._answer(request)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        path, is_get, name = request.path, request.method == "GET", await _model_of(request)
        if path in ("/health", "/v1/health"):
            return self._health()
        if is_get and path in _LISTS:
            return await self._changed(request, self._list)
        if is_get and path == "/props" and not name:
            return await self._changed(request, self._add_role)
        is_one = is_get and path.startswith("/v1/models/")
        if is_one or path in ("/models/sse", "/models/load", "/models/unload"):
            if refusal := await self._refusal(request):
                return refusal
            if path == "/models/sse":
                return await self._tell(request)
            if is_one:
                model = self._find(path.removeprefix("/v1/models/"))
                return web.json_response(_openai_entry(model) | self._status_field(model))
            return await self._load(path, self._find(name))
        async with self._server() as server:
            model = server.model
        if name and not self._names(name, model):
            if refusal := await self._refusal(request):
                return refusal
            model = self._find(name)
        return await self._pass_on(request, model if name else None)

    async def _pass_on(self, request: web.Request, model: LocalModel | None) -> web.StreamResponse:
        """Forward a request to a model's server; None: the open one's."""
        async with self._server(model) as server:
            with contextlib.suppress(*_BROKEN):
                return await _relay(server, request)
            await asyncio.to_thread(server.process.stop)  # the process has ended or is ending
        async with self._server(model) as server:
            return await _relay(server, request)

    async def _refusal(self, request: web.Request) -> web.Response | None:
        """Return the open server's refusal of the sender, or None."""
        headers = {key: request.headers[key] for key in _ASKED_WITH if key in request.headers}
        response = await self._fetch("/props", headers)
        return None if response.status == 200 else response

    async def _fetch(self, path: str, headers: Mapping[str, str]) -> web.Response:
        async with self._server() as server, _asked(server, "GET", path, headers) as theirs:
            body = await theirs.read()
            return web.Response(
                body=body, status=theirs.status, headers=forwarded(theirs.headers.items())
            )

    async def _changed(
        self, request: web.Request, change: Callable[[str, dict[str, Any]], None]
    ) -> web.Response:
        """Forward a request, and change the JSON object of the response."""
        response = await self._fetch(request.raw_path, request.headers)
        if response.status == 200:
            assert isinstance(response.body, bytes)
            fields = json.loads(response.body)
            change(request.path, fields)
            response.body = json.dumps(fields).encode()
        return response

    # --- what is said of models ---

    def _list(self, path: str, fields: dict[str, Any]) -> None:
        """Add the other models to a list by the open server."""
        current = self._open.model if self._open else None
        for key, entry in (("models", _ollama_entry), ("data", _openai_entry)):
            if key not in fields:
                continue
            known = fields[key]
            fields[key] = []
            for model in self._models.values():
                if not os.path.exists(model.path):  # deleted meanwhile
                    continue
                entries = [dict(one) for one in known] if model is current else [entry(model)]
                if path != "/api/tags":
                    for one in entries:
                        one |= self._status_field(model)
                fields[key] += entries

    def _status(self, model: LocalModel) -> str:
        is_current = self._open is not None and self._open.model is model
        return "loading" if self._opening == model.name else "loaded" if is_current else "unloaded"

    def _status_field(self, model: LocalModel) -> dict[str, Any]:
        return {"status": {"value": self._status(model)}}

    def _add_role(self, _path: str, fields: dict[str, Any]) -> None:
        """Set the properties by which llama-server's page offers the models."""
        fields |= {"role": "router", "max_instances": 1, "models_autoload": True}

    def _health(self) -> web.Response:
        if self._opening:
            return _error("", 503, f"Loading model {self._opening}")
        return web.json_response({"status": "ok"})

    async def _load(self, path: str, model: LocalModel) -> web.Response:
        """Handle the page's buttons. A model stays open until another is needed."""
        if path == "/models/load":
            async with self._server(model):
                pass
        return web.json_response({"success": True})

    async def _tell(self, request: web.Request) -> web.StreamResponse:
        """Send events about opened and closed models until the page disconnects."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        told = {name: self._status(model) for name, model in self._models.items()}
        said = time.monotonic()
        with contextlib.suppress(*_BROKEN):
            while True:
                await asyncio.sleep(_POLL)
                now = {name: self._status(model) for name, model in self._models.items()}
                text = ""
                for name, status in now.items():
                    if told[name] != status:
                        event = {"model": name, "event": "model_status", "data": {"status": status}}
                        text += f"data: {json.dumps(event)}\n\n"
                if not text and time.monotonic() - said > _ALIVE:
                    text = ": \n\n"
                if text:
                    await response.write(text.encode())
                    told, said = now, time.monotonic()
        return response


def with_experts(models: Sequence[LocalModel]) -> list[LocalModel]:
    """Return the models with experts, as `moeoff models` lists them."""
    out = []
    for model in models:
        with contextlib.suppress(ModelError):
            ModelIndex.read(model.path).require_experts()
            out.append(model)
    return out


async def _model_of(request: web.Request) -> str:
    """Return the model name in body or query, or "" for any."""
    try:
        fields = json.loads(await request.read())
    except (ValueError, RecursionError):  # the server reports the error
        fields = None
    fields = fields if isinstance(fields, dict) else {}
    named = fields.get("model") or fields.get("name") or request.query.get("model", "")
    return named if isinstance(named, str) else ""


def _asked(
    server: _Open, method: str, path: str, headers: Any, body: bytes | None = None
) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
    """Send a request to a server.

    Args:
        path: Path with query, as the client has sent it.
    """
    url = URL(f"http://server{path}", encoded=True)
    kept = forwarded(headers.items())
    return server.session.request(
        method, url, headers=kept, data=body or None, allow_redirects=False
    )


async def _relay(server: _Open, request: web.Request) -> web.StreamResponse:
    """Copy a server's response until either side ends."""
    body = await request.read()
    path = request.raw_path
    async with _asked(server, request.method, path, request.headers, body) as theirs:
        response = web.StreamResponse(
            status=theirs.status, reason=theirs.reason, headers=forwarded(theirs.headers.items())
        )
        try:
            await response.prepare(request)
            async for piece in theirs.content.iter_any():
                await response.write(piece)
            await response.write_eof()
        except _BROKEN:  # the client notices the truncated response
            if request.transport is not None:
                request.transport.close()
        return response


def _error(path: str, status: int, message: str) -> web.Response:
    """Return an error in the format of the requested API."""
    kinds = {
        403: "permission_error",
        404: "not_found_error",
        500: "server_error",
        502: "unavailable_error",
        503: "unavailable_error",
    }
    kind = kinds.get(status, "invalid_request_error")
    error: Any = {"code": status, "message": message, "type": kind}
    if path.startswith("/api/"):
        error = message
    fields = {"type": "error"} if path.startswith("/v1/messages") else {}
    return web.json_response(fields | {"error": error}, status=status)


def _openai_entry(model: LocalModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": int(os.path.getmtime(model.path)),
        "owned_by": "llamacpp",
    }


def _ollama_entry(model: LocalModel) -> dict[str, Any]:
    modified = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(os.path.getmtime(model.path)))
    return {
        "name": model.name,
        "model": model.name,
        "modified_at": modified,
        "size": model.nbytes,
        "details": {"format": "gguf"},
    }
