"""The quality contract: how much a model may lose, and which precision was measured on this very model to lose no more.

A section of the profile holds every precision that was tried, with its confidence intervals; opening a model with a bound
takes the one that reads the fewest bytes among those whose upper 95 % bound is within it. Knows nothing of how it was measured
(`moeoff.negotiation`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .companion import Choice
from .errors import OptionError
from .layout import Layout
from .precision import Precision
from .profile import Profile
from .quality import Estimate

__all__ = ["Candidate", "Contract", "Promise", "parse_loss"]

SECTION = "precision"


def parse_loss(text: str | float) -> float:
    """A relative increase of perplexity: 0.01 of "1%", "0.01" or 0.01.

    Raises:
        OptionError: not a share above 0 and below 1.
    """
    try:
        loss = float(text[:-1]) / 100 if isinstance(text, str) and text.strip().endswith("%") else float(text)
    except ValueError:
        loss = 0.0
    if not 0 < loss < 1:
        raise OptionError(f"not a loss: {text!r}; write for example 1%: the increase of perplexity that is allowed")
    return loss


@dataclass(frozen=True)
class Candidate:
    """One precision and what it was measured to cost, each expert taken for a miss: the most that it can give up.

    Attributes:
        t1, t2, share: `Precision.t1`, `t2`, `prefill_low_share`.
        decode: measured token by token after a prompt; else in batches, where t1 and t2 do nothing.
        loss, kl, top1: as in `Quality`.
        cost: bytes to be read if nothing is resident, 1 for lossless.
        low, skipped: share of what the gates chose that was served in low precision, and not at all.
    """

    t1: float
    t2: float
    share: float
    decode: bool
    loss: Estimate
    kl: Estimate
    top1: Estimate
    cost: float
    low: float
    skipped: float

    def within(self, max_loss: float) -> bool:
        return self.loss.high is not None and self.loss.high <= max_loss


@dataclass(frozen=True)
class Promise:
    """A bound that was asked for, the precision that keeps it, and what that was measured to lose."""

    max_loss: float
    precision: Precision
    estimated_loss: float


@dataclass(frozen=True)
class Contract:
    """What was measured of one model with one companion.

    Attributes:
        tier: of the companion, the low precision.
        companion: its identity.
        text: hash of the windows' tokens.
        n_windows, n_tokens, ctx: of the text; tokens are those that were scored.
        candidates: all that were measured.
    """

    tier: str
    companion: int
    text: int
    n_windows: int
    n_tokens: int
    ctx: int
    candidates: tuple[Candidate, ...]

    def choose(self, max_loss: float) -> Candidate | None:
        """The candidate with the fewest bytes within the bound, in decode and, with its share, in batches; None: lossless only."""
        shares = {0.0} | {c.share for c in self.candidates if not c.decode and c.within(max_loss)}
        allowed = [c for c in self.candidates if c.decode and c.share in shares and c.within(max_loss)]
        return min(allowed, key=lambda c: (c.cost, -c.share), default=None)

    def promise(self, max_loss: float) -> Promise:
        found = self.choose(max_loss)
        if found is None:
            return Promise(max_loss, Precision(), 0.0)
        batches = [c.loss.value for c in self.candidates if not c.decode and c.share == found.share]
        return Promise(max_loss, Precision(found.t1, found.t2, found.share, self.tier), max(found.loss.value, *batches, 0.0))

    def to_section(self) -> dict[str, np.ndarray]:
        """Arrays for `Profile.write`."""
        c = self.candidates
        rows = {name: np.array([getattr(x, name) for x in c]) for name in ("t1", "t2", "share", "decode", "cost", "low", "skipped")}
        rows |= {name: np.array([[getattr(x, name).value, getattr(x, name).low, getattr(x, name).high] for x in c]) for name in ("loss", "kl", "top1")}
        facts = {name: np.array(getattr(self, name)) for name in ("tier", "n_windows", "n_tokens", "ctx")}
        return rows | facts | {"companion": np.uint64(self.companion), "text": np.uint64(self.text)}

    @classmethod
    def from_section(cls, s: dict[str, np.ndarray]) -> Contract:
        candidates = tuple(
            Candidate(
                float(s["t1"][i]),
                float(s["t2"][i]),
                float(s["share"][i]),
                bool(s["decode"][i]),
                *(Estimate(*map(float, s[name][i])) for name in ("loss", "kl", "top1")),
                *(float(s[name][i]) for name in ("cost", "low", "skipped")),
            )
            for i in range(len(s["t1"]))
        )
        return cls(str(s["tier"]), *(int(s[name]) for name in ("companion", "text", "n_windows", "n_tokens", "ctx")), candidates)

    @classmethod
    def find(cls, layout: Layout, profile: Profile | None, choice: Choice, max_loss: float) -> Promise:
        """What a model's profile promises within a bound.

        Raises:
            OptionError: there is no profile, or it has no contract, or one with another companion; says what to do.
        """
        model = layout.files[0]
        way = f"moeoff calibrate -m {model} --text FILE --max-loss {100 * max_loss:g}%"
        section = profile.section(SECTION) if profile else None
        if section is None:
            raise OptionError(f"--max-loss needs a measurement of this very model, and there is none: make a companion with moeoff convert, then {way}")
        contract = cls.from_section(section)
        if choice.companion is None or choice.companion.identity != contract.companion:
            found = f"with another companion than {choice.companion.path}" if choice.companion else f"with a companion, and {model} has none now"
            raise OptionError(f"{profile.path}: was measured {found}: measure again: {way}")
        return contract.promise(max_loss)
