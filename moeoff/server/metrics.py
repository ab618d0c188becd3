"""What a server says of itself, in the text format that Prometheus reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..engine.stats import Stats
from ..memory import rss

if TYPE_CHECKING:
    from .request_queue import RequestQueue


def metrics_text(stats: Stats, queue: RequestQueue | None = None) -> str:
    """Counters since the server started, and gauges of now."""
    lines = []

    def metric(name: str, kind: str, text: str, *samples: tuple[str, float]) -> None:
        lines.append(f"# HELP moeoff_{name} {text}")
        lines.append(f"# TYPE moeoff_{name} {kind}")
        lines.extend(f"moeoff_{name}{labels} {value}" for labels, value in samples)

    metric(
        "tokens_total",
        "counter",
        "Tokens of prompts, cached ones included, and of answers.",
        ('{kind="prompt"}', queue.prompt_tokens),
        ('{kind="completion"}', queue.completion_tokens),
    )
    metric("requests_total", "counter", "Requests that reached the model.", ("", queue.requests))
    metric("expert_hits_total", "counter", "Expert slices resident when they were asked for.", ("", stats.demand_hits))
    metric("expert_misses_total", "counter", "Expert slices that had to be read.", ("", stats.demand_misses))
    metric("expert_evictions_total", "counter", "Expert slices dropped for others.", ("", stats.evictions))
    metric("expert_read_bytes_total", "counter", "Bytes of experts read from disk.", ("", stats.bytes_read))
    metric(
        "expert_uses_total",
        "counter",
        "Experts that gates chose for a token, by the precision that served them.",
        ('{precision="high"}', stats.expert_uses - stats.served_low - stats.skipped),
        ('{precision="low"}', stats.served_low),
        ('{precision="none"}', stats.skipped),
    )
    metric("stall_seconds_total", "counter", "Time compute waited for experts, mean over its threads.", ("", stats.stall_seconds))
    metric("requests_waiting", "gauge", "Requests in the queue before the model.", ("", queue.waiting))
    metric("arena_bytes", "gauge", "Memory that experts may take.", ("", stats.arena_bytes))
    metric("resident_memory_bytes", "gauge", "Resident memory of the process.", ("", rss()))
    metric("budget_bytes", "gauge", "The bound given by --memory; 0 where only the experts are bounded.", ("", stats.budget_bytes))
    return "\n".join(lines) + "\n"
