"""The first look: what there is beside the model, what the disk gives, and how fast a short run with the defaults is."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from ..bench.job import BenchTest, Job
from ..budget.disk_probe import probe
from ..budget.footprint import slice_kinds
from ..budget.loss_contract import SECTION
from ..companion.convert import convert
from ..companion.file import KEEP, Companion, companion_path
from ..companion.profile import Profile
from ..engine.driver_factory import sections
from ..engine.strategy import get_strategy
from ..errors import MoeoffError
from ..gguf.layout import Layout
from ..memory import format_size
from .plan import Rates
from .trials import Run
from .writer import Writer

STRATEGIES = ("score", "lru")  # that are tried beside auto
_IF_FITTED = ("score+blend", "promoe")  # and where a calibration has fitted all of what they learn, which takes minutes
_PROMPT, _SINGLE = 128, 32  # tokens of the first run
_SECONDS = 15.0  # that its single tokens may take
_FIRST_STEPS = 6  # of writing, to see how fast that goes
_SPARE_DISK = 1 << 30  # left free beside a companion


@dataclass(frozen=True)
class Situation:
    """What there is already.

    Attributes:
        calibrates: there is no profile, or it is not to be used.
        companion: there is one.
        contract: the profile says what its precisions cost.
        strategies: that can be tried beside the default.
    """

    calibrates: bool
    companion: bool
    contract: bool
    strategies: tuple[str, ...]


@dataclass(frozen=True)
class CompanionPlan:
    """seconds: to write one, 0 if there is one or none is written; n_low: its precisions below the model's own; note: why there is none."""

    seconds: float = 0.0
    n_low: int = 0
    note: str = ""


def situation(layout: Layout, again: bool) -> Situation:
    """
    Raises:
        ModelError: what is there is of another model, or damaged.
    """
    profile = None if again else Profile.find(layout)
    path = companion_path(layout.files[0])
    there = os.path.exists(path)
    if there:
        Companion(path).check_belongs(layout)
    more = tuple(name for name in _IF_FITTED if profile is not None and sections(get_strategy(name)) <= set(profile.sections))
    return Situation(profile is None, there, profile is not None and profile.section(SECTION) is not None, STRATEGIES + more)


def fitted_sections() -> set[str]:
    """Of a profile, what the strategies that are tried may take."""
    return {"popularity"}.union(*(sections(get_strategy(name)) for name in ("auto", *STRATEGIES)))


def measure_rates(job: Job, run: Run, writer: Callable[[], Writer] | None, tell: Callable[[str, int, int], None]) -> Rates:
    """The disk alone, the defaults for a few tokens, and the model as a writer.

    Args:
        job: with the options of the defaults.
        writer: opens one; None: no text is to be written.

    Raises:
        MoeoffError: the model cannot be run.
    """
    layout = Layout.read(job.model)
    tell("looking at disk and model", 0, 3)
    file = next(iter(layout.experts.values())).file
    block = max(kind.nbytes for kind in slice_kinds(layout))
    disk = {str(n): probe(layout.files[file], block, 1.0, n).bytes_per_second for n in (2, 4, 8)}
    tell("looking at disk and model", 1, 3)
    tests = (BenchTest(min(_PROMPT, job.options["n_ctx"] // 2), 0), BenchTest(0, _SINGLE))
    first = replace(job, tests=tests, repetitions=1, warm_up=False, seconds=_SECONDS, probe_seconds=0)
    done = run(first)
    if done.error or len(done.samples) < len(tests):
        raise MoeoffError(f"{job.model}: {done.error or 'a first run did not end'}")
    prompt, single = done.samples
    started = time.monotonic()
    run(replace(first, tests=()))  # the one before had to read the program, too
    opening = time.monotonic() - started
    tell("looking at disk and model", 2, 3)
    share = done.opened["resident_share"]
    write_tps = 0.0
    if writer is not None and share < 1:
        with writer() as it:
            it.begin(_FIRST_STEPS)
            write_tps = it.rate
    return Rates(opening, prompt.tps, single.tps, single.bytes_read / 1e6 / single.n_tokens, single.stall_seconds / single.seconds, disk, write_tps, share)


def plan_companion(model: str, layout: Layout, there: bool) -> CompanionPlan:
    """What a companion in lower precision would take, or has."""
    path = companion_path(layout.files[0])
    if there:
        return CompanionPlan(n_low=len([tier for tier in Companion(path).tiers if tier != KEEP]))
    folder = os.path.dirname(os.path.abspath(path))
    if not os.access(folder, os.W_OK):
        return CompanionPlan(note="no companion in lower precision: nothing can be written beside the model")
    try:
        plan = convert(model, dry_run=True)
    except MoeoffError as error:
        return CompanionPlan(note=f"no companion in lower precision: {error}")
    free = shutil.disk_usage(folder).free
    if plan.n_bytes + _SPARE_DISK > free:
        return CompanionPlan(note=f"no companion in lower precision: it takes {format_size(plan.n_bytes)}, and {format_size(free)} are free")
    return CompanionPlan(max(plan.seconds, 0.1), len([tier for tier in plan.tiers if tier != KEEP]))
