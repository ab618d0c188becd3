"""The engine's choices and their reasons, for `inspect --explain`, `run -v`, `serve
-v`.
"""

from __future__ import annotations

from ..llamacpp.devices import devices
from ..system.memory import DEFAULT_SHARE, format_size
from .engine import Engine


def explain(engine: Engine) -> dict[str, str]:
    """Return a sentence for each choice, by name. Running engines add measurements."""
    config, planned, budget, strategy = (
        engine.config,
        engine.planned,
        engine.budget,
        engine.config.strategy,
    )
    room = min(max(budget.left(planned.fixed), 0), planned.arena_full)
    whole = room >= planned.arena_full
    if budget.process is None:
        memory = (
            f"{format_size(room)} for experts (--expert-memory); the rest of the process is not"
            " bounded"
        )
    else:
        source = f"{DEFAULT_SHARE:.0%} of what is available" if budget.is_default else "--memory"
        memory = (
            f"{format_size(budget.process)} ({source}), {format_size(planned.fixed)} of it for all"
            " but experts"
        )
    trained = engine.model_index.n_ctx_train
    follows = not whole and budget.process is not None
    grows = ", more while prompt and context are short" if follows else ""
    out = {
        "memory": memory,
        "experts": (f"{format_size(room)} in memory of {format_size(planned.arena_full)}{grows}"),
        "context": (
            f"{planned.n_ctx} tokens take {format_size(planned.state)}; the model was trained for"
            f" {trained or '?'} (-c)"
        ),
        "micro-batch": (
            f"{engine.micro_batch.n_tokens} tokens: {engine.micro_batch.reason}; another one"
            " changes results in their last bits (-ub)"
        ),
        "attention": (
            "flash attention on: smaller buffers, and faster behind long texts (-fa)"
            if engine.keywords.get("flash_attn")
            else "flash attention off (-fa)"
        ),
        "threads": f"{engine.keywords['n_threads']} compute (-t)",
        "I/O threads": (
            f"{engine.buffer.stats().io_threads}"
            f" read{'' if config.io_threads else ', as many as the disk is seen to gain from'}"
            " (--io-threads)"
        ),
        "strategy": (
            f"{strategy.name}: {'nothing to do, all experts fit' if whole else strategy.summary}"
            " (--strategy)"
        ),
        "prefetching": _prefetching(engine, whole),
        "profile": (
            engine.profile.path
            if engine.profile
            else "none: moeoff calibrate fits cache and predictor to the model"
        ),
        "precision": _precision(engine),
    }
    if devices():
        on_device = (
            f"experts in {config.vram} of its memory, {config.vram_mode}"
            if config.vram is not None
            else "no experts"
        )
        out["GPU"] = (
            engine.device_remark
            or f"dense weights of {config.n_gpu_layers} layers (-1: all), {on_device}"
            " (-ngl, --vram, --vram-mode)"
        )
    return out


def _prefetching(engine: Engine, whole: bool) -> str:
    predictor, prefetcher = engine.config.strategy.predictor, engine.driver.prefetcher
    if predictor is None or whole:
        return "none: " + ("all experts fit" if whole else "the strategy has no predictor")
    if prefetcher is not None and prefetcher.gain is not None:
        return (
            f"{'on' if prefetcher.on else 'off'}: {prefetcher.gain:+.1%} tokens per second with it"
        )
    return f"by {predictor.name}" + (
        ", while tokens take no longer with it than without"
        if engine.config.strategy.ab_tested
        else ""
    )


def _precision(engine: Engine) -> str:
    quality = engine.quality
    if quality.selected is not None:
        return (
            f"{quality.precision}, experts in {quality.source.tier}: within"
            f" {quality.selected.max_loss:.2%}, estimated {quality.selected.estimated_loss:.2%}"
        )
    return (
        "lossless (--max-loss)"
        if quality.precision.lossless and not quality.source.repacked
        else f"{quality.precision}, experts in {quality.source.tier}"
    )
