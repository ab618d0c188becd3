"""`Router`: one address for the models of a machine, of which one at a time is open.

Each model is served by a `ServerProcess`, which answers over a Unix socket. The router reads a
request's head and body, opens the model that it names, and from then on copies bytes. Keys are
checked by the open server: before the router acts on a request for another model, that server is
asked for its properties with the request's own headers. The router itself checks which site a
request comes from, because servers do not on Unix sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from ..errors import ModelError, MoeoffError, OptionError
from ..gguf.local_models import LocalModel
from ..gguf.model_index import ModelIndex
from .process import ServerProcess
from .server import request_line

_HEAD = 64 << 10  # bytes of a request's head, at most
_BODY = 64 << 20  # bytes of a request's body, at most: it is held until its model is open
_LARGE = 1 << 20  # bytes of a body, above which few are held at a time
_READING = 300.0  # seconds in which a head, and then a body, must have come
_PIECE = 64 << 10  # bytes that are copied at a time
_WATCHED = 0.2  # seconds between looks for a change of which the page is told
_ALIVE = 15.0  # seconds after which a page that is told nothing gets a comment
_ONE_HOP = {"connection", "keep-alive", "expect", "transfer-encoding", "content-length"}
_ASKED_WITH = {
    "host",
    "origin",
    "authorization",
    "x-api-key",
}  # by which a server decides who may ask
_Reader = asyncio.StreamReader
_LISTS = ("/v1/models", "/models", "/api/tags")


class _RequestError(Exception):
    """A request that is answered here, with this status."""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


@dataclass
class _Request:
    """One HTTP request. Header names are in lower case."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes = b""

    @cached_property
    def path(self) -> str:
        return urlsplit(self.target).path

    @cached_property
    def fields(self) -> dict[str, Any]:
        """What its body says, if that is a JSON object."""
        try:
            fields = json.loads(self.body)
        except (ValueError, RecursionError):  # the server says what is wrong
            return {}
        return fields if isinstance(fields, dict) else {}

    @property
    def model(self) -> str:
        """The name of the model that it wants; empty: any."""
        query = parse_qs(urlsplit(self.target).query)
        named = self.fields.get("model") or self.fields.get("name") or query.get("model", [""])[0]
        return named if isinstance(named, str) else ""

    def header(self, name: str) -> str:
        return next((value for key, value in self.headers if key == name), "")

    @property
    def length(self) -> int | None:
        """Bytes of its body, as its head says; None: the body comes in chunks.

        Raises:
            ValueError: It is not a number.
        """
        if self.header("transfer-encoding"):
            return None
        return int(self.header("content-length") or 0)

    def passed_on(self) -> bytes:
        """It as the server gets it: with its whole body, and a connection of its own."""
        headers = [(key, value) for key, value in self.headers if key not in _ONE_HOP]
        headers += [("connection", "close")]
        if self.body or self.method not in ("GET", "HEAD"):
            headers.append(("content-length", str(len(self.body))))
        lines = [
            f"{self.method} {self.target} HTTP/1.1",
            *(f"{key}: {value}" for key, value in headers),
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + self.body


class _Client:
    """The connection of whoever has sent a request.

    Attributes:
        status: Of the response, once its head is written; else 0.
    """

    def __init__(self, writer: asyncio.StreamWriter):
        self._writer, self.status = writer, 0

    def write(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 ") and (self.status or 100) < 200:
            self.status = int(data[9:12])
        self._writer.write(data)

    async def drain(self) -> None:
        await self._writer.drain()


@dataclass(frozen=True)
class _Response:
    """A server's whole response."""

    raw: bytes

    @property
    def status(self) -> int:
        return int(self.raw[9:12] or b"502")

    def with_fields(self, change: Callable[[dict[str, Any]], None]) -> bytes:
        """Return it with its JSON object changed."""
        head, _, body = self.raw.partition(b"\r\n\r\n")
        fields = json.loads(body)
        change(fields)
        body = json.dumps(fields).encode()
        length, lines = b"content-length:", head.split(b"\r\n")
        kept = [line for line in lines if not line.lower().startswith(length)]
        return b"\r\n".join([*kept, length + str(len(body)).encode(), b"", body])


@dataclass
class _Open:
    """The model that is open, and how many requests it answers."""

    model: LocalModel
    process: ServerProcess
    n_answers: int = 0
    idle: asyncio.Event = field(default_factory=asyncio.Event)


class Router:
    """Serves models by their names, one at a time.

    Args:
        models: Models that may be asked for; the first is opened at the start.
        options: Options of `Server` for each of them, without alias.
        sites: Names that requests may give as Host or Origin, as of `ServerOptions.sites`.
        origins: Web pages that may ask, as of --cors.
        on_remark: Called with a sentence whenever a model is opened.
        on_request: Called with a line about each request that has been answered.
    """

    def __init__(
        self,
        models: Sequence[LocalModel],
        options: dict[str, Any],
        sites: Sequence[str] | None = (),
        origins: Sequence[str] = (),
        on_remark: Callable[[str], None] = lambda _text: None,
        on_request: Callable[[str], None] | None = None,
    ):
        self._models: dict[str, LocalModel] = {}
        for model in models:
            self._models.setdefault(model.name, model)
        self._options, self._on_remark, self._on_request = options, on_remark, on_request
        self._open: _Open | None = None
        self._listeners: list[asyncio.Server] = []
        self._opening = ""  # name of the model that is being opened
        self._sites, self._origins = sites, origins
        self._large = asyncio.Semaphore(4)
        # who waits for another model holds it, and those that come later wait, too
        self._turn = asyncio.Lock()

    # --- models ---

    async def start(self, n_tries: int = 1) -> None:
        """Open the first model, or of the first ones the first that can be opened.

        Raises:
            MoeoffError: None can be opened; about the last of them.
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
        """End the open model's server, and what it answers."""
        server, self._open = self._open, None
        if server is not None:
            await asyncio.to_thread(server.process.stop)

    async def _switch(self, model: LocalModel) -> None:
        await self.stop()
        self._opening = model.name
        self._on_remark(f"opening {model.name}")
        # a comma separates names
        options = self._options | {"alias": model.name.replace(",", " ")}
        try:
            process = await asyncio.to_thread(ServerProcess, model.path, **options)
        finally:
            self._opening = ""
        self._open = _Open(model, process)

    @contextlib.asynccontextmanager
    async def _server(self, model: LocalModel | None) -> AsyncIterator[_Open]:
        """Yield the open server, of this model if one is given, and count an answer of it."""
        async with self._turn:
            server = self._open
            if server is not None and server.process.popen.poll() is not None:
                await self.stop()
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
        """Return True if it is the model's name, in any case, and with or without Ollama's tag."""
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
            hosts: Separated by commas; a path that ends in .sock is a Unix socket's.

        Raises:
            OptionError: One cannot be listened on.
        """
        urls = []
        for host in filter(None, (part.strip() for part in hosts.split(","))):
            try:
                if host.endswith(".sock"):
                    server = await asyncio.start_unix_server(self._handle, host, limit=_HEAD)
                    urls.append(f"unix://{host}")
                else:
                    server = await asyncio.start_server(self._handle, host, port, limit=_HEAD)
                    port = server.sockets[0].getsockname()[1]
                    name = f"[{host}]" if ":" in host else host
                    urls.append(f"http://{name}:{port}")
            except OSError as error:
                why, hint = error.strerror or str(error), {"host": ..., "port": ...}
                raise OptionError(f"cannot listen on {host}:{port}: {why}", hint=hint) from None
            self._listeners.append(server)
        return urls

    async def _handle(self, reader: _Reader, writer: asyncio.StreamWriter) -> None:
        """One connection, which has one request."""
        method, path, client = "", "", _Client(writer)
        gone = (
            OSError,
            asyncio.IncompleteReadError,
            asyncio.LimitOverrunError,
            asyncio.TimeoutError,
        )
        with contextlib.suppress(*gone):
            try:
                request = await asyncio.wait_for(_read_head(reader), _READING)
                method, path, length = request.method, request.path, request.length
                self._check_site(request)
                is_large = length is None or length > _LARGE
                async with self._large if is_large else contextlib.nullcontext():
                    if request.header("expect").lower() == "100-continue":
                        client.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    body = _read_chunks(reader) if length is None else reader.readexactly(length)
                    request.body = await asyncio.wait_for(body, _READING)
                    await self._answer(request, reader, client)
            except _RequestError as error:
                client.write(_response(error.status, _error(path, error)))
            await writer.drain()
            if self._on_request and (line := request_line(method, path, client.status, "")):
                self._on_request(line)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def _check_site(self, request: _Request) -> None:
        """Refuse what a web page of another site has sent, as `server_refuses_site` in C++ does.

        Raises:
            _RequestError: It has.
        """
        if self._sites is None:
            return
        why = "is refused: without an API key this server answers local sites only"
        way_out = "restart it with --api-key, or with"
        for key, value in request.headers:
            shown = value[:200]
            if key == "host" and not _is_local(value, self._sites):
                text = f"Host {shown} {why}; {way_out} --allowed-hosts {_host_name(shown)}"
                raise _RequestError(403, text)
            if key == "origin" and not {"*", value} & set(self._origins):
                _scheme, slashes, site = value.partition("://")
                if not slashes or not _is_local(site, self._sites):
                    raise _RequestError(403, f"Origin {shown} {why}; {way_out} --cors {shown}")

    async def _answer(self, request: _Request, reader: _Reader, client: _Client) -> None:
        path, is_get = request.path, request.method == "GET"
        if path in ("/health", "/v1/health"):
            client.write(self._health())
        elif is_get and path in _LISTS:
            await self._change_answer(request, client, self._list)
        elif is_get and path == "/props" and not request.model:
            await self._change_answer(request, client, self._add_role)
        elif is_get and path.startswith("/v1/models/"):
            if await self._may_ask(request, client):
                client.write(self._one(unquote(path.removeprefix("/v1/models/"))))
        elif path == "/models/sse":
            if await self._may_ask(request, client):
                await self._tell(reader, client)
        elif path in ("/models/load", "/models/unload"):
            if await self._may_ask(request, client):
                await self._load(request, client)
        else:
            await self._pass_on(request, reader, client)

    async def _pass_on(self, request: _Request, reader: _Reader, client: _Client) -> None:
        """Have the server of the model answer, and copy its response until either side ends."""
        async with self._server(None) as server:
            if not request.model or self._names(request.model, server.model):
                return await _relay(server.process.socket, request, reader, client)
        if await self._may_ask(request, client):
            async with self._server(self._find(request.model)) as server:
                await _relay(server.process.socket, request, reader, client)

    async def _may_ask(self, request: _Request, client: _Client) -> bool:
        """Return True if the open server would answer whoever sent it; else pass on why not."""
        headers = [(key, value) for key, value in request.headers if key in _ASKED_WITH]
        response = await self._fetch(_Request("GET", "/props", headers))
        if response.status != 200:
            client.write(response.raw)
        return response.status == 200

    async def _fetch(self, request: _Request) -> _Response:
        async with self._server(None) as server:
            theirs, ours = await _connect(server.process.socket)
            with contextlib.closing(ours):
                ours.write(request.passed_on())
                return _Response(await theirs.read(-1))

    async def _change_answer(
        self,
        request: _Request,
        client: _Client,
        change: Callable[[str, dict[str, Any]], None],
    ) -> None:
        """Have the open server answer, and change the JSON object of its response."""
        response = await self._fetch(request)
        if response.status == 200:
            client.write(response.with_fields(lambda fields: change(request.path, fields)))
        else:
            client.write(response.raw)

    # --- what is said of models ---

    def _list(self, path: str, fields: dict[str, Any]) -> None:
        """Put the other models into a list of the one that is open, where they stand in ours."""
        current = self._open.model if self._open else None
        for key, entry in (("models", _ollama_entry), ("data", _openai_entry)):
            if key not in fields:
                continue
            known = fields[key]
            fields[key] = []
            for model in self._models.values():
                if not os.path.exists(model.path):  # it has been deleted since
                    continue
                entries = [dict(one) for one in known] if model is current else [entry(model)]
                if path != "/api/tags":
                    for one in entries:
                        one["status"] = {"value": self._status(model)}
                fields[key] += entries

    def _status(self, model: LocalModel) -> str:
        is_current = self._open is not None and self._open.model is model
        return "loading" if self._opening == model.name else "loaded" if is_current else "unloaded"

    def _add_role(self, _path: str, fields: dict[str, Any]) -> None:
        """Properties by which llama-server's page offers the models."""
        fields |= {"role": "router", "max_instances": 1, "models_autoload": True}

    def _one(self, name: str) -> bytes:
        model = self._find(name)
        return _response(200, _openai_entry(model) | {"status": {"value": self._status(model)}})

    def _health(self) -> bytes:
        if self._opening:
            message = f"Loading model {self._opening}"
            error = {"message": message, "type": "unavailable_error", "code": 503}
            return _response(503, {"error": error})
        return _response(200, {"status": "ok"})

    async def _load(self, request: _Request, client: _Client) -> None:
        """The page's two buttons. A model stays open until another one is asked for."""
        model = self._find(request.model)
        if request.path == "/models/load":
            async with self._server(model):
                pass
        client.write(_response(200, {"success": True}))

    async def _tell(self, reader: _Reader, client: _Client) -> None:
        """Events about models that are opened and closed, until the page has gone."""
        client.write(_head(200, "text/event-stream"))
        told = {name: self._status(model) for name, model in self._models.items()}
        said = time.monotonic()
        while not reader.at_eof():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(reader.read(_PIECE), _WATCHED)
            now = {name: self._status(model) for name, model in self._models.items()}
            events = [(name, status) for name, status in now.items() if told[name] != status]
            for name, status in events:
                event = {"model": name, "event": "model_status", "data": {"status": status}}
                client.write(f"data: {json.dumps(event)}\n\n".encode())
            if not events and time.monotonic() - said > _ALIVE:
                client.write(b": \n\n")
            if events or time.monotonic() - said > _ALIVE:
                told, said = now, time.monotonic()
            await client.drain()


def with_experts(models: Sequence[LocalModel]) -> list[LocalModel]:
    """Return the models that can be served, as `moeoff models` lists them."""
    out = []
    for model in models:
        with contextlib.suppress(ModelError):
            ModelIndex.read(model.path).require_experts()
            out.append(model)
    return out


def _host_name(site: str) -> str:
    """Return the name of "name", "name:port" or "[address]:port", in lower case."""
    name, colon, port = site.lower().rpartition(":")
    is_port = colon and port.isdigit() and (":" not in name or name.endswith("]"))
    return name if is_port else site.lower()


def _is_local(site: str, allowed: Sequence[str]) -> bool:
    name = _host_name(site)
    if name == "localhost" or name in map(_host_name, allowed):
        return True
    try:
        return ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False


async def _read_head(reader: _Reader) -> _Request:
    """Read a request without its body.

    Raises:
        _RequestError: It is not HTTP, or larger than what is held here.
    """
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    except asyncio.LimitOverrunError:
        raise _RequestError(431, f"the request's head is longer than {_HEAD} bytes") from None
    first, *lines = head.split("\r\n")[:-2]
    try:
        method, target, _version = first.split(" ")
        pairs = [line.split(":", 1) for line in lines]
        headers = [(key.strip().lower(), value.strip()) for key, value in pairs]
        request = _Request(method, target, headers)
        length = request.length
    except ValueError:
        raise _RequestError(400, "the request is not HTTP/1.1") from None
    if length is not None and not 0 <= length <= _BODY:
        raise _RequestError(413, f"the request's body is longer than {_BODY} bytes")
    return request


async def _read_chunks(reader: _Reader) -> bytes:
    body = bytearray()
    while True:
        try:
            size = int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16)
        except ValueError:
            raise _RequestError(400, "the request's body is not chunked as its head says") from None
        if size < 0 or len(body) + size > _BODY:
            raise _RequestError(413, f"the request's body is longer than {_BODY} bytes")
        if size == 0:
            while await reader.readuntil(b"\r\n") != b"\r\n":  # trailers
                pass
            return bytes(body)
        body += await reader.readexactly(size)
        await reader.readexactly(2)


async def _connect(path: str) -> tuple[_Reader, asyncio.StreamWriter]:
    try:
        return await asyncio.open_unix_connection(path)
    except OSError:
        why = "the model's server has ended; the next request starts it again"
        raise _RequestError(502, why) from None


async def _relay(path: str, request: _Request, reader: _Reader, client: _Client) -> None:
    """Copy the response until it ends, or the client has gone."""
    theirs, ours = await _connect(path)
    with contextlib.closing(ours):
        ours.write(request.passed_on())

        async def copy() -> None:
            while piece := await theirs.read(_PIECE):
                client.write(piece)
                await client.drain()

        async def gone() -> None:
            while await reader.read(_PIECE):  # what comes after the request is not answered
                pass

        tasks = [asyncio.create_task(copy()), asyncio.create_task(gone())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _response(status: int, fields: dict[str, Any]) -> bytes:
    body = json.dumps(fields).encode()
    return _head(status, "application/json; charset=utf-8", len(body)) + body


def _head(status: int, kind: str, length: int | None = None) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        f"Content-Type: {kind}",
        *([] if length is None else [f"Content-Length: {length}"]),
        "Connection: close",
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def _error(path: str, error: _RequestError) -> dict[str, Any]:
    """An error in the form of the API that was asked."""
    if path.startswith("/api/"):
        return {"error": str(error)}
    kinds = {
        403: "permission_error",
        404: "not_found_error",
        500: "server_error",
        502: "unavailable_error",
    }
    of = {
        "code": error.status,
        "message": str(error),
        "type": kinds.get(error.status, "invalid_request_error"),
    }
    return {"type": "error", "error": of} if path.startswith("/v1/messages") else {"error": of}


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
