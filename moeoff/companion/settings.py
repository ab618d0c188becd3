"""Settings: what `moeoff tune` found to be best for a model on this machine, in one JSON file beside it.

One entry for each memory budget that was tuned for, with the reason of every choice. Bound to the model by a hash of samples of its
experts, and to the machine by its processor. Knows nothing of what the options mean.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..atomic_file import atomic_file
from ..errors import ModelError
from ..gguf.layout import Layout
from ..gguf.split_name import model_stem
from ..memory import format_size
from .beside import existing_path
from .file import source_sample

__all__ = ["OPTIONS", "VERSION", "Choice", "Settings", "Tuning", "settings_path"]

VERSION = 1
OPTIONS = ("strategy", "profile", "n_lanes", "n_ubatch", "type_k", "type_v", "max_loss")  # that may be chosen
CHANGE_RESULTS = ("n_ubatch", "type_k", "type_v", "max_loss")  # of these, what changes the text, if only by rounding
NEAR = 1.35  # times: budgets that are not farther apart have the same best settings


def settings_path(model: str | os.PathLike[str]) -> str:
    """Where a model's settings are looked for first: MODEL.moeoff.json, without the number of a first part."""
    return model_stem(model) + ".moeoff.json"


@dataclass(frozen=True)
class Choice:
    """A value for an option, and why."""

    value: Any
    reason: str


@dataclass(frozen=True)
class Tuning:
    """What was found for one budget.

    Attributes:
        memory: the budget, in bytes.
        machine: where it was measured.
        date: of the measurement.
        devices: what lies on GPUs, as `Config.devices` says it; empty: nothing.
        choices: by option, those of OPTIONS that differ from the defaults or were confirmed.
        measured: figures, for people.
    """

    memory: int
    machine: str
    date: str
    choices: dict[str, Choice]
    measured: dict[str, Any] = field(default_factory=dict)
    devices: str = ""

    @property
    def summary(self) -> str:
        """One line."""
        said = "; ".join(f"{_said(name, choice.value)} ({choice.reason})" for name, choice in self.choices.items())
        budget = format_size(self.memory) + (f" with {self.devices}" if self.devices else "")
        return f"tuned {self.date} for {budget}: {said or 'the defaults are best'}"


def _said(name: str, value: Any) -> str:
    words = {"strategy": "strategy {}", "n_lanes": "{} I/O workers", "n_ubatch": "prompts in pieces of {}", "type_k": "keys in {}", "type_v": "values in {}"}
    if name == "max_loss":
        return f"at most {100 * value:g} % lost"
    if name == "profile":
        return "with the profile" if value else "without the profile"
    return words[name].format(value)


@dataclass(frozen=True)
class Settings:
    """The file.

    Attributes:
        path: where it was found; empty if it is new.
    """

    path: str
    tunings: tuple[Tuning, ...]

    @classmethod
    def find(cls, layout: Layout) -> Settings | None:
        """The settings beside a model, or in the cache folder where nothing can be written beside it; None if there are none.

        Raises:
            ModelError: as `read`.
        """
        path = existing_path(settings_path(layout.files[0]), layout, "settings", "json")
        return cls.read(path, layout) if path is not None else None

    @classmethod
    def read(cls, path: str | os.PathLike[str], layout: Layout) -> Settings:
        """
        Raises:
            ModelError: missing, damaged, of another version, or of another model.
        """
        path = os.fspath(path)
        try:
            with open(path, encoding="utf-8") as file:
                fields = json.load(file)
            if fields["moeoff_settings"] != VERSION:
                raise ModelError(f"{path}: settings of version {fields['moeoff_settings']}, this moeoff reads {VERSION}: run moeoff tune again")
            if fields["source"] != source_sample(layout):
                raise ModelError(f"{path}: is of another model ({fields['model']}), not of {layout.files[0]}: run moeoff tune, or move it away")
            return cls(path, tuple(_tuning(entry) for entry in fields["tunings"]))
        except OSError as error:
            raise ModelError(f"{path}: cannot be read: {error.strerror or error}") from None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ModelError(f"{path}: the settings are damaged ({type(error).__name__}: {error}): delete the file, or run moeoff tune again") from None

    def best(self, memory: int, machine: str, devices: str = "") -> tuple[Tuning | None, str]:
        """The tuning for a budget and what lies on GPUs, or None and why there is none."""
        here = [t for t in self.tunings if t.machine == machine]
        if not here:
            return None, f"{self.path} was tuned on another machine: not used; run moeoff tune here"
        known = ", ".join(dict.fromkeys(_with(t.devices) for t in here))
        here = [t for t in here if t.devices == devices]
        if not here:
            return None, f"tuned {known}, not {_with(devices)}: defaults are used; run moeoff tune with the same options"
        nearest = min(here, key=lambda t: max(t.memory / memory, memory / t.memory))
        if max(nearest.memory / memory, memory / nearest.memory) > NEAR:
            known = ", ".join(format_size(t.memory) for t in sorted(here, key=lambda t: t.memory))
            return None, f"tuned for {known}, not for {format_size(memory)}: defaults are used; run moeoff tune --memory"
        return nearest, ""

    @classmethod
    def write(cls, path: str | os.PathLike[str], layout: Layout, tuning: Tuning) -> Settings:
        """Adds a tuning, in the place of earlier ones for the same budget and devices on the same machine; makes the file if there is none.

        Raises:
            ModelError: what is there is no settings file of this model.
            WriteError: it cannot be written.
        """
        path = os.fspath(path)
        old = cls.read(path, layout).tunings if os.path.exists(path) else ()
        kept = [t for t in old if (t.machine, t.memory, t.devices) != (tuning.machine, tuning.memory, tuning.devices)]
        tunings = tuple(sorted([*kept, tuning], key=lambda t: (t.machine, t.memory, t.devices)))
        fields = {
            "moeoff_settings": VERSION,
            "model": os.path.basename(layout.files[0]),
            "source": source_sample(layout),
            "tunings": [asdict(t) for t in tunings],
        }
        with atomic_file(path) as file:
            file.write((json.dumps(fields, indent=2) + "\n").encode())
        return cls(path, tunings)


def _with(devices: str) -> str:
    return f"with {devices}" if devices else "without a GPU"


def _tuning(entry: Mapping[str, Any]) -> Tuning:
    choices = {name: Choice(value["value"], str(value["reason"])) for name, value in entry["choices"].items()}
    unknown = sorted(set(choices) - set(OPTIONS))
    if unknown:
        raise ValueError(f"no option {unknown[0]}")
    memory = entry["memory"]
    if not isinstance(memory, int) or memory <= 0:
        raise ValueError(f"a memory of {memory!r}")
    return Tuning(memory, str(entry["machine"]), str(entry["date"]), choices, dict(entry.get("measured", {})), str(entry.get("devices", "")))
