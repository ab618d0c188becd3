"""`moeoff calibrate`: one pass over text, everything that is fitted on it, and a profile beside the model."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..companion.profile import Profile, profile_path
from ..engine.llama import Llama
from ..errors import ModelError, OptionError, Remedy
from ..gguf.layout import Layout
from ..predict import PREDICTORS
from ..predict.recording import Recording
from ..predict.router import Router
from .fit_hobbit import fit_hobbit
from .fit_score import fit_score
from .record import LENGTH, batch_size, record, sequences

__all__ = ["Calibrated", "calibrate", "cap_hidden", "fit"]

DEFAULT_TOKENS = 16384
HIDDEN_SHARE = 0.02  # of the arithmetic of a token that the learned predictor may add
HIDDEN_FACTORS = (2, 4, 8)  # units for each expert; the least, of which training needs that many, even if it costs more
MAX_EVENTS = 200_000  # of the trace that cache policies are fitted on
# fits of cache policies: section of the profile, function(trace) -> arrays
TRACE_FITS = {"score": fit_score, "hobbit": fit_hobbit}


@dataclass(frozen=True)
class Calibrated:
    """What a calibration did.

    Attributes:
        path: the profile.
        n_tokens: evaluated.
        seconds: it took.
        sections: written.
        recall: mean over layers of the cross-layer gate at k, on the calibration text; None without gate inputs.
        shallow: Fate's L: first layers whose experts are hard to predict; None without gate inputs.
    """

    path: str
    n_tokens: int
    seconds: float
    sections: tuple[str, ...]
    recall: float | None
    shallow: int | None


def calibrate(
    model: str | os.PathLike,
    *,
    text: Sequence[str | os.PathLike],
    output: str | os.PathLike | None = None,
    tokens: int = DEFAULT_TOKENS,
    memory: str | int | None = None,
    threads: int | None = None,
    hidden: int | None = None,
    seed: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> Calibrated:
    """Measures a model on texts and writes its profile; sections of other commands stay in it.

    Args:
        output: the profile; MODEL.profile.npz by default, where it is picked up.
        tokens: in all, as many from each text.
        memory: bound of the process while the model runs; what is kept for the fits adds up to a quarter of the rest, 2 GiB at most.
        hidden: units of the learned predictor; by default as many as its share of a token's arithmetic allows.

    Raises:
        ModelError: the model, or a profile of another model that is in the way.
        OptionError: no text, or too few tokens.
    """
    started = time.monotonic()
    if not text:
        raise OptionError("there is no text to calibrate on", Remedy.GIVE_TEXT)
    layout = Layout.read(model)
    layout.require_experts()
    path = os.fspath(output) if output is not None else profile_path(model)
    if os.path.exists(path):
        Profile.read(path, layout)  # another model's would be refused in the end: say so before the work
    folder = os.path.dirname(os.path.abspath(path))
    if not os.access(folder, os.W_OK):
        raise ModelError(f"{path}: cannot be written: no write access to {folder}")
    for file in text:
        if not os.path.isfile(file):
            raise OptionError(f"{os.fspath(file)}: no such text file")
    recording = _run(model, layout, text, tokens, memory, threads, progress)
    sections = fit(recording, hidden or cap_hidden(layout, recording.router), seed, progress)
    info = {"tokens": recording.n_tokens, "texts": [os.path.basename(file) for file in text]}
    Profile.write(path, layout, sections, info)
    gate = sections.get("gate")
    recall = float(np.maximum(gate["recall_raw"], gate["recall_norm"])[1:].mean()) if gate else None
    shallow = int(gate["shallow"][0]) if gate else None
    return Calibrated(path, recording.n_tokens, time.monotonic() - started, tuple(sections), recall, shallow)


def _run(model, layout: Layout, text, tokens: int, memory, threads, progress) -> Recording:
    embedding = layout.dense.get("token_embd.weight")
    n_embd, n_vocab = embedding.shape[:2] if embedding else (4096, 1 << 17)
    batch = batch_size(n_vocab, n_embd)
    if tokens < 2 * LENGTH:
        raise OptionError(f"{tokens} tokens are too few to calibrate on: at least {2 * LENGTH}")
    with Llama(os.fspath(model), memory=memory, gate_input=True, n_ctx=LENGTH, n_batch=batch, n_ubatch=batch, n_threads=threads) as llm:
        pieces = sequences(llm, text, tokens)
        if sum(map(len, pieces)) < LENGTH:
            raise OptionError(f"the texts hold {sum(map(len, pieces))} tokens, too few to calibrate on: give more")
        layers = {t.gate: t.layer for t in llm.expert_buffer.tensors}
        router = Router.read(layout, [layers[g] for g in sorted(layers)], llm.expert_buffer.priorities.shape[1])
        stage = progress and functools.partial(progress, "reading text")
        return record(llm, pieces, router, os.path.basename(layout.files[0]), progress=stage)


def fit(recording: Recording, hidden: int, seed: int = 0, progress: Callable[[str, int, int], None] | None = None) -> dict[str, dict[str, np.ndarray]]:
    """Sections of a profile: popularity, what each predictor learns, what cache policies learn."""
    sections = {"popularity": {"counts": recording.popularity(), "n_tokens": np.array([recording.n_tokens])}}
    for predictor in PREDICTORS.values():
        name = predictor.profile_section
        if name is None or name in sections:
            continue
        stage = progress and functools.partial(progress, f"fitting {name}")
        options = {"hidden": hidden, "seed": seed} if name in ("learned", "blend") else {}
        if (arrays := predictor.fit(recording, stage, **options)) is not None:
            sections[name] = arrays
    if recording.probs is not None:
        trace = recording.trace(MAX_EVENTS // recording.model.n_gates)
        for done, (name, fit_policy) in enumerate(TRACE_FITS.items()):
            sections[name] = fit_policy(trace)
            if progress:
                progress("fitting cache policies", done + 1, len(TRACE_FITS))
    return sections


def cap_hidden(layout: Layout, router: Router) -> int:
    """Units of the learned predictor: the most whose multiplications are HIDDEN_SHARE of those of a token, all layers together."""
    share = max(layout.n_expert_used, 1) / max(layout.n_expert, 1)
    active = sum(np.prod(span.shape) for span in layout.experts.values()) * share
    active += sum(np.prod(span.shape) for name, span in layout.dense.items() if not name.startswith("token_embd"))
    d = max((w.shape[1] for w in router.weights if w is not None), default=0)
    per_unit = (router.n_gates - 1) * (d + router.n_experts)
    sizes = [factor * router.n_experts for factor in HIDDEN_FACTORS]
    return max((n for n in sizes if n * per_unit <= HIDDEN_SHARE * active), default=sizes[0])
