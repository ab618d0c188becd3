"""`moeoff models`."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from ..errors import MoeoffError
from ..system.console import progress_bar, table, table_console
from ..system.memory import Budget, format_size
from .inspect import speed_of
from .options import command, option

_PROBE_SECONDS = 0.4


@command()
@option(
    "--memory", metavar="SIZE", help="Memory limit of a run. Default: 80% of what is available."
)
@option(
    "--probe",
    type=click.Choice(["on", "off"]),
    default="on",
    show_default=True,
    help="Measure disk and CPU for each model's speed.",
)
@option("--json", "as_json", is_flag=True, help="Print JSON.")
def models(memory: str | None, probe: str, as_json: bool) -> None:
    """List the Mixture-of-Experts models on this machine, and whether they fit into
    memory.

    Found in the folders of Hugging Face, llama.cpp, Ollama and LM Studio, and in those
    that the variable MOEOFF_MODELS names. Commands take a part of a name as MODEL, if
    it is unique.
    """
    from ..budget.inspection import examine
    from ..gguf.local_models import local_models

    budget = Budget.of(memory).most
    found = []
    with progress_bar() as progress:
        for model in local_models():
            progress(f"looking at {model.name}", 0, 0)
            try:
                report = examine(
                    model.path, memory=budget, probe_disk=probe == "on", seconds=_PROBE_SECONDS
                )
            except MoeoffError:  # no routed experts, or damaged
                continue
            found.append((model, report, next(row for row in report.budgets if row.asked)))
    if as_json:
        rows = [
            asdict(model)
            | {"file_bytes": model.nbytes, "floor_bytes": report.floor_bytes}
            | {"fits": asked.fits, "resident_share": asked.resident_share, "tps": asked.tps}
            for model, report, asked in found
        ]
        return click.echo(json.dumps({"memory_bytes": budget, "models": rows}, indent=2))
    if not found:
        raise MoeoffError(
            "no Mixture-of-Experts model is found: moeoff run -hf ORG/REPO downloads one"
        )
    speeds = ["tokens/s"] if probe == "on" else []
    out = table("model", "size", "least --memory", f"experts in {format_size(budget)}", *speeds)
    for model, report, asked in found:
        sizes = format_size(model.nbytes), format_size(report.floor_bytes)
        told = (
            [f"{asked.resident_share:.0%}", speed_of(report, asked)]
            if asked.fits
            else ["does not fit"]
        )
        out.add_row(model.name, *sizes, *told)
    table_console().print(out)
