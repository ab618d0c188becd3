"""One tuning from beginning to end: look, plan, measure, choose, check, write down."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from .. import __version__
from ..bench.job import Job
from ..bench.process import measure
from ..budget.loss_contract import SECTION, LossContract
from ..calibrate import calibrate
from ..calibrate.precision_search import search_precision
from ..companion.beside import writable_path
from ..companion.convert import convert
from ..companion.file import companion_path, source_sample
from ..companion.profile import Profile, profile_path
from ..companion.settings import Settings, Tuning, settings_path
from ..engine.config import Config
from ..engine.device_tier import AUTO
from ..errors import MoeoffError, OptionError
from ..gguf.layout import Layout
from ..machine import machine_name
from ..memory import DEFAULT_SHARE, MIB, available, trim
from ..paths import cache_folder
from .choose import KV_TYPE, Chooser, Progress
from .journal import Journal
from .kv_loss import kv_loss
from .look import CompanionPlan, Situation, fitted_sections, measure_rates, plan_companion, situation
from .plan import Rates, Step, Work, steps, work, worth_a_companion
from .trials import Outcome, Run, Trials
from .writer import Writer

MINUTES = 8.0
USUAL_LOSS = 0.01  # that precisions are searched for where the user names no bound
_LEAST_PASS = 512 * MIB  # memory of a pass in this process
_MEMORY_STEP = 64 * MIB


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
        n_gpu_layers, vram: what lies on GPUs in every run, as `moeoff.Llama` has them; how a GPU computes with experts each run finds by itself.
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
    n_gpu_layers: int = 0
    vram: str | None = None


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
        self.journal = Journal(self._folder(), self._key())
        self.memory = self.journal.once("memory", lambda: request.memory or int(available() * DEFAULT_SHARE) // _MEMORY_STEP * _MEMORY_STEP)
        self.date = self.journal.once("date", lambda: date.today().isoformat())
        self.profile = self.journal.once("profile path", lambda: writable_path(profile_path(request.model), self.layout, "profiles", "npz"))
        self.devices = Config.make(Path(request.model), **self._common()).devices
        there = self.journal.once("there", lambda: asdict(situation(self.layout, request.again)))
        self.there = Situation(**there | {"strategies": tuple(there["strategies"])})
        self.notes: list[str] = []

    def _folder(self) -> Path:
        try:
            return cache_folder() / "tune" / f"{self.layout.identity}-{self.request.memory or 'default'}"
        except OSError as error:
            raise MoeoffError(f"there is no cache folder to keep measurements in: {error}") from None

    def _key(self) -> dict[str, Any]:
        fields = asdict(self.request) | {"moeoff": __version__, "source": source_sample(self.layout), "machine": machine_name()}
        return fields | {"texts": [[path, os.path.getsize(path)] for path in self.request.text]}

    def tune(self, dry_run: bool, announce: Callable[[list[Step], bool], None] | None) -> Tuned:
        started, resumed = time.monotonic(), self.journal.has("rates")
        self.rates = rates = Rates(**self.journal.once("rates", self._look))
        plan = self._plan()
        n_gates, n_experts = self._shape
        todo = steps(plan, rates, n_gates, n_experts)
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
        chooser = Chooser(self._trials(plan), plan, rates, self.profile, self._tell, self._finished)
        chooser.choose_lossless()
        if self.request.max_loss and plan.strategies:
            self._choose_lossy(self.request.max_loss, plan, texts, chooser)
        measured, note = chooser.check()
        self._note(note)
        path = writable_path(settings_path(self.request.model), self.layout, "settings", "json")
        if path != settings_path(self.request.model):
            self._note(f"nothing can be written beside the model: the settings are in {path}")
        tuning = Tuning(self.memory, machine_name(), self.date, chooser.choices, measured, self.devices)
        Settings.write(path, self.layout, tuning)
        self.journal.remove()
        return Tuned(path, tuning, todo, time.monotonic() - started, rates, chooser.outcomes, self.notes)

    def _note(self, text: str) -> None:
        if text:
            self.notes.append(text)

    def _timed(self, name: str, act: Callable[[], Any]) -> Any:
        """A step that is done once, however often the tuning is interrupted; what it gives must be something that JSON holds."""
        known, started = self.journal.has(name), time.monotonic()
        value = self.journal.once(name, act)
        trim()  # what it leaves would count against the next one's budget
        if not known:
            self._finished(name, time.monotonic() - started)
        return value

    # --- options of what is run ---

    @property
    def _shape(self) -> tuple[int, int]:
        """Gates and experts."""
        return len({span.name.split(".")[1] for span in self.layout.experts.values()}), self.layout.n_expert

    def _common(self) -> dict[str, Any]:
        """Options of all runs."""
        out = {"memory": self.memory, "n_ctx": min(self.request.n_ctx, self.layout.n_ctx_train or self.request.n_ctx), "flash_attn": True, "settings": False}
        out |= {"n_threads": self.request.threads} if self.request.threads else {}
        out |= {"n_gpu_layers": self.request.n_gpu_layers} if self.request.n_gpu_layers else {}
        return out | ({"vram": self.request.vram, "vram_mode": AUTO} if self.request.vram else {})

    @property
    def _pass_memory(self) -> int:
        """Of passes in this process, which holds more than one that only answers: a very small budget would refuse them."""
        return max(self.memory, min(_LEAST_PASS, int(available() * DEFAULT_SHARE)))

    def _writer(self) -> Writer:
        options = {name: value for name, value in self._common().items() if name != "n_ctx"}
        return Writer(self.request.model, **options | {"profile": False, "memory": self._pass_memory})

    def _trials(self, plan: Work) -> Trials:
        profile = {"profile": self.profile if os.path.exists(self.profile) else False}
        return Trials(self._run, self.journal, self.request.model, self._common() | profile, plan.n_prompt, plan.n_gen)

    # --- the steps ---

    def _look(self) -> dict[str, Any]:
        writes = not self.request.text and (self.there.calibrates or not self.there.contract)
        job = Job(self.request.model, options=self._common() | {"profile": False})
        return asdict(measure_rates(job, self._run, self._writer if writes else None, self._tell))

    def _plan(self) -> Work:
        request, there, rates = self.request, self.there, self.rates
        companion = CompanionPlan()
        if there.companion or (request.companion and worth_a_companion(rates)):
            companion = CompanionPlan(**self.journal.once("companion plan", lambda: asdict(plan_companion(request.model, self.layout, there.companion))))
        n_low = 0 if there.contract else companion.n_low
        n_gates, n_experts = self._shape
        planned = work(
            rates, request.minutes, strategies=there.strategies, calibrates=there.calibrates, writes=not request.text, convert_seconds=companion.seconds,
            n_low_tiers=n_low, n_gates=n_gates, n_experts=n_experts, n_ctx=self._common()["n_ctx"],
        )  # fmt: skip
        if rates.resident_share >= 1:
            self._note("all experts fit: there is nothing to choose")
        elif n_low and not planned.n_low_tiers:
            self._note(f"no lower precision was looked at: that would take more than {request.minutes:g} minutes (--minutes)")
        else:
            self._note(companion.note)
        return planned

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
                         minutes=4 * self.request.minutes, only=fitted_sections(), progress=self._tell)  # fmt: skip
        return list(done.sections)

    def _convert(self) -> str:
        path = companion_path(self.layout.files[0])
        if not os.path.exists(path):  # interrupted after it was finished, and before that was written down
            convert(self.request.model, resume=True, progress=functools.partial(self._tell, "writing the companion"))
        return path

    def _measure_loss(self, plan: Work, texts: Sequence[str]) -> bool:
        bound = self.request.max_loss or USUAL_LOSS
        try:
            search_precision(self.request.model, texts, bound, tokens=plan.n_tokens, output=self.profile, thresholds=None, rerouting=False, memory=self._pass_memory,
                             progress=self._tell, n_threads=self.request.threads)  # fmt: skip
        except OptionError as error:  # too little text, say: the rest is worth having all the same
            self._note(f"what lower precision costs was not measured: {error}")
            return False
        return True

    def _choose_lossy(self, bound: float, plan: Work, texts: Sequence[str], chooser: Chooser) -> None:
        """KV types and experts' precision together within the user's bound."""
        left = bound
        if texts:
            measured = functools.partial(kv_loss, self.request.model, texts, KV_TYPE, plan.n_tokens, progress=self._tell, memory=self._pass_memory)
            upper = self._timed("KV loss", measured)
            if upper <= bound / 2:
                left -= chooser.choose_kv_type(upper)
        section = Profile.read(self.profile, self.layout).section(SECTION) if os.path.exists(self.profile) else None
        if section is None or LossContract.from_section(section).choose(left, self.rates.resident_share) is None:
            self._note(f"no lower precision of the experts was found within {bound:.2%}")
        else:
            chooser.choose_precision(left)
