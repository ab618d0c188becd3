"""`deployment`: the Ray Serve application, an ingress in front of replicas."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ray import serve

from ..errors import OptionError
from ..memory import MIB, parse_size
from .ingress import Ingress
from .replica import Replica
from .router import AffinityRouter

__all__ = ["deployment"]

_ACTOR = 256 * MIB  # the actor that passes requests on, beside the server's own process
_RESERVED = ("host", "port", "verbose")
_AUTOSCALING = {"min_replicas": 1, "upscale_delay_s": 30, "downscale_delay_s": 600}  # a replica that is gone has to be warmed up again
_MANY = 10_000  # answers that pass through an ingress at a time: it does nothing but pass them on


def deployment(model: str | os.PathLike[str], *, memory: str | int, num_replicas: int | None = None, autoscaling: Mapping[str, Any] | None = None,
               labels: Mapping[str, str] | None = None, per_machine: int = 1, parallel: int = 4, imbalance: int | None = None, patience: float = 600.0,
               ingresses: int = 1, actor_options: Mapping[str, Any] | None = None, name: str = "moeoff", **options: Any) -> serve.Application:  # fmt: skip
    """A model behind HTTP on several machines; for `ray.serve.run`.

    Each replica is a `moeoff.Server` in a process of its own, and asks Ray for its budget as `memory`, so that it is placed where that much is free.

    Args:
        model: path of the GGUF, the same on every machine that has it.
        memory: budget of one replica's server, as "6G". The actor beside it asks for 256 MiB more.
        num_replicas: how many; default 1.
        autoscaling: Ray Serve's `AutoscalingConfig`, as a mapping; instead of num_replicas.
        labels: of the machines that have the file (`ray start --labels KEY=VALUE`); without them any machine is tried.
        per_machine: replicas of one machine at most. They would share its disk, which is what they wait for.
        parallel: answers at a time of one replica.
        imbalance: requests that a conversation's own replica may have more than the idlest one; default parallel.
        patience: seconds that a request waits for a replica before it is answered with an error.
        ingresses: actors that take requests.
        actor_options: Ray's, of replicas: num_cpus, resources, runtime_env, ...
        name: of the deployment.
        **options: of `moeoff.Server`.

    Raises:
        OptionError: values that make no sense, or not together.
    """
    if num_replicas is not None and autoscaling is not None:
        raise OptionError("give num_replicas or autoscaling, not both")
    for count, value in (("num_replicas", num_replicas), ("per_machine", per_machine), ("parallel", parallel), ("ingresses", ingresses)):
        if value is not None and value < 1:
            raise OptionError(f"{count}: at least 1, not {value}")
    if isinstance(memory, str) and memory.strip().endswith("%"):
        raise OptionError("memory: a size as 6G, not a share: replicas are placed by it before it is known where")
    for option in _RESERVED:
        if option in options:
            raise OptionError(f"{option}: replicas are reached through Ray Serve, whose own options say where it listens and what it logs")
    if options.get("args"):
        from ..server.arguments import ServerOptions

        ServerOptions(args=tuple(options["args"]))  # refuses what a server would refuse on the other machine
    budget = parse_size(memory)
    actor: dict[str, Any] = {"num_cpus": 1, "memory": budget + _ACTOR} | dict(actor_options or {})
    if labels:
        actor["label_selector"] = dict(labels)
    scale: dict[str, Any] = {"num_replicas": num_replicas or 1}
    if autoscaling is not None:
        scale = {"autoscaling_config": _AUTOSCALING | {"target_ongoing_requests": parallel} | dict(autoscaling)}
    replicas = serve.deployment(
        name=name,
        ray_actor_options=actor,
        max_replicas_per_node=per_machine,
        max_ongoing_requests=2 * parallel,  # as many wait at the replica as are answered: it has the next one at hand, and the rest can go elsewhere
        health_check_period_s=5,
        health_check_timeout_s=15,
        graceful_shutdown_timeout_s=120,
        request_router_config={
            "request_router_class": AffinityRouter,
            "request_router_kwargs": {"imbalance": imbalance or parallel},
            "request_routing_stats_period_s": 2,
        },
        **scale,
    )(Replica)
    ingress = serve.deployment(name=f"{name}-ingress", num_replicas=ingresses, max_ongoing_requests=_MANY, ray_actor_options={"num_cpus": 0})(Ingress)
    server = {"memory": budget, "parallel": parallel, "alias": os.path.basename(model).removesuffix(".gguf")} | options
    return ingress.bind(replicas.bind(os.fspath(model), server), patience, options.get("api_key"))
