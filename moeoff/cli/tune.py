"""`moeoff tune`."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from ..console import progress_bar, remark
from ..memory import format_size, parse_size
from ..paths import demo_model
from .llama_options import GPU_LAYERS, with_options
from .options import CONTEXT, one_sentence

if TYPE_CHECKING:
    from ..tune import Tuned
    from ..tune.plan import Step


@click.command(context_settings=CONTEXT)
@click.argument("model", type=click.Path(), required=False)
@click.option("--memory", metavar="SIZE", help="Bound of the process that it is tuned for, as 6G or 80%. Default: 80% of what is available.")
@click.option(
    "--text", multiple=True, type=click.Path(dir_okay=False), metavar="FILE", help="Text to calibrate on; may be repeated. Default: the model writes some."
)
@click.option(
    "--minutes", type=click.FloatRange(min=0.5), default=8, show_default=True, help="It takes about this at most, if the model is not too slow for it."
)
@click.option("--max-loss", metavar="PERCENT", help="Choose among lower precisions, too, that cost at most this, as 1%. Default: lossless.")
@click.option("--no-companion", is_flag=True, help="Write no experts in lower precision beside the model.")
@click.option("-c", "--ctx-size", type=click.IntRange(min=256), default=4096, show_default=True, help="Context in tokens that it is tuned for.")
@click.option("-t", "--threads", type=click.IntRange(min=1), help="Compute threads. Default: every core this process may use.")
@with_options(GPU_LAYERS)
@click.option("--vram", metavar="SIZE", help="Bound of what is allocated on each GPU, as 8G or 80%: tuned for experts there, too.")
@click.option("--again", is_flag=True, help="Calibrate anew even if there is a profile.")
@click.option("--dry-run", is_flag=True, help="Take a first look, say what would be done and how long it takes, and stop there.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object about what was found.")
@one_sentence
def tune(model: str | None, memory: str | None, max_loss: str | None, no_companion: bool, dry_run: bool, as_json: bool, ctx_size: int,
         **options: Any) -> None:  # fmt: skip
    """Find the best settings for a model on this machine, once; run, serve and Llama then use them by themselves.

    Looks at disk and cores, calibrates, tries strategies and numbers of I/O workers against each other, compares the choice with the
    defaults, and writes MODEL.moeoff.json. Interrupted with Ctrl-C and started again, it goes on where it was.
    """
    from ..budget.loss_contract import parse_loss
    from ..tune import Request
    from ..tune import tune as command

    request = Request(
        model or demo_model(), memory=parse_size(memory) if memory else None, max_loss=parse_loss(max_loss) if max_loss else None, companion=not no_companion,
        n_ctx=ctx_size, **options,
    )  # fmt: skip
    plan = _Plan()
    try:
        with progress_bar() as progress:
            done = command(request, dry_run=dry_run, announce=plan.announce, progress=progress, finished=plan.finished)
    except KeyboardInterrupt:
        remark("interrupted: the same command goes on from here")
        raise
    if as_json:
        click.echo(json.dumps({"path": done.path, "steps": [asdict(step) for step in done.steps], "seconds": done.seconds, "notes": done.notes,
                               "rates": asdict(done.rates), "tuning": asdict(done.tuning) if done.tuning else None}, indent=2))  # fmt: skip
    else:
        _print(done)


class _Plan:
    """Says on standard error what is to come, what is done, and how much time is left."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._left = 0.0

    def announce(self, steps: list[Step], resumed: bool) -> None:
        self._steps, self._left = steps, sum(step.seconds for step in steps)
        if resumed:
            remark("goes on where it was interrupted")
        for step in steps:
            remark(f"  {_time(step.seconds):>8}  {step.name}: {step.text}")
        remark(f"  {_time(self._left):>8}  in all" if steps else "nothing to measure: everything is there, and fits")

    def finished(self, name: str, seconds: float) -> None:
        self._left -= next((step.seconds for step in self._steps if step.name == name), 0.0)
        remark(f"{name}: done in {_time(seconds)}" + (f"; about {_time(self._left)} left" if self._left >= 1 else ""))


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def _print(done: Tuned) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140, highlight=False)
    for what, outcomes in done.outcomes.items():
        table = Table(title=what, title_justify="left", box=None, pad_edge=False, header_style="bold")
        for name in ("", "prompt tok/s", "tok/s", "times as fast", "peak"):
            table.add_column(name, justify="left" if not name else "right")
        for o in outcomes:
            speeds = [s for s in o.speeds if not s.error]
            if not speeds:
                table.add_row(o.candidate.name, "", "", o.error, "")
                continue
            gen = f"{sum(s.gen_tps for s in speeds) / len(speeds):.2f}" if speeds[0].gen_tps else ""
            spread = f" ({min(o.ratios):.2f}-{max(o.ratios):.2f})" if len(o.ratios) > 1 and o is not outcomes[0] else ""
            table.add_row(o.candidate.name, f"{sum(s.prompt_tps for s in speeds) / len(speeds):.1f}", gen, f"{o.ratio:.2f}{spread}",
                          format_size(max(s.peak_rss for s in speeds)))  # fmt: skip
        console.print(table)
        console.print()
    for note in done.notes:
        click.echo(note, err=True)
    if done.tuning is None:
        return
    click.echo(done.tuning.summary)
    click.echo(f"{done.path}: run, serve and Llama use it by themselves, with {format_size(done.tuning.memory)} or about as much; took {_time(done.seconds)}")
