"""The command `moeoff`: one file for each of its commands, which parses, calls one library function, and prints."""

from __future__ import annotations

import click

from .. import __version__
from .bench import bench
from .calibrate import calibrate
from .convert import convert
from .doctor import doctor
from .eval import eval_
from .inspect import inspect
from .merge import merge
from .options import CONTEXT
from .report import report
from .run import run
from .serve import serve
from .shell_completion import shell_completion
from .simulate import simulate
from .tune import tune
from .verify import verify


@click.group(context_settings=CONTEXT)
@click.version_option(__version__, prog_name="moeoff")
def main() -> None:
    """Mixture-of-Experts models (GGUF) in less memory than they need."""


for _command in (run, serve, tune, bench, report, inspect, doctor, convert, merge, verify, eval_, calibrate, simulate, shell_completion):
    main.add_command(_command)
