"""More than one machine: the server as a Ray Serve application, with a replica on each machine (`pip install 'moeoff[ray]'`).

A replica runs a `moeoff.Server` in a process of its own, which ends with it. An ingress in front of the replicas tells conversations apart and asks again
where a replica has died; all else is Ray's: `ConsistentHashRouter` keeps a conversation on the replica that has its context and its experts in memory, and
where a replica comes or goes only its own conversations move. Placement, scaling, restarts, queues, and metrics are Ray Serve's too.

As long as nothing has been sent to the client, a request whose replica dies is asked again of another. An answer that is not streamed is sent when it is
whole; a stream goes out event by event, and one that breaks ends with an event that says so, in the form of its API.
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

_SILENT = 2  # health checks without an answer, after which a server is ended: Ray ends an actor after three, and the server would be left
_ANSWERS = 10.0  # seconds for one
_ACTOR = 256 * MIB  # what a replica's actor takes besides the server's own process
_TRIES = 3
_BEGINNING = 256  # characters of a bare prompt; what is longer grows from turn to turn
_HOP_BY_HOP = set("connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade host content-length "
                  "content-encoding accept-encoding server date".split())  # fmt: skip
_SAMPLE = re.compile(r"^([\w:]+) (\S+)$", re.MULTILINE)  # of /metrics, those without labels
_LOST = (RayError, RayServeException, MoeoffError)  # a replica, its server, or its machine


def deployment(model: str | os.PathLike[str], *, memory: str | int, num_replicas: int | None = None, labels: Mapping[str, str] | None = None,
               parallel: int = 4, ray_options: Mapping[str, Any] | None = None, name: str = "moeoff", **options: Any) -> serve.Application:  # fmt: skip
    """A model behind HTTP on several machines; for `ray.serve.run`.

    Each replica asks Ray for its budget as `memory`, so that it is placed where that much is free.

    Args:
        model: path of the GGUF, the same on every machine that has it.
        memory: budget of one replica's server, as "6G". Its actor asks for 256 MiB more.
        num_replicas: how many; default 1.
        labels: of the machines that have the file (`ray start --labels KEY=VALUE`); without them any machine is tried.
        parallel: answers at a time of one replica; as many again wait there.
        ray_options: of `ray.serve.deployment`, for the replicas: autoscaling_config instead of num_replicas, max_queued_requests, ray_actor_options,
            ...; max_replicas_per_node is 1, since two would share the disk that they wait for.
        name: of the deployment of replicas. The one in front of them is called NAME-ingress.
        **options: of `moeoff.Server`.

    Raises:
        OptionError: a share of memory, host or port; or, with Ray started, more replicas than its machines can hold. Where it is started later, as by
            `serve run`, the application does not start for that reason.
    """
    if isinstance(memory, str) and memory.strip().endswith("%"):
        raise OptionError("`memory`: a size as 6G, not a share: replicas are placed by it before it is known where")
    if reserved := {"host", "port"} & options.keys():
        raise OptionError(f"{min(reserved)}: replicas are reached through Ray Serve, whose own options say where it listens")
    budget, chosen = parse_size(memory), dict(ray_options or {})
    actor = {"num_cpus": 1, "memory": budget + _ACTOR} | ({"label_selector": dict(labels)} if labels else {}) | chosen.pop("ray_actor_options", {})
    if num_replicas is not None:
        chosen["num_replicas"] = num_replicas
    if "autoscaling_config" in chosen:
        chosen["autoscaling_config"] = {"target_ongoing_requests": parallel} | chosen["autoscaling_config"]
    ours: dict[str, Any] = {
        "max_replicas_per_node": 1,
        "max_ongoing_requests": 2 * parallel,  # it has the next one at hand, and what is more goes to another replica
        "health_check_period_s": 5,
        "health_check_timeout_s": 20,
        "graceful_shutdown_timeout_s": 120,
        "request_router_config": {"request_router_class": "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"},
    }
    require = functools.partial(_require_machines, chosen.get("num_replicas", 1), (ours | chosen)["max_replicas_per_node"], actor)
    check = require if "autoscaling_config" not in chosen else None
    if check is not None and ray.is_initialized():
        check()
    replicas = serve.deployment(name=name, ray_actor_options=actor, **(ours | chosen))(_Replica)
    ingress = serve.deployment(name=f"{name}-ingress", max_ongoing_requests=10_000, ray_actor_options={"num_cpus": 0})(_Ingress)
    server = {"memory": budget, "parallel": parallel, "alias": os.path.basename(model).removesuffix(".gguf")} | options
    return ingress.bind(replicas.bind(os.fspath(model), server), check)


def _require_machines(n_replicas: Any, per_machine: int, actor: Mapping[str, Any]) -> None:
    """Checks that Ray's machines, of which none has died, can hold so many replicas; before Ray is started there are none to ask. Ray would wait for
    machines without an end, and say so in its own log alone. Raises OptionError.

    Args:
        actor: what each replica asks of its machine.
    """
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    if not isinstance(n_replicas, int) or not all(node["Alive"] for node in nodes):  # one may come for one that has gone
        return
    labels = {key: value for key, value in (actor.get("label_selector") or {}).items() if not re.match(r"!|in\(", value)}  # Ray's own operators
    needs = {name: n for name, n in {"memory": actor.get("memory"), "CPU": actor.get("num_cpus")}.items() if n}
    labelled = [node for node in nodes if all(node.get("Labels", {}).get(key) == value for key, value in labels.items())]
    hold = [min([per_machine, *(int(node["Resources"].get(name, 0) // n) for name, n in needs.items())]) for node in labelled]
    if sum(hold) < n_replicas:
        has = f"{len(nodes)} machines, {len(labelled)} with its labels, on which {sum(hold)} have room"
        each = f"{format_size(int(needs.get('memory', 0)))} of memory and {needs.get('CPU', 0):g} cores"
        raise OptionError(
            f"`num_replicas`: {n_replicas} replicas of {each}, at most {per_machine} on a machine, and Ray has {has}: start Ray on more, give "
            "fewer, or max_replicas_per_node in ray_options; with autoscaling_config they may come later"
        )


class _Replica:
    """Passes requests on to a server, which a process of its own runs."""

    def __init__(self, model: str, options: dict[str, Any]):
        if not os.path.isfile(model):
            way_out = "copy it there, or start Ray with --labels on the machines that have it and name that label in deployment(labels=...)"
            raise ModelError(f"{model} is not on {socket.gethostname()}: {way_out}")
        self._name = serve.get_replica_context().replica_id.unique_id
        self._key = {"Authorization": f"Bearer {options['api_key']}"} if options.get("api_key") else {}
        self._session: aiohttp.ClientSession | None = None
        self._gauges: dict[str, Gauge] = {}
        self._ending, self._silent = False, 0
        self._server = ServerProcess(model, **options)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        """Ends the actor with its server: Ray sees that at once, and starts another."""
        self._server.wait()
        if not self._ending:
            note(f"the server of replica {self._name} has {self._server.ending()}")
            os._exit(1)

    def __del__(self) -> None:
        self._ending = True
        if hasattr(self, "_server"):
            self._server.stop()

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:  # of the loop that runs
            connector = aiohttp.UnixConnector(self._server.socket, limit=0, force_close=True)
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=30)
            self._session = aiohttp.ClientSession("http://server", connector=connector, timeout=timeout, auto_decompress=False)
        return self._session

    async def answer(self, method: str, path: str, headers: tuple[tuple[str, str], ...], body: bytes) -> AsyncIterator[Any]:
        """(replica, status, headers, streamed or not), and the body as it comes, in pieces."""
        try:
            async with self._client().request(method, path, headers=headers, data=body or None) as response:
                yield self._name, response.status, _passed_on(response.headers.items()), response.content_type in ("text/event-stream", "application/x-ndjson")
                async for piece in response.content.iter_any():
                    yield piece
        except (aiohttp.ClientError, OSError) as error:
            raise MoeoffError(f"the server of replica {self._name} has gone ({type(error).__name__})") from None

    async def check_health(self) -> None:
        """Ray's. Hands the server's metrics on to Ray's, unless they wait for a batch that takes long."""
        try:
            async with self._client().get("/health", timeout=aiohttp.ClientTimeout(total=_ANSWERS)) as response:
                response.raise_for_status()
        except asyncio.TimeoutError:
            self._silent += 1
            if self._silent >= _SILENT:
                self._server.kill()  # the actor ends with it
            raise
        self._silent = 0
        with contextlib.suppress(asyncio.TimeoutError):
            async with self._client().get("/metrics", headers=self._key, timeout=aiohttp.ClientTimeout(total=5)) as response:
                for name, value in _SAMPLE.findall(await response.text()):
                    name = name.replace(":", "_")
                    if name not in self._gauges:
                        self._gauges[name] = Gauge(name)
                    self._gauges[name].set(float(value))


class _Ingress:
    """Finds each request the replica of its conversation, and sees to it that it gets an answer or an error.

    It is the first to know the machines where Ray is started after the application was made.
    """

    def __init__(self, replicas: DeploymentHandle[Any], check: Callable[[], None] | None = None):
        if check is not None:
            check()
        self._replicas = replicas.options(method_name="answer", stream=True)

    async def __call__(self, request: Request) -> Response:
        body, path = await request.body(), request.url.path
        replicas = self._replicas.options(session_id=request.headers.get("x-session-id") or _session(body))  # Ray's header
        what = request.method, path + (f"?{request.url.query}" if request.url.query else ""), _passed_on(request.headers.items()), body
        reason = ""
        for attempt in range(_TRIES):
            await asyncio.sleep(attempt)  # so that it is known who has died
            answer: Any = replicas.remote(*what)
            response = None
            try:
                return (response := await _begin(answer, path))
            except BackPressureError:
                return JSONResponse(_error(503, "too many requests are waiting: ask again later"), 503)
            except _LOST as error:
                reason = str(error).strip().splitlines()[-1]
            finally:
                if not isinstance(response, StreamingResponse):
                    answer.cancel()  # where it has ended nothing happens
        return JSONResponse(_error(502, f"the request has been given to {_TRIES} replicas, and each of them died ({reason})"), 502)


async def _begin(answer: Any, path: str) -> Response:
    """A whole answer, or a stream whose first event has come."""
    replica, status, passed_on, streamed = await anext(answer)
    headers = dict(passed_on) | {"x-moeoff-replica": replica}
    if not streamed:
        return Response(b"".join([piece async for piece in answer]), status, headers)
    events = _events(answer, b"\n" if path.startswith("/api/") else b"\n\n")
    first = await anext(events, b"")
    return StreamingResponse(_until_it_breaks(first, events, answer, path), status, headers)


async def _events(answer: AsyncIterator[bytes], end: bytes) -> AsyncIterator[bytes]:
    """Whole events: half of one could not be followed by an error."""
    rest = b""
    async for piece in answer:
        whole, last_end, half = (rest + piece).rpartition(end)
        if last_end:
            yield whole + last_end
        rest = half
    if rest:
        yield rest


async def _until_it_breaks(first: bytes, events: AsyncIterator[bytes], answer: Any, path: str) -> AsyncIterator[bytes]:
    try:
        yield first
        async for event in events:
            yield event
    except _LOST:
        message = "the replica that was answering has died: ask again"
        if path.startswith("/api/"):  # Ollama's
            yield json.dumps({"error": message}).encode() + b"\n"
        elif path.startswith("/v1/messages"):  # Anthropic's
            yield b"event: error\ndata: " + json.dumps({"type": "error", "error": {"type": "api_error", "message": message}}).encode() + b"\n\n"
        else:
            yield b"data: " + json.dumps(_error(502, message)).encode() + b"\n\n"
    finally:
        answer.cancel()  # the client may have gone


def _error(status: int, message: str) -> dict[str, Any]:
    return {"error": {"code": status, "message": message, "type": "server_error"}}


def _passed_on(headers: Iterable[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Without those that belong to one connection."""
    return tuple((name, value) for name, value in headers if name.lower() not in _HOP_BY_HOP)


def _session(body: bytes) -> str:
    """The same for all turns of a conversation, from what they have in common: the messages up to the first of the user, or how a bare prompt begins.

    A client that knows better says it, in OpenAI's `prompt_cache_key`. Empty: any replica will do.
    """
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return ""  # the replica will say what is wrong with it
    if not isinstance(asked, dict):
        return ""
    common: Any = asked.get("prompt_cache_key")
    if not isinstance(common, str):
        prompt = next((value for name in ("messages", "input", "prompt", "input_prefix") if (value := asked.get(name))), None)
        if prompt is None:
            return ""
        if isinstance(prompt, list):
            roles = [message.get("role") if isinstance(message, dict) else None for message in prompt]
            prompt = prompt[: roles.index("user") + 1 if "user" in roles else _BEGINNING]
        common = [asked.get("system"), asked.get("instructions"), prompt[:_BEGINNING] if isinstance(prompt, str) else prompt]
    return hashlib.blake2b(json.dumps(common, sort_keys=True).encode(), digest_size=16).hexdigest()
