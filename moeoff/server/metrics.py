"""What a server says of itself, in the text format that Prometheus reads."""

from __future__ import annotations

from ..engine.stats import Stats
from ..memory import rss


def metrics_text(stats: Stats) -> str:
    """Counters since the server started, and gauges of now."""
    lines = []

    def metric(name: str, kind: str, text: str, *samples: tuple[str, float]) -> None:
        lines.append(f"# HELP moeoff_{name} {text}")
        lines.append(f"# TYPE moeoff_{name} {kind}")
        lines.extend(f"moeoff_{name}{labels} {value}" for labels, value in samples)

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
    metric("expert_rerouted_total", "counter", "Of these, resident experts in the place of the router's choice.", ("", stats.rerouted))
    if stats.device_memory:
        metric("device_hits_total", "counter", "Of the hits, expert slices that a GPU held.", ("", stats.device_hits))
        metric("device_uploads_total", "counter", "Experts written into a GPU's memory.", ("", stats.device_uploads))
        metric("device_upload_bytes_total", "counter", "Bytes of these.", ("", stats.device_bytes))
        metric("device_upload_seconds_total", "counter", "Time that writing them took.", ("", stats.device_upload_seconds))
        metric("device_download_bytes_total", "counter", "Bytes that went from a GPU's memory back to the host's.", ("", stats.device_bytes_down))
        metric("device_download_seconds_total", "counter", "Time that reading them took.", ("", stats.device_download_seconds))
        metric("device_wait_seconds_total", "counter", "Of writing into a GPU's memory, what compute waited for.", ("", stats.device_wait_seconds))
        metric("device_experts", "gauge", "Experts in GPUs' memory.", ("", stats.device_experts))
        metric(
            "device_bytes",
            "gauge",
            "GPU memory that experts may take.",
            *((f'{{device="{name}"}}', use["experts"]) for name, use in stats.device_memory.items()),
        )
    metric("stall_seconds_total", "counter", "Time compute waited for experts, mean over its threads.", ("", stats.stall_seconds))
    metric("prefetch_issued_total", "counter", "Expert slices read ahead.", ("", stats.prefetch_issued))
    metric("prefetch_useful_total", "counter", "Of these, slices that were then asked for.", ("", stats.prefetch_useful))
    for name, on in (("prefetch", stats.prefetch_on), ("drafts", stats.drafts_on)):
        if on is not None:
            metric(f"{name}_on", "gauge", f"Whether {name} pays at the moment, as measured.", ("", int(on)))
    metric("arena_bytes", "gauge", "Memory that experts may take.", ("", stats.arena_bytes))
    metric("resident_memory_bytes", "gauge", "Resident memory of the process.", ("", rss()))
    metric("budget_bytes", "gauge", "The bound given by --memory; 0 where only the experts are bounded.", ("", stats.budget_bytes))
    return "\n".join(lines) + "\n"
