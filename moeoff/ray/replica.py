"""`Replica`: one server of the model, in a process beside the actor, which passes requests on to it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import ray
from ray import serve

from ..console import remark
from ..errors import ModelError, MoeoffError
from ..server.process import ServerProcess
from .forwarding import Forwarded, Head, Taken, passed_on
from .report import report_of

__all__ = ["Replica", "ServerLost"]

_STREAMS = ("text/event-stream", "application/x-ndjson")
_HEALTHY = 10.0  # seconds in which a server that computes still says that it is there
_NO_TIMEOUT = aiohttp.ClientTimeout(total=None, sock_connect=30)


class ServerLost(MoeoffError):
    """The server's process has ended before its answer had."""


class Replica:
    """An actor of Ray Serve.

    Raises:
        MoeoffError: the model is not on this machine, or does not fit.
    """

    def __init__(self, model: str, options: dict[str, Any]):
        if not os.path.isfile(model):
            raise ModelError(
                f"{model} is not on {socket.gethostname()}: copy it there, or start Ray on the machines that have it "
                "with --labels and name that label in deployment(labels=...)"
            )
        self._name = serve.get_replica_context().replica_id.unique_id
        self._node = ray.get_runtime_context().get_node_id()
        self._key = options.get("api_key")
        self._session: aiohttp.ClientSession | None = None
        self._ending = False
        self._server = ServerProcess(model, **options)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """A server that has ended takes the actor with it: Ray sees that at once, and starts another."""
        self._server.wait()
        if not self._ending:
            remark(f"the server of replica {self._name} has {self._server.ending()}")
            os._exit(1)

    def __del__(self) -> None:
        self._ending = True
        if hasattr(self, "_server"):
            self._server.stop()

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:  # of the loop that runs
            connector = aiohttp.UnixConnector(self._server.socket, limit=0, force_close=True)
            self._session = aiohttp.ClientSession("http://server", connector=connector, timeout=_NO_TIMEOUT, auto_decompress=False)
        return self._session

    async def answer(self, request: Forwarded) -> AsyncIterator[Taken | Head | bytes]:
        """`Taken`, `Head`, and the body as it comes.

        Raises:
            ServerLost: in the middle.
        """
        yield Taken(self._name)
        try:
            async with self._client().request(request.method, request.path, headers=request.headers, data=request.body or None) as response:
                yield Head(response.status, passed_on(response.headers.items()), response.content_type in _STREAMS)
                async for piece in response.content.iter_any():
                    yield piece
        except (aiohttp.ClientError, OSError) as error:
            raise ServerLost(f"the server of replica {self._name} has gone ({type(error).__name__})") from None

    async def check_health(self) -> None:
        async with self._client().get("/health", timeout=aiohttp.ClientTimeout(total=_HEALTHY)) as response:
            response.raise_for_status()

    async def record_routing_stats(self) -> dict[str, Any]:
        """Reaches the routers with what Ray tells them of replicas."""
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        async with self._client().get("/metrics", headers=headers) as response:
            response.raise_for_status()
            return {"replica": self._name, "node": self._node, "pid": os.getpid(), "server_pid": self._server.pid} | report_of(await response.text())
