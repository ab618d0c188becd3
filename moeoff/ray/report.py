"""What a replica says of itself, from its server's /metrics; and the same of all replicas, for people and for Prometheus."""

from __future__ import annotations

import re
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

from ray.serve.request_router import RequestRouter

__all__ = ["add_router", "prometheus", "report_of", "reports"]

# how a report calls it: what the server's metrics call it
_COUNTERS = {
    "tokens_predicted": "llamacpp:tokens_predicted_total",
    "tokens_read": "llamacpp:prompt_tokens_total",
    "expert_hits": "moeoff_expert_hits_total",
    "expert_misses": "moeoff_expert_misses_total",
    "expert_bytes_read": "moeoff_expert_read_bytes_total",
}
_GAUGES = {
    "answering": "llamacpp:requests_processing",
    "queue": "llamacpp:requests_deferred",
    "arena_bytes": "moeoff_arena_bytes",
    "resident_bytes": "moeoff_resident_memory_bytes",
    "budget_bytes": "moeoff_budget_bytes",
}
_SAMPLE = re.compile(r"^([\w:]+) (\S+)$", re.MULTILINE)  # those without labels
_routers: weakref.WeakSet[RequestRouter] = weakref.WeakSet()  # of this process: Ray tells them what replicas have reported


def report_of(metrics: str) -> dict[str, float]:
    """Counters since the replica started, gauges of now; `hit_rate` of slices, and `mb_per_token` (10^6 bytes) of tokens read and written alike."""
    samples = {name: float(value) for name, value in _SAMPLE.findall(metrics)}
    out = {name: samples.get(metric, 0.0) for name, metric in (_COUNTERS | _GAUGES).items()}
    uses, tokens = out["expert_hits"] + out["expert_misses"], out["tokens_predicted"] + out["tokens_read"]
    out["hit_rate"] = out["expert_hits"] / uses if uses else 0.0
    out["mb_per_token"] = out["expert_bytes_read"] / tokens / 1e6 if tokens else 0.0
    return out


def add_router(router: RequestRouter) -> None:
    """One whose replicas `reports` is about."""
    _routers.add(router)


def reports() -> list[dict[str, Any]]:
    """The last one of each replica that runs."""
    found = [replica.routing_stats for router in list(_routers) for replica in list(router.curr_replicas.values())]
    return list({report["replica"]: report for report in found if report}.values())  # a process may have several routers


def prometheus(found: Iterable[Mapping[str, Any]]) -> str:
    """Reports in the text format."""
    found, lines = list(found), []
    for name in (*_COUNTERS, *_GAUGES, "hit_rate", "mb_per_token"):
        full = f"moeoff_replica_{name}" + "_total" * (name in _COUNTERS)
        lines.append(f"# TYPE {full} {'counter' if name in _COUNTERS else 'gauge'}")
        lines += [f'{full}{{replica="{report["replica"]}",node="{report["node"]}"}} {report[name]}' for report in found]
    return "\n".join(lines) + "\n"
