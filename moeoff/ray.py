"""A Ray Serve application with a replica on each machine (`pip install 'moeoff[ray]'`).

A replica runs a `moeoff.Server` in a process of its own. Ray's `ConsistentHashRouter`
keeps a conversation, which the ingress identifies, on the replica that has its context
and experts in memory. Placement, scaling, restarts, queues and metrics are Ray Serve's.

The ingress retries requests whose replica dies before anything was sent to the client.
Whole answers are sent at once, streams event by event; a stream that breaks ends with
an error event in the form of its API.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import hashlib
import json
import os
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from .errors import ModelError, MoeoffError, OptionError
from .server.process import ServerProcess
from .server.proxy import forwarded, open_session
from .system.console import note
from .system.memory import MIB, format_size, parse_size

try:
    import aiohttp
    import ray
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import BackPressureError, RayServeException
    from ray.serve.handle import DeploymentHandle
    from ray.serve.metrics import Gauge
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response, StreamingResponse
except ImportError:
    raise OptionError("moeoff.ray needs Ray Serve: pip install 'moeoff[ray]'") from None

# unanswered health checks until the server is killed; Ray kills the actor alone after
# three
_MAX_MISSED = 2
_HEALTH_TIMEOUT = aiohttp.ClientTimeout(total=10)  # seconds
_ACTOR = 256 * MIB  # memory of a replica's actor without the server
_TRIES = 3
_BEGINNING = 256  # characters of a prompt that identify its conversation
# headers that Ray and the replica's client write themselves
_REWRITTEN = {"host", "content-encoding", "accept-encoding", "server", "date"}
_SAMPLE = re.compile(r"^([\w:]+) (\S+)$", re.MULTILINE)  # of /metrics, without labels
_FAILURES = (RayError, RayServeException, MoeoffError)  # the replica, its server or machine is gone


def deployment(
    model: str | os.PathLike[str],
    *,
    memory: str | int,
    num_replicas: int | None = None,
    labels: Mapping[str, str] | None = None,
    parallel: int = 4,
    ray_options: Mapping[str, Any] | None = None,
    name: str = "moeoff",
    **options: Any,
) -> serve.Application:
    """Return an application for `ray.serve.run`: a model served by several machines.

    Each replica requests its budget as `memory` from Ray, which places it accordingly.

    Args:
        model: Path of the GGUF, the same on every machine.
        memory: Budget of each server ("6G"). Its actor requests 256 MiB more.
        num_replicas: Number of replicas. Default: 1.
        labels: Labels of the machines with the file (`ray start --labels KEY=VALUE`).
        parallel: Answers at a time of a replica, which queues as many again.
        ray_options: Options of `ray.serve.deployment` for replicas: autoscaling_config,
            max_queued_requests, ray_actor_options and others. max_replicas_per_node is
            1 by default, as replicas would share a disk.
        name: Name of the replicas' deployment. The ingress is NAME-ingress.
        **options: Options of `moeoff.Server`.

    Raises:
        OptionError: memory is a share, host or port is given, or a running Ray has too
            few machines. If Ray starts later, the application fails to start instead.
    """
    if isinstance(memory, str) and memory.strip().endswith("%"):
        raise OptionError("`memory`: expected a size such as 6G, got a share of an unknown machine")
    if reserved := {"host", "port"} & options.keys():
        raise OptionError(f"{min(reserved)}: Ray Serve listens for the replicas: use its options")
    if isinstance(memory, str) and memory.strip().endswith("%"):
        raise OptionError(
            "`memory`: a size as 6G, not a share: replicas are placed by it before it is known"
            " where"
        )
    if reserved := {"host", "port"} & options.keys():
        raise OptionError(
            f"{min(reserved)}: replicas are reached through Ray Serve, whose own options say where"
            " it listens"
        )
    budget, chosen = parse_size(memory), dict(ray_options or {})
    actor = (
        {"num_cpus": 1, "memory": budget + _ACTOR}
        | ({"label_selector": dict(labels)} if labels else {})
        | chosen.pop("ray_actor_options", {})
    )
    if num_replicas is not None:
        chosen["num_replicas"] = num_replicas
    if "autoscaling_config" in chosen:
        chosen["autoscaling_config"] = {"target_ongoing_requests": parallel} | chosen[
            "autoscaling_config"
        ]
    ours: dict[str, Any] = {
        "max_replicas_per_node": 1,
        "max_ongoing_requests": 2 * parallel,  # the next ones are at hand, more go elsewhere
        "health_check_period_s": 5,
        "health_check_timeout_s": 20,
        "graceful_shutdown_timeout_s": 120,
        "request_router_config": {
            "request_router_class": (
                "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
            )
        },
    }
    require = functools.partial(
        _require_machines,
        chosen.get("num_replicas", 1),
        (ours | chosen)["max_replicas_per_node"],
        actor,
    )
    check = require if "autoscaling_config" not in chosen else None
    if check is not None and ray.is_initialized():
        check()
    replicas = serve.deployment(name=name, ray_actor_options=actor, **(ours | chosen))(_Replica)
    ingress = serve.deployment(
        name=f"{name}-ingress", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0}
    )(_Ingress)
    server = {
        "memory": budget,
        "parallel": parallel,
        "alias": os.path.basename(model).removesuffix(".gguf"),
    } | options
    return ingress.bind(replicas.bind(os.fspath(model), server), check)


def _require_machines(n_replicas: Any, per_machine: int, actor: Mapping[str, Any]) -> None:
    """Check that Ray's machines can hold the replicas, or raise OptionError.

    Ray itself would wait for machines forever and only log that.

    Args:
        actor: Resources of each replica.
    """
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    if not isinstance(n_replicas, int) or not all(node["Alive"] for node in nodes):  # may return
        return
    selector = actor.get("label_selector") or {}
    # values that begin with ! or in( are Ray's operators
    labels = {key: value for key, value in selector.items() if not re.match(r"!|in\(", value)}
    needs = {
        name: n
        for name, n in {"memory": actor.get("memory"), "CPU": actor.get("num_cpus")}.items()
        if n
    }
    labelled = [
        node
        for node in nodes
        if all(node.get("Labels", {}).get(key) == value for key, value in labels.items())
    ]
    hold = [
        min([per_machine, *(int(node["Resources"].get(name, 0) // n) for name, n in needs.items())])
        for node in labelled
    ]
    if sum(hold) < n_replicas:
        has = (
            f"{len(nodes)} machines, {len(labelled)} with its labels, on which {sum(hold)} have"
            " room"
        )
        each = (
            f"{format_size(int(needs.get('memory', 0)))} of memory and {needs.get('CPU', 0):g}"
            " cores"
        )
        wanted = f"{n_replicas} replicas of {each}, at most {per_machine} on a machine"
        way_out = "start Ray on more, reduce it, or set max_replicas_per_node or autoscaling_config"
        raise OptionError(f"`num_replicas`: {wanted}, and Ray has {has}: {way_out}")


class _Replica:
    """An actor that forwards requests to its server process."""

    def __init__(self, model: str, options: dict[str, Any]):
        if not os.path.isfile(model):
            way_out = "copy it there, or name machines that have it in deployment(labels=...)"
            raise ModelError(f"{model} is not on {socket.gethostname()}: {way_out}")
        self._name = serve.get_replica_context().replica_id.unique_id
        self._key = (
            {"Authorization": f"Bearer {options['api_key']}"} if options.get("api_key") else {}
        )
        self._session: aiohttp.ClientSession | None = None
        self._gauges: dict[str, Gauge] = {}
        self._ending, self._n_missed = False, 0
        self._server = ServerProcess(model, **options)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """End the actor with its server, so that Ray starts another one at once."""
        self._server.popen.wait()
        if not self._ending:
            note(f"the server of replica {self._name} has {self._server.ending()}")
            os._exit(1)

    def __del__(self) -> None:
        self._ending = True
        if hasattr(self, "_server"):
            self._server.stop()

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:  # must be created in the running loop
            self._session = open_session(self._server.socket)
        return self._session

    async def answer(
        self, method: str, path: str, headers: tuple[tuple[str, str], ...], body: bytes
    ) -> AsyncIterator[Any]:
        """Yield (replica, status, headers, is stream), then pieces of the body."""
        try:
            async with self._client().request(
                method, path, headers=headers, data=body or None
            ) as response:
                streams = response.content_type in ("text/event-stream", "application/x-ndjson")
                yield self._name, response.status, _forwarded(response.headers.items()), streams
                async for piece in response.content.iter_any():
                    yield piece
        except (aiohttp.ClientError, OSError) as error:
            raise MoeoffError(
                f"the server of replica {self._name} has gone ({type(error).__name__})"
            ) from None

    async def check_health(self) -> None:
        """Check the server for Ray. Pass on its metrics unless a batch delays them."""
        try:
            async with self._client().get("/health", timeout=_HEALTH_TIMEOUT) as response:
                response.raise_for_status()
        except asyncio.TimeoutError:
            self._n_missed += 1
            if self._n_missed >= _MAX_MISSED:
                self._server.popen.kill()  # `_watch` ends the actor
            raise
        self._n_missed = 0
        with contextlib.suppress(asyncio.TimeoutError):
            async with self._client().get(
                "/metrics", headers=self._key, timeout=aiohttp.ClientTimeout(total=5)
            ) as response:
                for name, value in _SAMPLE.findall(await response.text()):
                    name = name.replace(":", "_")
                    if name not in self._gauges:
                        self._gauges[name] = Gauge(name)
                    self._gauges[name].set(float(value))


class _Ingress:
    """The application's entry, which answers every request, if only with an error.

    If Ray starts after the application was built, this actor checks its machines.
    """

    def __init__(self, replicas: DeploymentHandle[Any], check: Callable[[], None] | None = None):
        if check is not None:
            check()
        self._replicas = replicas.options(method_name="answer", stream=True)

    async def __call__(self, request: Request) -> Response:
        body, path = await request.body(), request.url.path
        session = request.headers.get("x-session-id") or _session(body)  # Ray's header
        replicas = self._replicas.options(session_id=session)
        url = f"{path}?{request.url.query}" if request.url.query else path
        what = request.method, url, _forwarded(request.headers.items()), body
        reason = ""
        for attempt in range(_TRIES):
            await asyncio.sleep(attempt)  # until Ray has noticed the death
            answer: Any = replicas.remote(*what)
            response = None
            try:
                return (response := await _begin(answer, path))
            except BackPressureError:
                return JSONResponse(
                    _error(503, "too many requests are waiting: ask again later"), 503
                )
            except _FAILURES as error:
                reason = str(error).strip().splitlines()[-1]
            finally:
                if not isinstance(response, StreamingResponse):
                    answer.cancel()  # no effect on a finished one
        return JSONResponse(_error(502, f"{_TRIES} replicas died of the request ({reason})"), 502)


async def _begin(answer: Any, path: str) -> Response:
    """Return a whole answer, or a stream after its first event."""
    replica, status, forwarded, streamed = await anext(answer)
    headers = dict(forwarded) | {"x-moeoff-replica": replica}
    if not streamed:
        return Response(b"".join([piece async for piece in answer]), status, headers)
    events = _events(answer, b"\n" if path.startswith("/api/") else b"\n\n")
    first = await anext(events, b"")
    return StreamingResponse(_stream(first, events, answer, path), status, headers)


async def _events(answer: AsyncIterator[bytes], end: bytes) -> AsyncIterator[bytes]:
    """Yield whole events, as an error cannot follow half an event."""
    rest = b""
    async for piece in answer:
        whole, last_end, half = (rest + piece).rpartition(end)
        if last_end:
            yield whole + last_end
        rest = half
    if rest:
        yield rest


async def _stream(
    first: bytes,
    events: AsyncIterator[bytes],
    answer: Any,
    path: str,
) -> AsyncIterator[bytes]:
    """Yield events, and an error event if the replica dies."""
    try:
        yield first
        async for event in events:
            yield event
    except _FAILURES:
        message = "the replica that was answering has died: ask again"
        if path.startswith("/api/"):  # Ollama
            yield json.dumps({"error": message}).encode() + b"\n"
        elif path.startswith("/v1/messages"):  # Anthropic
            error = {"type": "error", "error": {"type": "api_error", "message": message}}
            yield b"event: error\ndata: " + json.dumps(error).encode() + b"\n\n"
        else:
            yield b"data: " + json.dumps(_error(502, message)).encode() + b"\n\n"
    finally:
        answer.cancel()  # the client may have disconnected


def _error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"code": status, "message": message, "type": "server_error"}}


def _forwarded(headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Remove the headers of a single connection, and those that are written anew."""
    return tuple(
        (name, value) for name, value in forwarded(headers) if name.lower() not in _REWRITTEN
    )


def _session(body: bytes) -> str:
    """Return a key of the conversation, from the messages up to the first of the user.

    A bare prompt is identified by its beginning, and OpenAI's `prompt_cache_key`
    overrides both. The key is empty if any replica will do.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return ""  # the replica reports the error
    if not isinstance(asked, dict):
        return ""
    common: Any = asked.get("prompt_cache_key")
    if not isinstance(common, str):
        prompt = next(
            (
                value
                for name in ("messages", "input", "prompt", "input_prefix")
                if (value := asked.get(name))
            ),
            None,
        )
        if prompt is None:
            return ""
        if isinstance(prompt, list):
            roles = [
                message.get("role") if isinstance(message, dict) else None for message in prompt
            ]
            prompt = prompt[: roles.index("user") + 1 if "user" in roles else _BEGINNING]
        common = [
            asked.get("system"),
            asked.get("instructions"),
            prompt[:_BEGINNING] if isinstance(prompt, str) else prompt,
        ]
    return hashlib.blake2b(json.dumps(common, sort_keys=True).encode(), digest_size=16).hexdigest()
