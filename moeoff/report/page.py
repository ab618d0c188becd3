"""The page itself: HTML that needs no network and no script, and can be read on a phone."""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

import jinja2

from .. import __version__
from ..bench.rows import model_facts
from ..cpu import machine_name
from ..memory import format_size
from . import figures
from .figures import Session, record


def write_report(
    model: str, *, memory: str | int | None = None, text: str | None = None, progress: Callable[[str, int, int], None] | None = None, **options: Any
) -> str:
    """Runs the model and returns the page; arguments are those of `record`."""
    return render(record(model, memory=memory, text=text, progress=progress, **options))


def render(session: Session) -> str:
    """HTML of a recorded session."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    environment.filters["size"] = format_size
    template = environment.from_string((importlib.resources.files(__package__) / "page.html.jinja").read_text(encoding="utf-8"))
    more = figures.more_memory(session)
    facts = model_facts(session.model_index.files[0])
    n = session.n_tokens
    return template.render(
        version=__version__,
        date=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        machine=machine_name(),
        model=os.path.basename(session.model_index.files[0]),
        facts=facts,
        s=session,
        prompt_tps=n[0] / session.seconds[0] if session.seconds[0] else 0.0,
        tps=n[1] / session.seconds[1],
        mb_per_token=session.decode.bytes_read / 1e6 / n[1],
        ceiling=figures.ceiling(session),
        stall=min(session.decode.stall_seconds / session.seconds[1], 1.0),
        memory=figures.memory_parts(session),
        time=figures.time_parts(session),
        layers=figures.layers(session),
        more=more,
        advice=figures.advice(more),
        timeline=figures.timeline(session),
    )
