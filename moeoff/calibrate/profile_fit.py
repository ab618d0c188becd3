"""`moeoff calibrate`: one pass over text, everything that is fitted on it, and a profile beside the model."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cache.importance import LOW_COST
from ..companion.profile import Profile, profile_output
from ..companion.source import low_cost
from ..engine.llama import Llama
from ..errors import ModelError, OptionError, Remedy
from ..gguf.layout import Layout
from ..gguf.tensor_name import EMBEDDING
from ..predict import PREDICTORS, FitOptions, Predictor, pairs
from ..predict.base import Progress
from ..predict.recording import Recording
from ..predict.router import Router
from ..predict.tokens import fit_first
from . import fit_hobbit, fit_score
from .record import LENGTH, batch_size, record, recording_bytes, seconds_of, sequences

__all__ = ["Calibrated", "Effort", "calibrate", "cap_hidden", "fit", "fits"]

DEFAULT_TOKENS = 16384
DEFAULT_MINUTES = 60
_LEAST = 8  # sequences: fewer teach nothing, however long they take
HIDDEN_SHARE = 0.02  # of the arithmetic of a token that the learned predictor may add
HIDDEN_FACTORS = (2, 4, 8)  # units for each expert; the least, of which training needs that many, even if it costs more
Section = dict[str, np.ndarray]
Fit = Callable[[Recording, FitOptions, Progress | None], Section | None]


@dataclass(frozen=True)
class Effort:
    """What a calibration takes, told before it starts.

    Attributes:
        n_tokens: that will be read.
        seconds: that this takes, as the first sequence took; the fits come after it.
        nbytes: of memory, beside the model's, that is kept of them for the fits.
    """

    n_tokens: int
    seconds: float
    nbytes: int


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
    model: str | os.PathLike[str],
    *,
    text: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str] | None = None,
    tokens: int = DEFAULT_TOKENS,
    memory: str | int | None = None,
    threads: int | None = None,
    hidden: int | None = None,
    seed: int = 0,
    minutes: float = DEFAULT_MINUTES,
    only: Collection[str] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    announce: Callable[[Effort], None] | None = None,
    **options: Any,
) -> Calibrated:
    """Measures a model on texts and writes its profile; sections of other commands stay in it.

    Args:
        output: the profile; MODEL.profile.npz by default, or one in the cache folder if nothing can be written there, where it is picked up.
        tokens: in all, as many from each text.
        memory: bound of the process while the model runs; what is kept for the fits adds up to a quarter of the rest, 2 GiB at most.
        minutes: that reading the text may take, about; of a large model on a slow disk fewer tokens are read then, but 8 sequences.
        only: sections that are fitted; by default all of them.
        announce: is told before it starts what the calibration will take.
        hidden: units of the learned predictor; by default as many as its share of a token's arithmetic allows.
        **options: of `moeoff.Llama`: where tensors go, how positions are scaled.

    Raises:
        ModelError: the model, or a profile of another model that is in the way.
        OptionError: no text, or too few tokens, or a registered predictor whose fit has no section of its own.
    """
    started = time.monotonic()
    fits()  # raises before the work if two of them are for one section
    if not text:
        raise OptionError("there is no text to calibrate on", Remedy.GIVE_TEXT)
    layout = Layout.read(model)
    layout.require_experts()
    path = os.fspath(output) if output is not None else profile_output(layout)
    if os.path.exists(path):
        Profile.read(path, layout)  # another model's would be refused in the end: raise before the work
    folder = os.path.dirname(os.path.abspath(path))
    if not os.access(folder, os.W_OK):
        raise ModelError(f"{path}: cannot be written: no write access to {folder}")
    for file in text:
        if not os.path.isfile(file):
            raise OptionError(f"{os.fspath(file)}: no such text file")
    recording = _run(model, layout, text, tokens, memory, threads, 60 * minutes, progress, announce, options)
    sections = fit(recording, FitOptions(seed, hidden or cap_hidden(layout, recording.router), low_cost(layout) or LOW_COST), progress, only)
    info = {"tokens": recording.n_tokens, "texts": [os.path.basename(file) for file in text]}
    Profile.write(path, layout, sections, info)
    gate = sections.get("gate")
    recall = float(np.maximum(gate["recall_raw"], gate["recall_norm"])[1:].mean()) if gate else None
    shallow = int(gate["shallow"][0]) if gate else None
    return Calibrated(path, recording.n_tokens, time.monotonic() - started, tuple(sections), recall, shallow)


def _run(
    model: str | os.PathLike[str],
    layout: Layout,
    text: Sequence[str | os.PathLike[str]],
    tokens: int,
    memory: str | int | None,
    threads: int | None,
    seconds: float,
    progress: Callable[[str, int, int], None] | None,
    announce: Callable[[Effort], None] | None,
    options: Mapping[str, Any],
) -> Recording:
    embedding = layout.dense.get(EMBEDDING)
    n_embd, n_vocab = embedding.shape[:2] if embedding else (4096, 1 << 17)
    batch = batch_size(n_vocab, n_embd)
    if tokens < 2 * LENGTH:
        raise OptionError(f"{tokens} tokens are too few to calibrate on: at least {2 * LENGTH}")
    with Llama(
        os.fspath(model), memory=memory, gate_input=True, n_ctx=LENGTH, n_batch=batch, n_ubatch=batch, n_threads=threads, settings=False, **options
    ) as llm:
        pieces = sequences(llm, text, tokens)
        if sum(map(len, pieces)) < LENGTH:
            raise OptionError(f"the texts hold {sum(map(len, pieces))} tokens, too few to calibrate on: give more")
        layers = {t.gate: t.layer for t in llm.expert_buffer.tensors}
        router = Router.read(layout, [layers[g] for g in sorted(layers)], llm.expert_buffer.priorities.shape[1])
        if progress:
            progress("reading text", 0, sum(map(len, pieces)))  # one sequence of a large model may take minutes
        each = seconds_of(llm, pieces[0])
        pieces = pieces[: max(int(seconds / each), _LEAST)]
        n_tokens = sum(map(len, pieces))
        if announce:
            announce(Effort(n_tokens, len(pieces) * each, recording_bytes(llm, router, n_tokens, n_embd)))
        stage = progress and functools.partial(progress, "reading text")
        return record(llm, pieces, router, os.path.basename(layout.files[0]), progress=stage)


def fit(
    recording: Recording, options: FitOptions, progress: Callable[[str, int, int], None] | None = None, only: Collection[str] | None = None
) -> dict[str, Section]:
    """Sections of a profile: what each of `fits`, or of those `only`, learns from the recording."""
    sections: dict[str, Section] = {}
    for name, learn in fits().items():
        if only is not None and name not in only:
            continue
        stage = progress and functools.partial(progress, f"fitting {name}")
        if (arrays := learn(recording, options, stage)) is not None:
            sections[name] = arrays
    return sections


def fits() -> dict[str, Fit]:
    """What fits each section of a profile: popularity, what the registered predictors learn, what cache policies learn.

    Predictors that share a section inherit its fit; the first that was registered is asked.

    Raises:
        OptionError: a predictor's fit has no section, or one that is fitted in another way.
    """
    # The policies' fits stand here and not beside the policies, which know neither recordings nor the simulator.
    policies: dict[str, Fit] = {"score": fit_score.fit, "hobbit": fit_hobbit.fit}
    out: dict[str, Fit] = {"popularity": _popularity, "pairs": pairs.fit, "first": fit_first}
    owners: dict[str, type[Predictor]] = {}
    for predictor in PREDICTORS.values():
        section, learns = predictor.profile_section, _function(predictor) is not _function(Predictor)
        if section is None and learns:
            raise OptionError(f"predictor {predictor.name} has a fit, but no profile_section to keep what it learns")
        if section is None or not learns:
            continue
        if section in {"popularity", "pairs", "first", *policies} or _function(owners.setdefault(section, predictor)) is not _function(predictor):
            raise OptionError(f"predictor {predictor.name} fits section {section!r} of a profile in a way of its own: it needs another profile_section")
        out.setdefault(section, predictor.fit)
    return out | policies


def _function(predictor: type[Predictor]) -> object:
    """The same for classes that inherit one fit."""
    return getattr(predictor.fit, "__func__", predictor.fit)


def _popularity(recording: Recording, options: FitOptions, progress: Progress | None = None) -> Section:
    return {"counts": recording.popularity(), "n_tokens": np.array([recording.n_tokens])}


def cap_hidden(layout: Layout, router: Router) -> int:
    """Units of the learned predictor: the most whose multiplications are HIDDEN_SHARE of those of a token, all layers together."""
    share = max(layout.n_expert_used, 1) / max(layout.n_expert, 1)
    active = sum(np.prod(span.shape) for span in layout.experts.values()) * share
    active += sum(np.prod(span.shape) for name, span in layout.dense.items() if not name.startswith("token_embd"))
    d = max((w.shape[1] for w in router.weights if w is not None), default=0)
    per_unit = (router.n_gates - 1) * (d + router.n_experts)
    sizes = [factor * router.n_experts for factor in HIDDEN_FACTORS]
    return max((n for n in sizes if n * per_unit <= HIDDEN_SHARE * active), default=sizes[0])
