"""One run whose every gate event and read is recorded: a prompt, then tokens one by one, of a text."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..bench.text import TokenStream, read_text
from ..budget.disk_probe import DiskRate, probe
from ..budget.footprint import slice_kinds
from ..engine.llama import Llama
from ..engine.stats import Stats
from ..gguf.layout import Layout
from ..memory import peak_rss
from ..simulate.trace import Trace

N_PROMPT, N_DECODE = 128, 96
_CTX_STEP = 256
_PROBE_SECONDS = 1.0


@dataclass(frozen=True)
class Session:
    """What was recorded.

    Attributes:
        prompt, decode: statistics of the two parts; tokens and seconds inside llama_decode are in `seconds`.
        seconds: of the prompt, and of the single tokens.
        trace: of all events; those of the single tokens begin at `first_single`.
        reads: [n] `moeoff.simulate.read_log.READ` of the single tokens.
        disk: measured right afterwards.
        settings: the line about settings that were found.
    """

    model: str
    layout: Layout
    prompt: Stats
    decode: Stats
    n_tokens: tuple[int, int]
    seconds: tuple[float, float]
    trace: Trace
    first_single: int
    reads: np.ndarray
    disk: DiskRate
    n_lanes: int
    policy: str
    settings: str
    peak_rss: int

    @property
    def arena(self) -> int:
        return self.decode.arena_bytes


def record(
    model: str, *, memory: str | int | None = None, text: str | None = None, n_prompt: int = N_PROMPT, n_decode: int = N_DECODE,
    progress: Callable[[str, int, int], None] | None = None, **options: Any,
) -> Session:  # fmt: skip
    """Runs the model.

    Args:
        text: file whose tokens are fed; None: the usual text of measurements.
        **options: of `moeoff.Llama`.

    Raises:
        MoeoffError: the model, the budget or an option is no good.
    """
    layout = Layout.read(model)
    words = read_text(text)
    options = {"n_ctx": -(-(n_prompt + n_decode) // _CTX_STEP) * _CTX_STEP} | options
    with tempfile.TemporaryDirectory(prefix="moeoff-report-") as folder:
        path = os.path.join(folder, "session.trace")
        with Llama(model, memory=memory, trace=path, **options) as llm:
            stream = TokenStream(llm, words, llm.adds_bos())
            tokens = stream.take(n_prompt + n_decode, first=True)
            llm.eval(tokens[:n_prompt])
            llm.expert_buffer.drain()
            prompt, prompt_seconds = llm.stats(), llm.timing.prompt_seconds
            llm.reset_stats()
            for i, token in enumerate(tokens[n_prompt:], 1):
                llm.eval([token])
                if progress:
                    progress("single tokens", i, n_decode)
            llm.expert_buffer.drain()
            decode, seconds = llm.stats(), llm.timing.gen_seconds
            n_lanes, policy, settings, peak = llm.n_lanes, llm.strategy.policy or "lru", llm.settings_summary, peak_rss()
        trace = Trace.read(path)
    file = next(iter(layout.experts.values())).file
    disk = probe(layout.files[file], max(kind.nbytes for kind in slice_kinds(layout)), _PROBE_SECONDS, n_lanes)
    first = next((i for i, event in enumerate(trace.events) if len(event.ids) == 1 and event.gate == 0), len(trace.events))
    start = trace.events[first].t_ns if first < len(trace.events) else 0
    reads = trace.reads[(trace.reads["result"] == 0) & (trace.reads["t_queued"] >= start)]
    return Session(model, layout, prompt, decode, (n_prompt, n_decode), (prompt_seconds, seconds), trace, first, reads, disk, n_lanes, policy, settings, peak)
