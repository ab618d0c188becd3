"""One tuning from beginning to end: look, plan, measure, choose, check, write down."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from ..bench.job import BenchTest, Job
from ..bench.process import measure
from ..budget.disk_probe import probe
from ..budget.footprint import slice_kinds
from ..budget.loss_contract import SECTION, LossContract
from ..calibrate import calibrate
from ..calibrate.precision_search import search_precision
from ..companion.beside import writable_path
from ..companion.convert import convert
from ..companion.file import KEEP, Companion, companion_path, source_sample
from ..companion.profile import Profile, profile_path
from ..companion.settings import Choice, Settings, Tuning, settings_path
from ..engine.driver_factory import sections
from ..engine.strategy import get_strategy
from ..errors import MoeoffError, OptionError
from ..gguf.layout import Layout
from ..machine import machine_name
from ..memory import DEFAULT_SHARE, MIB, available, format_size, trim
from ..paths import cache_folder
from .journal import Journal
from .kv_loss import kv_loss
from .plan import Rates, Step, Work, steps, work, worth_a_companion
from .trials import Candidate, Outcome, Run, Trials
from .writer import Writer

MINUTES = 8.0
USUAL_LOSS = 0.01  # that precisions are searched for where the user names no bound
_LEAST_PASS = 512 * MIB
_SPARE_DISK = 1 << 30  # left free beside a companion
_FIRST_STEPS = 6  # of writing, to see how fast that goes
_LOOK_SECONDS = 15.0
_KV_TYPE = "q8_0"
_STRATEGIES = ("score", "lru")  # that are tried beside auto
_IF_FITTED = ("score+blend", "promoe")  # and where a calibration has fitted all of what they learn
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Request:
    """What is to be tuned.

    Attributes:
        memory: budget in bytes; None: 80 % of what is available.
        text: files to calibrate on; none: the model writes some.
        minutes: that it may take, about; a small model takes less, a large one on a slow disk may take more.
        max_loss: bound of lost perplexity, as 0.01, within which lower precision may be chosen; None: lossless.
        companion: whether one may be written.
        n_ctx: tokens of the context that it is tuned for.
        again: profile and loss are measured anew even if there are some.
    """

    model: str
    memory: int | None = None
    text: tuple[str, ...] = ()
    minutes: float = MINUTES
    max_loss: float | None = None
    companion: bool = True
    threads: int | None = None
    n_ctx: int = 4096
    again: bool = False


@dataclass
class Tuned:
    """What a tuning found.

    Attributes:
        path: of the settings; empty after a dry run.
        steps: that were planned, with their seconds.
        seconds: that it took, those before an interruption left out.
        outcomes: of the comparisons, by name.
        notes: what was done otherwise than a user might expect, and why.
    """

    path: str
    tuning: Tuning | None
    steps: list[Step]
    seconds: float
    rates: Rates
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def tune(
    request: Request, *, dry_run: bool = False, announce: Callable[[list[Step], bool], None] | None = None, progress: Progress | None = None,
    finished: Callable[[str, float], None] | None = None, run: Run = measure,
) -> Tuned:  # fmt: skip
    """Measures and writes the settings. May be interrupted at any point: called again with the same request it goes on from there.

    Args:
        announce: told the steps before they begin, and whether an interrupted tuning goes on.
        progress: told what is being done, how much of it is done and how much there is.
        finished: told the name of each step that has ended, and its seconds.
        run: starts a trial's process.

    Raises:
        MoeoffError: the model, the budget or an option is no good, or nothing can be run.
    """
    return _Tuner(request, progress, finished, run).tune(dry_run, announce)


class _Tuner:
    def __init__(self, request: Request, progress: Progress | None, finished: Callable[[str, float], None] | None, run: Run):
        self.request, self._run = request, run
        self._tell: Progress = progress or (lambda what, done, total: None)
        self._finished = finished or (lambda name, seconds: None)
        self.layout = Layout.read(request.model)
        self.layout.require_experts()
        for path in request.text:
            if not os.path.isfile(path):
                raise OptionError(f"{path}: no such text file")
        self.notes: list[str] = []
        self.journal = Journal(self._folder(), self._key())
        self.memory = self.journal.once("memory", lambda: request.memory or int(available() * DEFAULT_SHARE) // (64 * MIB) * 64 * MIB)
        self.date = self.journal.once("date", lambda: date.today().isoformat())
        self._n_gates = len({span.name.split(".")[1] for span in self.layout.experts.values()})

    def _folder(self) -> Path:
        try:
            return cache_folder() / "tune" / f"{self.layout.identity}-{self.request.memory or 'default'}"
        except OSError as error:
            raise MoeoffError(f"there is no cache folder to keep measurements in: {error}") from None

    def _key(self) -> dict[str, Any]:
        fields = asdict(self.request) | {"source": source_sample(self.layout), "machine": machine_name()}
        return fields | {"texts": [[path, os.path.getsize(path)] for path in self.request.text]}

    # --- looking and planning ---

    def tune(self, dry_run: bool, announce: Callable[[list[Step], bool], None] | None) -> Tuned:
        started = time.monotonic()
        resumed = self.journal.has("rates")
        self._there = self.journal.once("there", self._situation)
        self.profile = self.journal.once("profile path", lambda: writable_path(profile_path(self.request.model), self.layout, "profiles", "npz"))
        self.rates = rates = Rates(**self.journal.once("rates", self._look))
        plan = Work.from_dict(self.journal.once("work", self._plan))
        todo = steps(plan, rates, self._n_gates, self.layout.n_expert)
        if announce:
            announce(todo, resumed)
        if dry_run:
            return Tuned("", None, todo, time.monotonic() - started, rates, notes=self.notes)
        text = self._timed("text", lambda: self._write_text(plan)) if plan.n_tokens and plan.writes else None
        texts = self.request.text or ((text,) if text else ())
        if plan.calibrates:
            self._timed("profile", lambda: self._calibrate(plan, texts))
        if plan.convert_seconds:
            self._timed("companion", self._convert)
        if plan.n_low_tiers:
            self._timed("loss", lambda: self._measure_loss(plan, texts))
        trials = self._trials(plan, texts)
        choices, outcomes = self._choose(plan, trials, texts)
        choices, measured = self._check(plan, trials, choices, outcomes)
        tuning = Tuning(self.memory, machine_name(), self.date, choices, measured)
        path = writable_path(settings_path(self.request.model), self.layout, "settings", "json")
        if path != settings_path(self.request.model):
            self.notes.append(f"nothing can be written beside the model: the settings are in {path}")
        Settings.write(path, self.layout, tuning)
        self.journal.remove()
        return Tuned(path, tuning, todo, time.monotonic() - started, rates, outcomes, self.notes)

    def _timed(self, name: str, act: Callable[[], Any]) -> Any:
        """A step that is done once, however often the tuning is interrupted; what it gives must be something that JSON holds."""
        known, started = self.journal.has(name), time.monotonic()
        value = self.journal.once(name, act)
        trim()
        if not known:
            self._finished(name, time.monotonic() - started)
        return value

    def _situation(self) -> dict[str, Any]:
        """What is there already, and what may be made."""
        request, layout = self.request, self.layout
        profile = None if request.again else Profile.find(layout)
        companion = companion_path(layout.files[0])
        there = os.path.exists(companion)
        if there:
            Companion(companion).check_belongs(layout)
        # fitting what other strategies need takes minutes: moeoff calibrate does it
        more = [name for name in _IF_FITTED if profile is not None and sections(get_strategy(name)) <= set(profile.sections)]
        contract = profile is not None and profile.section(SECTION) is not None
        return {"calibrates": profile is None, "companion": there, "contract": contract, "strategies": [*_STRATEGIES, *more]}

    def _look(self) -> dict[str, Any]:
        """The defaults for a few tokens, the disk alone, and the model as a writer."""
        request = self.request
        self._tell("looking at disk and model", 0, 3)
        file = next(iter(self.layout.experts.values())).file
        block = max(kind.nbytes for kind in slice_kinds(self.layout))
        disk = {str(n): probe(self.layout.files[file], block, 1.0, n).bytes_per_second for n in (2, 4, 8)}
        self._tell("looking at disk and model", 1, 3)
        options = self._common() | {"profile": False}
        job = Job(request.model, options=options, tests=(BenchTest(min(128, options["n_ctx"] // 2), 0), BenchTest(0, 32)), repetitions=1, warm_up=False,
                  seconds=_LOOK_SECONDS, probe_seconds=0)  # fmt: skip
        done = self._run(job)
        if done.error or len(done.samples) < 2:
            raise MoeoffError(f"{request.model}: {done.error or 'a first run did not end'}")
        prompt, single = done.samples
        started = time.monotonic()
        self._run(replace(job, tests=()))  # the first one had to read the program, too
        opening = time.monotonic() - started
        self._tell("looking at disk and model", 2, 3)
        write_tps = 0.0
        if not request.text and done.opened["resident_share"] < 1 and (self._there["calibrates"] or not self._there["contract"]):
            with self._writer() as writer:
                writer.begin(_FIRST_STEPS)
                write_tps = writer.rate
        rates = Rates(opening, prompt.tps, single.tps, single.bytes_read / 1e6 / single.n_tokens, single.stall_seconds / single.seconds, disk, write_tps,
                      done.opened["resident_share"])  # fmt: skip
        return asdict(rates)

    def _common(self) -> dict[str, Any]:
        """Options of all runs."""
        out = {"memory": self.memory, "n_ctx": min(self.request.n_ctx, self.layout.n_ctx_train or self.request.n_ctx), "flash_attn": True, "settings": False}
        return out | ({"n_threads": self.request.threads} if self.request.threads else {})

    @property
    def _pass_memory(self) -> int:
        """Of passes in this process, which holds more than one that only answers: a very small budget would refuse them."""
        return max(self.memory, min(_LEAST_PASS, int(available() * DEFAULT_SHARE)))

    def _writer(self) -> Writer:
        options = {name: value for name, value in self._common().items() if name != "n_ctx"}
        return Writer(self.request.model, **options | {"profile": False, "memory": self._pass_memory})

    def _plan(self) -> dict[str, Any]:
        request, there, rates = self.request, self._there, self.rates
        seconds, n_low = 0.0, 0
        if there["companion"] or (request.companion and worth_a_companion(rates)):
            seconds, n_low = self._companion(there["companion"])
            if there["contract"]:
                n_low = 0
        planned = work(
            rates, request.minutes, strategies=tuple(there["strategies"]), calibrates=there["calibrates"], writes=not request.text, convert_seconds=seconds,
            n_low_tiers=n_low, n_gates=self._n_gates, n_experts=self.layout.n_expert, n_ctx=self._common()["n_ctx"],
        )  # fmt: skip
        if rates.resident_share >= 1:
            self._note("all experts fit: there is nothing to choose")
        elif n_low and not planned.n_low_tiers:
            self._note(f"no lower precision was looked at: that would take more than {request.minutes:g} minutes (--minutes)")
        return asdict(planned)

    def _companion(self, there: bool) -> tuple[float, int]:
        """Seconds to write one (0: there is one, or none can be), and its precisions below the model's own."""
        path = companion_path(self.layout.files[0])
        if there:
            return 0.0, len([tier for tier in Companion(path).tiers if tier != KEEP])
        folder = os.path.dirname(os.path.abspath(path))
        if not os.access(folder, os.W_OK):
            self._note("no companion in lower precision: nothing can be written beside the model")
            return 0.0, 0
        try:
            plan = convert(self.request.model, dry_run=True)
        except MoeoffError as error:
            self._note(f"no companion in lower precision: {error}")
            return 0.0, 0
        free = shutil.disk_usage(folder).free
        if plan.n_bytes + _SPARE_DISK > free:
            self._note(f"no companion in lower precision: it takes {format_size(plan.n_bytes)}, and {format_size(free)} are free")
            return 0.0, 0
        return max(plan.seconds, 0.1), len([tier for tier in plan.tiers if tier != KEEP])

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    # --- the steps ---

    def _write_text(self, plan: Work) -> str:
        path = self.journal.path("text.txt")
        with self._writer() as writer:
            writer.write(plan.n_tokens, functools.partial(self._tell, "the model writes text"))
            text = writer.text
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
        return path

    def _calibrate(self, plan: Work, texts: Sequence[str]) -> list[str]:
        done = calibrate(self.request.model, text=texts, output=self.profile, tokens=plan.n_tokens, memory=self._pass_memory, threads=self.request.threads,
                         minutes=4 * self.request.minutes, only=_sections(), progress=self._tell)  # fmt: skip
        return list(done.sections)

    def _convert(self) -> str:
        with contextlib.suppress(FileExistsError):
            return convert(self.request.model, resume=True, progress=functools.partial(self._tell, "writing the companion")).path
        return companion_path(self.layout.files[0])

    def _measure_loss(self, plan: Work, texts: Sequence[str]) -> dict[str, Any]:
        try:
            found = search_precision(self.request.model, texts, self.request.max_loss or USUAL_LOSS, tokens=plan.n_tokens, output=self.profile, thresholds=None,
                                     memory=self._pass_memory, progress=self._tell, n_threads=self.request.threads)  # fmt: skip
        except OptionError as error:  # too little text, say: the rest is worth having all the same
            self._note(f"what lower precision costs was not measured: {error}")
            return {}
        best = found.contract.choose(self.request.max_loss or USUAL_LOSS, self.rates.resident_share)
        return {"tier": best.tier, "upper": found.contract.upper(best), "bytes": best.expected_bytes(self.rates.resident_share)} if best else {}

    def _trials(self, plan: Work, texts: Sequence[str]) -> Trials:
        profile = {"profile": self.profile if os.path.exists(self.profile) else False}
        return Trials(self._run, self.journal, self.request.model, self._common() | profile, plan.n_prompt, plan.n_gen, texts[0] if texts else None)

    def _choose(self, plan: Work, trials: Trials, texts: Sequence[str]) -> tuple[dict[str, Choice], dict[str, list[Outcome]]]:
        """Each option for itself, the next with those before."""
        choices: dict[str, Choice] = {}
        outcomes: dict[str, list[Outcome]] = {}
        taken: dict[str, Any] = {}

        def compare(what: str, candidates: list[Candidate], prompt: int = 0) -> Outcome:
            started, known = time.monotonic(), self.journal.has(f"{what}/{candidates[-1].name}/{plan.rounds - 1}")
            found = trials.compare(what, [Candidate(c.name, taken | dict(c.options)) for c in candidates], plan.rounds, prompt=prompt, tell=self._tell)
            outcomes[what] = found
            if not known:
                self._finished(what, time.monotonic() - started)
            better = [o for o in found[1:] if o.better]
            return max(better, key=lambda o: o.ratio) if better else found[0]

        if plan.strategies:
            first = Candidate("auto", {"strategy": "auto"})
            others = [Candidate(name, {"strategy": name}) for name in plan.strategies]
            if os.path.exists(self.profile):
                others.append(Candidate("auto without the profile", {"strategy": "auto", "profile": False}))
            best = compare("strategy", [first, *others])
            options = dict(best.candidate.options)
            choices["strategy"] = Choice(options["strategy"], _reason(best, outcomes["strategy"]))
            if options.get("profile") is False:
                choices["profile"] = Choice(False, f"{_percent(best.ratio)} faster without")
            taken |= {name: options[name] for name in ("strategy", "profile") if name in options}
        if plan.lanes:
            best = compare("I/O workers", [Candidate("4", {"n_lanes": 4}), *(Candidate(str(n), {"n_lanes": n}) for n in plan.lanes)])
            taken["n_lanes"] = best.candidate.options["n_lanes"]
            choices["n_lanes"] = Choice(taken["n_lanes"], _reason(best, outcomes["I/O workers"]))
        if plan.long_prompt:
            best = compare("micro-batch", [Candidate("default", {}), *(Candidate(str(n), {"n_ubatch": n}) for n in plan.micro_batches)], plan.long_prompt)
            if "n_ubatch" in best.candidate.options:
                taken["n_ubatch"] = best.candidate.options["n_ubatch"]
                choices["n_ubatch"] = Choice(taken["n_ubatch"], f"{_percent(best.ratio)} faster on prompts of {plan.long_prompt}")
        if self.request.max_loss:
            self._choose_precision(self.request.max_loss, plan, texts, choices, taken, compare)
        return choices, outcomes

    def _choose_precision(self, bound: float, plan: Work, texts: Sequence[str], choices: dict[str, Choice], taken: dict[str, Any],
                          compare: Callable[[str, list[Candidate]], Outcome]) -> None:  # fmt: skip
        """KV types and experts' precision together within the user's bound."""
        left = bound
        kv = {"type_k": _KV_TYPE, "type_v": _KV_TYPE}
        if texts:
            upper = self._timed("KV loss", lambda: kv_loss(self.request.model, texts, _KV_TYPE, plan.n_tokens, memory=self._pass_memory, progress=self._tell))
            if upper <= bound / 2:
                best = compare("KV cache", [Candidate("f16", {}), Candidate(_KV_TYPE, kv)])
                if "type_k" in best.candidate.options:
                    taken |= kv
                    left -= max(upper, 0.0)
                    reason = f"{_percent(best.ratio)} faster, at most {upper:.2%} lost"
                    choices |= {name: Choice(_KV_TYPE, reason) for name in kv}
        profile = Profile.read(self.profile, self.layout) if os.path.exists(self.profile) else None
        section = profile.section(SECTION) if profile else None
        if section is None or LossContract.from_section(section).choose(left, self.rates.resident_share) is None:
            self._note(f"no lower precision of the experts was found within {bound:.2%}")
            return
        best = compare("precision", [Candidate("lossless", {}), Candidate(f"{left:.2%}", {"max_loss": left})])
        if "max_loss" in best.candidate.options:
            taken["max_loss"] = left
            choices["max_loss"] = Choice(left, f"{_percent(best.ratio)} faster, within the bound of {bound:.2%}")

    def _check(self, plan: Work, trials: Trials, choices: dict[str, Choice], outcomes: dict[str, list[Outcome]]) -> tuple[dict[str, Choice], dict[str, Any]]:
        """The choice against what a user has without any tuning; what is slower is not kept."""
        measured: dict[str, Any] = {"resident_share": round(self.rates.resident_share, 4), "disk_bytes_per_second": self.rates.disk}
        if not plan.strategies:
            return choices, measured
        chosen = {name: choice.value for name, choice in choices.items()}
        started, known = time.monotonic(), self.journal.has(f"check/chosen/{plan.rounds - 1}")
        before, after = trials.compare("check", [Candidate("defaults", {"profile": False}), Candidate("chosen", chosen)], max(plan.rounds, 2), tell=self._tell)
        outcomes["check"] = [before, after]
        if not known:
            self._finished("check", time.monotonic() - started)
        if before.error and after.error:
            raise MoeoffError(f"{self.request.model}: {after.error}")
        for name, outcome in (("defaults", before), ("chosen", after)):
            speeds = [s for s in outcome.speeds if not s.error]
            if speeds:
                measured[name] = {"prompt_tps": _mean([s.prompt_tps for s in speeds]), "gen_tps": _mean([s.gen_tps for s in speeds])}
        measured["ratio"] = round(after.ratio, 4)
        if after.ratio < 1:
            slower = f"the choice was {_percent(1 / max(after.ratio, 1e-9))} slower than the defaults"
            self._note(f"{slower}: the defaults are kept")
            choices = {"profile": Choice(False, slower)} if os.path.exists(self.profile) else {}
        return choices, measured


def _sections() -> set[str]:
    """Of a profile, what the strategies that are tried may take."""
    return {"popularity"}.union(*(sections(get_strategy(name)) for name in ("auto", *_STRATEGIES)))


def _mean(values: list[float]) -> float:
    return round(sum(values) / len(values), 3)


def _percent(ratio: float) -> str:
    return f"{abs(ratio - 1):.0%}"


def _reason(best: Outcome, outcomes: list[Outcome]) -> str:
    if best is not outcomes[0]:
        return f"{_percent(best.ratio)} faster than {outcomes[0].candidate.name}"
    others = [f"{o.candidate.name} {o.ratio - 1:+.0%}" if not o.error else f"{o.candidate.name} failed" for o in outcomes[1:]]
    return f"nothing plainly faster: {', '.join(others)}"
