"""The choice: one option after the other, each measured with those that were chosen before it, and all of it against the defaults."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..companion.settings import Choice
from .plan import Rates, Work
from .trials import Candidate, Outcome, Trials

KV_TYPE = "q8_0"
Progress = Callable[[str, int, int], None]


@dataclass
class Chooser:
    """Attributes:
    finished: told the name of each comparison that has ended now, and its seconds.
    choices, outcomes: so far, by option and by name of the comparison.
    """

    trials: Trials
    plan: Work
    rates: Rates
    profile: str
    tell: Progress
    finished: Callable[[str, float], None]
    choices: dict[str, Choice] = field(default_factory=dict)
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)

    @property
    def _chosen(self) -> dict[str, Any]:
        return {name: choice.value for name, choice in self.choices.items()}

    def _compare(self, what: str, candidates: list[Candidate], prompt: int = 0) -> Outcome:
        """The best of them: the first, or what is plainly faster."""
        started, known = time.monotonic(), self.trials.known(what, candidates, self.plan.rounds)
        chosen = self._chosen
        found = self.trials.compare(what, [Candidate(c.name, chosen | dict(c.options)) for c in candidates], self.plan.rounds, prompt=prompt, tell=self.tell)
        self.outcomes[what] = found
        if not known:
            self.finished(what, time.monotonic() - started)
        better = [o for o in found[1:] if o.better]
        return max(better, key=lambda o: o.ratio) if better else found[0]

    def choose_lossless(self) -> None:
        """Strategy, I/O workers, micro-batch."""
        plan = self.plan
        if plan.strategies:
            candidates = [Candidate("auto", {"strategy": "auto"}), *(Candidate(name, {"strategy": name}) for name in plan.strategies)]
            if os.path.exists(self.profile):
                candidates.append(Candidate("auto without the profile", {"strategy": "auto", "profile": False}))
            best = self._compare("strategy", candidates)
            found = self.outcomes["strategy"]
            without = best.candidate.options.get("profile") is False
            self.choices["strategy"] = Choice(best.candidate.options["strategy"], _reason(found[0] if without else best, found))
            if without:
                self.choices["profile"] = Choice(False, f"{_percent(best.ratio)} faster than with it")
        if plan.lanes:
            best = self._compare("I/O workers", [Candidate("4", {"n_lanes": 4}), *(Candidate(str(n), {"n_lanes": n}) for n in plan.lanes)])
            self.choices["n_lanes"] = Choice(best.candidate.options["n_lanes"], _reason(best, self.outcomes["I/O workers"]))
        if plan.long_prompt:
            candidates = [Candidate("default", {}), *(Candidate(str(n), {"n_ubatch": n}) for n in plan.micro_batches)]
            best = self._compare("micro-batch", candidates, plan.long_prompt)
            if "n_ubatch" in best.candidate.options:
                reason = f"{_percent(best.ratio)} faster on prompts of {plan.long_prompt}"
                self.choices["n_ubatch"] = Choice(best.candidate.options["n_ubatch"], reason)

    def choose_kv_type(self, upper: float) -> float:
        """The KV cache in less precision, that loses at most `upper`; returns what is lost with the choice."""
        best = self._compare("KV cache", [Candidate("f16", {}), Candidate(KV_TYPE, {"type_k": KV_TYPE, "type_v": KV_TYPE})])
        if "type_k" not in best.candidate.options:
            return 0.0
        reason = f"{_percent(best.ratio)} faster, at most {upper:.2%} lost"
        self.choices |= {name: Choice(KV_TYPE, reason) for name in ("type_k", "type_v")}
        return max(upper, 0.0)

    def choose_precision(self, max_loss: float) -> None:
        """The experts' precision within a bound that the profile's contract keeps."""
        best = self._compare("precision", [Candidate("lossless", {}), Candidate(f"{max_loss:.2%}", {"max_loss": max_loss})])
        if "max_loss" in best.candidate.options:
            self.choices["max_loss"] = Choice(max_loss, f"{_percent(best.ratio)} faster")

    def check(self) -> tuple[dict[str, Any], str]:
        """The choice against what a user has without any tuning; what is not plainly faster is not kept.

        Returns:
            figures for the settings, and a note if nothing was kept.

        Raises:
            MoeoffError: the defaults do not run.
        """
        measured: dict[str, Any] = {"resident_share": round(self.rates.resident_share, 4), "disk_bytes_per_second": self.rates.disk}
        if not self.plan.strategies:
            return measured, ""
        candidates, rounds = [Candidate("defaults", {"profile": False}), Candidate("chosen", self._chosen)], self.plan.rounds + 1
        started, known = time.monotonic(), self.trials.known("check", candidates, rounds)
        before, after = self.outcomes["check"] = self.trials.compare("check", candidates, rounds, first_piece=rounds, tell=self.tell)
        if not known:
            self.finished("check", time.monotonic() - started)
        for name, outcome in (("defaults", before), ("chosen", after)):
            speeds = [s for s in outcome.speeds if not s.error]
            if speeds:
                measured[name] = {"prompt_tps": _mean([s.prompt_tps for s in speeds]), "gen_tps": _mean([s.gen_tps for s in speeds])}
        measured["ratio"] = round(after.ratio, 4)
        if after.better:
            return measured, ""
        said = f"what was chosen was not plainly faster than the defaults: {after.ratio - 1:+.0%}"
        self.choices = {"profile": Choice(False, said)} if os.path.exists(self.profile) else {}
        return measured, f"{said}; the defaults are kept"


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 3)


def _percent(ratio: float) -> str:
    return f"{abs(ratio - 1):.0%}"


def _reason(best: Outcome, outcomes: list[Outcome]) -> str:
    if best is not outcomes[0]:
        return f"{_percent(best.ratio)} faster than {outcomes[0].candidate.name}"
    others = [f"{o.candidate.name} {o.ratio - 1:+.0%}" if not o.error else f"{o.candidate.name} failed" for o in outcomes[1:]]
    return f"nothing plainly faster: {', '.join(others)}"
