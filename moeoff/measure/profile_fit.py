"""`moeoff calibrate`: one pass over text, everything that is fitted on it, and the
profile it is written to.
"""

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
from ..policies.strategy import fits
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
_SHARE = 0.9  # of what is free, that the fits plan with
_READING = 0.8  # share of the time for reading text; the rest is for fits
_FIXED = 24 << 20  # bytes that they take however few tokens there are
# bytes that they take at least: scikit-learn is 88 MiB, its work on a few hundred
# tokens 82
_FITS = 192 << 20
HIDDEN_SHARE = 0.02  # of the arithmetic of a token that the learned predictor may add
# units for each expert; the least, of which training needs that many, even if it costs
# more
HIDDEN_FACTORS = (2, 4, 8)
Section = dict[str, np.ndarray]


@dataclass(frozen=True)
class Calibration:
    """Results of a calibration.

    Attributes:
        path: the profile.
        n_tokens: evaluated.
        seconds: it took.
        sections: written.
        recall: mean over layers of the cross-layer gate at k, on the calibration text;
            None if its section was not written.
        shallow: Fate's L: first layers whose experts are hard to predict; likewise.
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
    """Measures a model on texts and writes its profile; sections of other commands stay
    in it.

    May be interrupted at any point: called again with the same arguments it reads no
    text again, and comes to the same profile.

    Args:
        text: Files. Default: `default_texts`.
        output: the profile; MODEL.profile.npz by default, or one in the cache folder if
            nothing can be written there, where it is picked up.
        tokens: in all, as many from each text.
        memory: bound of the process. Of what the model leaves of it up to a quarter, 2
            GiB at most, keeps inputs and probabilities for the fits, which learn from
            as many tokens as the rest has room for.
        minutes: Deadline in minutes for all of it; fits that learn without trying,
            seconds of work, come after.
        only: sections that are fitted; by default all of them.
        renew: Fit again if the profile was fitted with the same arguments before.
            Otherwise the result has no sections.
        warn: told in a sentence of what was left by an interrupted calibration and is
            damaged.
        hidden: units of the learned predictor; by default as many as its share of a
            token's arithmetic allows.
        **options: of `moeoff.Llama`: n_threads, where tensors go, how positions are
        scaled.

    Raises:
        ModelError: the model, or a profile of another model that is in the way.
        OptionError: a text that is empty or cannot be read, too few tokens, too little
            time to read 8 sequences, or a registered predictor whose fit has no section
            of its own.
    """
    started = time.monotonic()
    fits()  # raises before the work if two of them are for one section
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
    # another model's would be refused in the end: raise before the work
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
    import sklearn.linear_model  # before the room is measured
    import sklearn.neural_network  # noqa: F401

    trim()  # what the closed model leaves is room for the fits
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
    # an earlier calibration's go, too
    left_out: dict[str, Section] = {name: {} for name in fits() if only is None or name in only}
    Profile.write(path, model_index, left_out | sections, info)
    checkpoint.remove()
    gate, boundary = sections.get("gate"), sections.get("shallow")
    recall = float(np.maximum(gate["recall_raw"], gate["recall_norm"])[1:].mean()) if gate else None
    shallow = int(boundary["shallow"][0]) if boundary else None
    return Calibration(
        path, recording.n_tokens, time.monotonic() - started, tuple(sections), recall, shallow
    )


def _digest(path: str | os.PathLike[str]) -> str:
    """Raises `OptionError` if it cannot be read, or holds anything but text."""
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
            progress("reading text", 0, n_tokens)  # one sequence of a large model may take minutes
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
) -> dict[str, Section]:
    """Sections of a profile: arrays that each of `fits`, or of those `only`, learns
    from the recording. From its first tokens, where there is room for no more.

    What a policy or predictor learns and `compared` says so of is fitted on the first
    tokens and replayed on the others, all of which lie all over the texts: it is left
    out, and `warn` told, if the policy misses no less with it than with its defaults,
    or the predictor predicts no more.

    Args:
        compare: False keeps everything, fitted on all tokens.
    """
    replay = options.replay or simulate
    options = replace(options, replay=replay)
    if options.room is not None:
        recording = recording.part(
            0, max(int(options.room - _FIXED) // fit_bytes(recording), LENGTH)
        )
    sections: dict[str, Section] = {}
    # of those that share a section the first that was registered is asked, as for its
    # fit
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
    names = [name for name in fits() if only is None or name in only]
    for number, (name, learn) in enumerate(((name, fits()[name].fit) for name in names), 1):
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
    """Bytes that a fit takes at most for each token: who used what, twice; and of one
    gate at a time numbers for each expert, and, for each token whose inputs are kept,
    these and what they are projected to, several times.
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


_HELD_SHARE = 0.1  # of the tokens with probabilities
# tokens that a comparison replays; of one sequence it would say nothing, and what was
# learned stays
_LEAST_HELD, _MOST_HELD = 512, 1024
_COMPARED = (0.25, 0.5)  # of the experts in memory


def _held_out(recording: Recording) -> tuple[int, int]:
    """[first, end) of the tokens that policies are compared on: whole sequences at the
    end of those with probabilities. Empty: there are too few.
    """
    end = 0 if recording.probs is None else len(recording.probs)
    starts = np.flatnonzero(recording.starts[:end])
    if len(starts) < 2:
        return end, end
    cut = int(starts[max(np.searchsorted(starts, (1 - _HELD_SHARE) * end, side="right") - 1, 1)])
    return (cut, min(end, cut + _MOST_HELD)) if end - cut >= _LEAST_HELD else (end, end)


def _helps(policy: type[Policy], arrays: Section, trace: Trace, replay: Callable[..., Any]) -> bool:
    """Whether a policy reads less with what it has learned than with its defaults, over
    sizes of the buffer together.
    """
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
    predictor: type[Predictor], sections: Mapping[str, Section], held: Recording
) -> list[str]:
    """Of a predictor's sections that are there, those with which it foresees no more of
    what these tokens select.
    """
    first, *more = (section.name for section in predictor.sections)
    present = [name for name in (first, *more) if name in sections]
    if first not in present:
        return []  # nothing to judge the others by
    arrays = dict(sections[first])  # which the others build on
    most, useless = _n_foreseen(predictor(held.router, arrays), held), list[str]()
    for name in present[1:]:
        if (n := _n_foreseen(predictor(held.router, arrays | sections[name]), held)) > most:
            most, arrays = n, arrays | sections[name]
        else:
            useless.append(name)
    return useless if most > _n_foreseen(predictor(held.router), held) else present


def _n_foreseen(predictor: Predictor, held: Recording) -> int:
    """How many of the experts that routers selected, token by token, had been
    predicted, of each gate as many as it selects.
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
            # which the predictor may write over
            expected |= {p.gate: p.scores.copy() for p in predictions}
            if (scores := expected.pop(event.gate, None)) is not None:
                n_right += int(np.isin(event.ids, top_k(scores, event.ids.shape[1])).sum())
            predictions = predictor.observe(event)
        expected |= {p.gate: p.scores.copy() for p in predictions}
    return n_right


def cap_hidden(model_index: ModelIndex, router: Router) -> int:
    """Units of the learned predictor: the most whose multiplications are HIDDEN_SHARE
    of those of a token, all layers together.
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
