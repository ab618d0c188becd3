"""`moeoff calibrate`: one pass over text, the fits, and their profile."""

from __future__ import annotations

import codecs
import functools
import hashlib
import math
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..errors import BudgetError, OptionError
from ..experts.profile import Profile, profile_output
from ..experts.sidecar import low_cost, sidecar_path
from ..gguf.model_index import ModelIndex
from ..policies import POLICIES, PREDICTORS, CacheShape, FitOptions, Policy, Predictor
from ..policies.base import top_k
from ..policies.promoe import COMPONENTS
from ..policies.replay import simulate
from ..policies.strategy import profile_sections
from ..routing.recording import Recording
from ..routing.router import Router
from ..routing.trace import Trace
from ..system.files import open_file, require_new
from ..system.memory import Budget, format_size, rss, trim
from .checkpoint import Checkpoint
from .job import default_texts
from .record import LENGTH, record, recordable, recording_bytes, recording_limit, sequences

DEFAULT_TOKENS = 16384
DEFAULT_MINUTES = 60
_LEAST = 8  # sequences: fewer teach nothing
_SHARE = 0.9  # share of free memory for the fits
_READING = 0.8  # share of the time for reading text; the rest is for fits
_FIXED = 24 << 20  # constant bytes of the fits
# least bytes: scikit-learn is 88 MiB, its work on a few hundred tokens 82
_FITS = 192 << 20
HIDDEN_SHARE = 0.02  # share of a token's arithmetic for the learned predictor
# units per expert; the least is what training needs, even if it costs more
HIDDEN_FACTORS = (2, 4, 8)
SectionArrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class Calibration:
    """The results of a calibration.

    Attributes:
        path: Path of the profile.
        n_tokens: Number of evaluated tokens.
        seconds: Duration.
        sections: Sections written.
        recall: Mean recall at k of the cross-layer gate over layers, on the calibration
            text; None if its section was not written.
        shallow: Fate's L: first layers whose experts are hard to predict, or None.
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
    text: Sequence[str | os.PathLike[str]] = (),
    output: str | os.PathLike[str] | None = None,
    tokens: int = DEFAULT_TOKENS,
    memory: str | int | None = None,
    hidden: int | None = None,
    seed: int = 0,
    minutes: float = DEFAULT_MINUTES,
    only: Collection[str] | None = None,
    renew: bool = True,
    progress: Callable[[str, int, int], None] | None = None,
    warn: Callable[[str], None] | None = None,
    **options: Any,
) -> Calibration:
    """Measure a model on texts and write its profile. Keep other commands' sections.

    An interrupted calibration resumes with the same arguments and result.

    Args:
        text: Files. Default: `default_texts`.
        output: Profile path. Default: MODEL.profile.npz, or a file in the cache folder
            if that is not writable.
        tokens: Number of tokens in all, equally from each text.
        memory: Limit of the process. Up to a quarter of the rest beside the model, at
            most 2 GiB, keeps inputs and probabilities; fits use the tokens for which
            the rest suffices.
        minutes: Deadline in minutes; fits without a search take some seconds more.
        only: Sections to fit. Default: all.
        renew: True to fit again, though the profile has the same arguments. Otherwise
            the result then has no sections.
        warn: Callback with a sentence on damaged parts of an interrupted calibration.
        hidden: Units of the learned predictor. Default: by its share of a token's
            arithmetic.
        **options: Options of `moeoff.Llama`: n_threads, tensor placement, rope scaling.

    Raises:
        ModelError: The model is invalid, or the profile is another model's.
        OptionError: A text is empty or unreadable, there are too few tokens or too
            little time for 8 sequences, or a registered predictor's fit has no section
            of its own.
    """
    started = time.monotonic()
    profile_sections()  # fail before the work if two fits have the same section
    model_index = ModelIndex.read(model)
    model_index.require_text()
    path = os.fspath(output) if output is not None else profile_output(model_index)
    require_new(path, [*model_index.files, sidecar_path(model_index.files[0]), *text], "`output`")
    if tokens < 2 * LENGTH:
        raise OptionError(f"{tokens} tokens are too few to calibrate on: at least {2 * LENGTH}")
    bound = Budget.of(memory).most
    if bound < (needed := rss() + _FITS):
        raise BudgetError(
            f"a budget of {format_size(bound)} is too small: fitting takes {format_size(needed)} at"
            " least",
            hint={"memory": needed},
        )
    # fail before the work if the profile is another model's
    earlier = (
        Profile.read(path, model_index, room=(bound - rss()) // 2).info
        if os.path.exists(path)
        else {}
    )
    with default_texts(text) as files:
        texts = [_digest(file) for file in files]
        checkpoint = Checkpoint(
            model_index, options, warn, tokens=tokens, hidden=hidden, seed=seed, texts=texts
        )
        if not renew and earlier.get("fit") == checkpoint.key:
            checkpoint.remove()
            return Calibration(path, int(earlier["tokens"]), 0.0, (), None, None)
        recording = _record(
            model_index, files, tokens, memory, started, minutes, checkpoint, progress, options
        )
    import sklearn.linear_model  # before memory is measured
    import sklearn.neural_network  # noqa: F401

    trim()  # free the closed model's memory for the fits
    room, until = max(int(_SHARE * (bound - rss())), 0), started + 60 * minutes
    how = FitOptions(
        seed,
        hidden or cap_hidden(model_index, recording.router),
        low_cost(model_index),
        room=room,
        until=until,
    )
    sections = fit(recording, how, progress, only, warn)
    info = {
        "tokens": recording.n_tokens,
        "texts": list(map(os.path.basename, files)),
        "fit": checkpoint.key,
    }
    # also delete those of an earlier calibration
    left_out: dict[str, SectionArrays] = {
        name: {} for name in profile_sections() if only is None or name in only
    }
    Profile.write(path, model_index, left_out | sections, info)
    checkpoint.remove()
    gate, boundary = sections.get("gate"), sections.get("shallow")
    recall = float(np.maximum(gate["recall_raw"], gate["recall_norm"])[1:].mean()) if gate else None
    shallow = int(boundary["shallow"][0]) if boundary else None
    return Calibration(
        path, recording.n_tokens, time.monotonic() - started, tuple(sections), recall, shallow
    )


def _digest(path: str | os.PathLike[str]) -> str:
    """Return a text's digest. Raise `OptionError` if it is unreadable or not text."""
    try:
        with open_file(path) as file:
            digest, decoder = hashlib.sha256(), codecs.getincrementaldecoder("utf-8")()
            while part := file.read(1 << 20):
                digest.update(part)
                if "\0" in decoder.decode(part):
                    raise UnicodeError
            decoder.decode(b"", final=True)
            return digest.hexdigest()
    except OSError as error:
        raise OptionError(f"{os.fspath(path)}: cannot be read: {error.strerror}") from None
    except UnicodeError:
        raise OptionError(f"{os.fspath(path)}: is not UTF-8 text") from None


def _record(
    model_index: ModelIndex,
    text: Sequence[str],
    tokens: int,
    memory: str | int | None,
    started: float,
    minutes: float,
    checkpoint: Checkpoint,
    progress: Callable[[str, int, int], None] | None,
    options: Mapping[str, Any],
) -> Recording:
    with recordable(model_index, memory=memory, **options) as (llm, router):
        pieces = sequences(llm, text, tokens)
        n_tokens = sum(map(len, pieces))
        if n_tokens < LENGTH:
            raise OptionError(
                f"the texts hold {n_tokens} tokens, too few to calibrate on: give more"
            )
        if progress:
            progress("reading text", 0, n_tokens)  # a sequence may take minutes
        reading = checkpoint.load("reading") or {
            "limit": np.array(recording_limit(llm.engine.plan))
        }
        checkpoint.save("reading", reading)
        limit = int(reading["limit"])
        llm.engine.sizer.reserve(recording_bytes(llm, router, n_tokens, limit))
        stage = progress and functools.partial(progress, "reading text")
        name = os.path.basename(model_index.files[0])
        end, least = started + 60 * minutes, min(_LEAST, len(pieces))
        recording: Recording = llm.call(
            record,
            llm,
            pieces,
            router,
            name,
            limit=limit,
            until=started + _READING * 60 * minutes,
            least=least,
            deadline=end,
            checkpoint=checkpoint,
            progress=stage,
        )
    if (n_read := int(recording.starts.sum())) < least:
        read = f"read {n_read} of at least {least} sequences in {minutes:g} minutes"
        raise OptionError(
            f"{read}: give more, or the same command again, which goes on from there",
            hint={"minutes": ...},
        )
    return recording


def fit(
    recording: Recording,
    options: FitOptions,
    progress: Callable[[str, int, int], None] | None = None,
    only: Collection[str] | None = None,
    warn: Callable[[str], None] | None = None,
    compare: bool = True,
) -> dict[str, SectionArrays]:
    """Fit `fits`, or those in `only`, to a recording, or to the first tokens that
    memory allows.

    Sections whose policy or predictor sets `compared` are fitted on the first tokens
    and replayed on the rest. They are dropped, with a warning, if they are no better
    than the defaults.

    Args:
        compare: False to keep all sections, fitted on all tokens.
    """
    replay = options.replay or simulate
    options = replace(options, replay=replay)
    if options.room is not None:
        recording = recording.part(
            0, max(int(options.room - _FIXED) // fit_bytes(recording), LENGTH)
        )
    sections: dict[str, SectionArrays] = {}
    # the first registered part of a section decides, as for the fit
    policies = {
        own.name: policy
        for policy in reversed(POLICIES.values())
        if policy.compared
        for own in policy.sections[:1]
    }
    predictors = {
        own.name: part
        for part in reversed(PREDICTORS.values())
        if part.compared
        for own in part.sections[:1]
    }.values()
    predicts = {section.name for predictor in predictors for section in predictor.sections}
    cut, end = _held_out(recording) if compare else (0, 0)
    names = [name for name in profile_sections() if only is None or name in only]
    for number, (name, learn) in enumerate(
        ((name, profile_sections()[name].fit) for name in names), 1
    ):
        policy = policies.get(name) if cut < end else None
        source = (
            recording.part(0, cut)
            if policy is not None or (cut < end and name in predicts)
            else recording
        )
        stage = progress and functools.partial(
            progress, f"fitting {name} ({number} of {len(names)})"
        )
        arrays = learn(source, options, stage)
        if (
            arrays
            and policy is not None
            and not _helps(policy, arrays, recording.part(cut, end).trace(), replay)
        ):
            if warn:
                warn(
                    f"{name}: on text that it was not fitted to it keeps no more than the defaults,"
                    " and is left out"
                )
        elif arrays:
            sections[name] = arrays
    for predictor in predictors if cut < end else ():
        for name in _useless(predictor, sections, recording.part(cut, end)):
            del sections[name]
            if warn:
                warn(
                    f"{name}: on text that it was not fitted to no more is predicted with it, and"
                    " it is left out"
                )
    return sections


def fit_bytes(recording: Recording) -> int:
    """Return the most bytes of a fit per token.

    They hold the routing twice, a gate's values per expert, and several copies of the
    kept inputs and their projections.
    """
    n, e = recording.router.n_gates, recording.router.n_experts
    nbytes = 2 * n * (e + 1) + 24 * e
    if recording.inputs is None:
        return nbytes
    width: int = recording.inputs.shape[2]
    return nbytes + -(
        -len(recording.input_tokens)
        * (16 * width + 24 * (min(width, COMPONENTS) + e))
        // max(recording.n_tokens, 1)
    )


_HELD_SHARE = 0.1  # share of the tokens with probabilities
# tokens of a comparison; a single sequence would tell nothing, and all is kept
_LEAST_HELD, _MOST_HELD = 512, 1024
_COMPARED = (0.25, 0.5)  # resident shares


def _held_out(recording: Recording) -> tuple[int, int]:
    """Return the tokens [first, end) to compare policies on: the last sequences with
    probabilities.

    The range is empty if there are too few.
    """
    end = 0 if recording.probs is None else len(recording.probs)
    starts = np.flatnonzero(recording.starts[:end])
    if len(starts) < 2:
        return end, end
    cut = int(starts[max(np.searchsorted(starts, (1 - _HELD_SHARE) * end, side="right") - 1, 1)])
    return (cut, min(end, cut + _MOST_HELD)) if end - cut >= _LEAST_HELD else (end, end)


def _helps(
    policy: type[Policy], arrays: SectionArrays, trace: Trace, replay: Callable[..., Any]
) -> bool:
    """Return True if a policy reads less with learned options, over all sizes."""
    logs = 0.0
    for share in _COMPARED:
        arena = max(int(share * trace.model.full_bytes), trace.model.arena_floor)
        shape = CacheShape.of(trace.model, arena)
        learned, usual = (
            replay(trace, made, arena).bytes_read
            for made in (policy.from_profile(arrays, shape), policy(shape))
        )
        logs += math.log(max(learned, 1)) - math.log(max(usual, 1))
    return logs < 0


def _useless(
    predictor: type[Predictor], sections: Mapping[str, SectionArrays], held: Recording
) -> list[str]:
    """Return the sections with which a predictor is no better on these tokens."""
    first, *more = (section.name for section in predictor.sections)
    present = [name for name in (first, *more) if name in sections]
    if first not in present:
        return []  # no baseline for the others
    arrays = dict(sections[first])  # the others build on these
    most, useless = _n_foreseen(predictor(held.router, arrays), held), list[str]()
    for name in present[1:]:
        if (n := _n_foreseen(predictor(held.router, arrays | sections[name]), held)) > most:
            most, arrays = n, arrays | sections[name]
        else:
            useless.append(name)
    return useless if most > _n_foreseen(predictor(held.router), held) else present


def _n_foreseen(predictor: Predictor, held: Recording) -> int:
    """Return the number of routed experts that were predicted, by token, among as many
    as a gate selects.
    """
    expected, n_right = dict[int, np.ndarray](), 0
    for token in range(held.n_tokens):
        if held.starts[token]:
            predictor.reset_sequence()
            expected.clear()
        predictions = (
            predictor.begin(held.tokens[token : token + 1]) if predictor.wants_tokens else []
        )
        for event in held.events(token, token + 1):
            # the predictor may overwrite these
            expected |= {p.gate: p.scores.copy() for p in predictions}
            if (scores := expected.pop(event.gate, None)) is not None:
                n_right += int(np.isin(event.ids, top_k(scores, event.ids.shape[1])).sum())
            predictions = predictor.observe(event)
        expected |= {p.gate: p.scores.copy() for p in predictions}
    return n_right


def cap_hidden(model_index: ModelIndex, router: Router) -> int:
    """Return the most units of the learned predictor within HIDDEN_SHARE of a token's
    multiplications.
    """
    n_embd = max((w.shape[1] for w in router.weights if w is not None), default=0)
    share = max(model_index.n_expert_used, 1) / max(model_index.n_expert, 1)
    active = sum(np.prod(span.shape) for span in model_index.experts.values()) * share
    active += sum(
        np.prod(span.shape)
        for name, span in model_index.dense.items()
        if not name.startswith("token_embd")
    )
    per_unit = (router.n_gates - 1) * (n_embd + router.n_experts)
    sizes = [factor * router.n_experts for factor in HIDDEN_FACTORS]
    return max((n for n in sizes if n * per_unit <= HIDDEN_SHARE * active), default=sizes[0])
