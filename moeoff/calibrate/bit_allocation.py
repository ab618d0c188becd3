"""A type for each expert, as few bits as a tolerated loss allows: EdgeMoE §3.2.

1. Every type is tried for all experts at once: the smallest that stays within the tolerance is the upper bound, the next
   smaller one, which does not, the lower.
2. Experts are ordered by importance: how much worse the model gets with this one alone in the lower bound's type; measured
   one by one, or estimated from what the gates chose (`estimate_importance`).
3. From the least important on, experts get the lower type, as many as the tolerance allows (bisection over their number).

Loss is the relative increase of perplexity over the lossless model on the calibration text. The paper counts accuracy; it
calls its own bound soft, and so is this: text that was not calibrated on may lose more.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..budget.statistics import Estimate, Quality
from ..companion.composite import CompositeCompanion
from ..companion.convert import convert
from ..companion.file import KEEP, Companion
from ..companion.tiers import bits_per_weight, nearest
from ..errors import OptionError
from ..gguf.layout import Layout
from ..gguf.quantize import needs_imatrix, type_from_name
from ..gguf.tensor_name import parse_tensor_name
from .expert_importance import estimate_importance
from .perplexity import Reference, Window, evaluate, open_model, read_windows

__all__ = ["BitsPlan", "Planner", "Trial", "default_types", "measure_importance"]

_LADDER = ("Q8_0", "Q6_K", "Q5_K", "Q4_K", "Q3_K", "Q2_K"), ("Q8_0", "Q5_0", "Q4_0", "Q2_0")  # rows of whole blocks of 256, and others
IMPORTANCES = ("measured", "estimated")


@dataclass(frozen=True)
class BitsPlan:
    """The types of a model's experts, and how they were found.

    Attributes:
        upper, lower: types; KEEP is the model's own. Equal if one type for all does.
        low: (layer, expert) of those that get the lower one, those first that lose the least for each byte that it saves.
        n_experts: in all.
        n_bytes: of the experts as planned.
        quality: as planned, on the calibration text.
        uniform: by type, for all experts at once: (bytes, quality).
        importance: by (layer, expert): KL in nats, or what was estimated.
        tolerance: as asked for.
    """

    upper: str
    lower: str
    low: tuple[tuple[int, int], ...]
    n_experts: int
    n_bytes: int
    quality: Quality
    uniform: dict[str, tuple[int, Quality]]
    importance: dict[tuple[int, int], float]
    tolerance: float

    def to_json(self) -> str:
        """What `moeoff convert --bits` reads."""
        layers: dict[str, dict[str, str]] = {}
        for layer, expert in sorted(self.low):
            layers.setdefault(str(layer), {})[str(expert)] = self.lower
        return json.dumps({"default": self.upper, "layers": layers}, indent=1) + "\n"


class Trial:
    """Tries tiers for experts: a companion that holds them all, calibration windows, and the lossless model's predictions for them."""

    def __init__(self, model: str, companion: Companion, windows: Sequence[Window], reference: Reference, **options: Any):
        self.companion, self.windows = companion, windows
        self._model, self._reference, self._options = model, reference, options
        self.layout = Layout.read(model)
        self.experts = sorted({(role.layer, e) for name, e, _ in companion.slices if not (role := parse_tensor_name(name)).chunk})

    def quality(self, default: str, others: dict[tuple[int, int], str] = {}) -> Quality:  # noqa: B006  never written
        """Of the model with its experts in tier `default`, and others, by (layer, expert), in theirs."""
        composite = CompositeCompanion(self.companion, default, others)
        with open_model(self._model, len(self.windows[0].tokens), experts=composite, tier=composite.tiers[0], **self._options) as llm:
            return evaluate(llm, self.windows, self._reference).quality()

    def n_bytes(self, default: str, others: dict[tuple[int, int], str] = {}) -> int:  # noqa: B006
        composite = CompositeCompanion(self.companion, default, others)
        return sum(s.nbytes for span in self.layout.experts.values() for s in composite.sources(span, composite.tiers[0]))

    def gained(self, upper: str, lower: str) -> dict[tuple[int, int], int]:
        """Bytes that each (layer, expert) saves in the lower tier: what it would no longer have to be read for (EdgeMoE §3.2)."""
        out = dict.fromkeys(self.experts, 0)
        sizes = [CompositeCompanion(self.companion, tier, {}) for tier in (upper, lower)]
        for span in self.layout.experts.values():
            layer = parse_tensor_name(span.name).layer
            for expert, (high, low) in enumerate(zip(*(c.sources(span, c.tiers[0]) for c in sizes))):
                out[layer, expert] += high.nbytes - low.nbytes
        return out


def default_types(layout: Layout) -> list[str]:
    """Types to try, below the model's own in bits per weight, and such as its rows can hold."""
    spans = layout.experts.values()
    own = max(bits_per_weight(span.type) for span in spans)
    whole = all(span.shape[0] % 256 == 0 for span in spans)
    return [name for name in _LADDER[0 if whole else 1] if bits_per_weight(type_from_name(name)) < own]


class Planner:
    """What a search for plans needs, made once: calibrated windows, a companion with all types, importance. Use with `with`.

    Args:
        model: GGUF with routed experts; of a split one the first part.
        text: calibration texts.
        types: to choose from; by default `default_types`. The model's own is always among them.
        importance: "measured" quantizes one expert at a time: exact, and as many evaluations as there are experts.
            "estimated" needs one.
        ctx, chunks: windows, see `read_windows`.
        folder: for the companion, as large as all types together. Default: of temporary files.
        progress: told what is being done, how much of it is done and how much there is.
        **options: of `moeoff.Llama`: memory, n_threads, ...

    Raises:
        OptionError: an option or a text makes no sense.
        ModelError: the model is no good.
    """

    def __init__(self, model: str | os.PathLike[str], text: Sequence[str | os.PathLike[str]], *, types: Sequence[str] | None = None,
                 importance: str = "estimated", ctx: int = 512, chunks: int | None = None, folder: str | os.PathLike[str] | None = None,
                 progress: Callable[[str, int, int], None] | None = None, **options: Any):  # fmt: skip
        if importance not in IMPORTANCES:
            raise OptionError(f"importance is {' or '.join(IMPORTANCES)}, not {importance!r}")
        self._model, self.layout = os.fspath(model), Layout.read(model)
        self.layout.require_experts()
        self.types = list(types) if types is not None else default_types(self.layout)
        n_cols = min(span.shape[0] for span in self.layout.experts.values())
        for name in self.types:
            if needs_imatrix(nearest(type_from_name(name), n_cols)):
                raise OptionError(f"{name} needs an importance matrix and cannot be planned with")
        if not self.types:
            raise OptionError(f"{model}: its experts have the fewest bits already; name types to try")
        self._kind, self._text, self._ctx, self._chunks, self._folder = importance, text, ctx, chunks, folder
        self._tell = progress or (lambda what, done, total: None)
        self._options = {"flash_attn": True} | options
        self._uniform: dict[str, tuple[int, Quality]] = {}
        self._importance: dict[str, dict[tuple[int, int], float]] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Planner:
        try:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="moeoff-bits-", dir=self._folder))
            tiers, out = ",".join([KEEP, *self.types]), os.path.join(folder, "types.experts.gguf")
            made = convert(self._model, output=out, tiers=tiers, progress=lambda done, total: self._tell("converting", done, total))
            self.trial = self.trial_on(Companion(made.path), self._text, self._chunks)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def trial_on(self, companion: Companion, text: Sequence[str | os.PathLike[str]], chunks: int | None) -> Trial:
        """The same trials on these texts; it lasts as long as the planner."""
        with open_model(self._model, self._ctx, experts=False, **self._options) as llm:
            windows = read_windows(llm, text, self._ctx, chunks)
            n = len(windows) * self._ctx
            reference = self._stack.enter_context(Reference.record(llm, windows, progress=lambda done: self._tell("lossless", done, n)))
        return Trial(self._model, companion, windows, reference, **self._options)

    def uniform(self) -> dict[str, tuple[int, Quality]]:
        """By type, all experts in it: bytes and quality, the most bytes first."""
        if not self._uniform:
            lossless = Quality(0, 0, 0, 0, Estimate(0, 0, 0), Estimate(0, 0, 0), Estimate(1, 1, 1))
            found = {KEEP: (self.trial.n_bytes(KEEP), lossless)}
            for i, name in enumerate(self.types):
                self._tell("types", i, len(self.types))
                found[name] = (self.trial.n_bytes(name), self.trial.quality(name))
            self._uniform = dict(sorted(found.items(), key=lambda item: -item[1][0]))
        return self._uniform

    def importance(self, lower: str) -> dict[tuple[int, int], float]:
        """By (layer, expert), with `lower` for the lower type."""
        if lower not in self._importance:
            if self._kind == "measured":
                found = measure_importance(self.trial, lower, lambda done, total: self._tell("experts", done, total))
            else:
                self._tell("estimating", 0, 1)
                found = estimate_importance(self.layout, self.trial.companion, lower, self.trial.windows, **self._options)
            self._importance[lower] = found
        return self._importance[lower]

    def plan(self, tolerance: float) -> BitsPlan:
        """The plan with the fewest bytes whose loss on the text is within the tolerance: 0.05 is 5 % of perplexity."""
        if not 0 < tolerance < 10:
            raise OptionError(f"a tolerance is a relative increase of perplexity, as 0.05 or 5%, not {tolerance}")
        uniform, trial = self.uniform(), self.trial
        order = list(uniform)
        # the first that is too bad ends the ladder: a smaller one that happens to be good again is chance
        within = next((i for i, name in enumerate(order) if uniform[name][1].distance.loss.value > tolerance), len(order))
        upper = order[within - 1]
        if within == len(order):
            return BitsPlan(upper, upper, (), len(trial.experts), *uniform[upper], uniform, {}, tolerance)
        lower = order[within]
        importance, gained = self.importance(lower), trial.gained(upper, lower)
        ranked = sorted((key for key in trial.experts if gained[key] > 0), key=lambda key: importance[key] / gained[key])
        best, quality = 0, uniform[upper][1]
        bad, step = len(ranked), 0
        while bad - best > 1:
            self._tell("low experts", step, len(ranked).bit_length())
            step += 1
            middle = (best + bad) // 2
            found = trial.quality(upper, dict.fromkeys(ranked[:middle], lower))
            if found.distance.loss.value <= tolerance:
                best, quality = middle, found
            else:
                bad = middle
        low = tuple(ranked[:best])
        return BitsPlan(upper, lower, low, len(trial.experts), trial.n_bytes(upper, dict.fromkeys(low, lower)), quality, uniform, importance, tolerance)


def measure_importance(trial: Trial, lower: str, progress: Callable[[int, int], None] | None = None) -> dict[tuple[int, int], float]:
    """By (layer, expert): mean KL against the lossless model with this expert alone in the lower tier.

    KL and not the increase of perplexity: one expert of hundreds moves perplexity by less than its noise, and as often down
    as up; KL is never negative.
    """
    out = {}
    for i, key in enumerate(trial.experts):
        if progress:
            progress(i, len(trial.experts))
        out[key] = trial.quality(KEEP, {key: lower}).distance.kl.value
    return out
