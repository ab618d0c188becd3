"""How an option is declared, as a field of a dataclass, and how what people write is read and spelled. `moeoff.options` has the table.

Light on purpose: `moeoff --help` imports this, and neither numpy nor llama.cpp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from .errors import OptionError
from .system.memory import MIB

if TYPE_CHECKING:
    from typing_extensions import Self

MOST = 2**31 - 1


# --- reading what people write; each raises ValueError or OptionError, without the option's name ---


def parse_switch(value: str | bool | int) -> bool:
    """True of on, 1 and True; False of off, 0 and False."""
    known = {"on": True, "1": True, "true": True, "off": False, "0": False, "false": False}
    if (switch := known.get(str(value).strip().lower())) is None:
        raise OptionError(f"on or off, not {value!r}")
    return switch


def integer(least: int, most: int = MOST) -> Callable[[Any], int]:
    def parse(value: str | int) -> int:
        try:
            parsed = int(value)
        except (ValueError, OverflowError):
            raise OptionError(f"a whole number, not {value!r}") from None
        if not least <= parsed <= most:
            raise OptionError(f"at least {least}, not {parsed}" if most == MOST and parsed < least else f"{least} to {most}, not {parsed}")
        return parsed

    return parse


def number(least: float | None = None, most: float | None = None, above: float | None = None) -> Callable[[Any], float]:
    def parse(value: str | float) -> float:
        try:
            parsed = float(value)
        except (ValueError, OverflowError):
            parsed = math.nan
        if not math.isfinite(parsed):
            raise OptionError(f"a number, not {value!r}")
        if above is not None and parsed <= above:
            raise OptionError(f"more than {above:g}, not {value}")
        if (least is not None and parsed < least) or (most is not None and parsed > most):
            raise OptionError(f"at least {least:g}, not {value}" if most is None else f"{least:g} to {most:g}, not {value}")
        return parsed

    return parse


def one_of(names: tuple[str, ...], numbers: Mapping[str, int] | None = None) -> Callable[[Any], str | None]:
    """A name; llama.cpp's number of one, and None or False for none, are taken, too."""

    def parse(value: Any) -> str | None:
        if value is False:
            return None
        if isinstance(value, int) and numbers:
            value = next((name for name, number in numbers.items() if number == value), value)
        if str(value).lower() not in names:
            raise OptionError(f"one of {', '.join(names)}, not {value!r}")
        return str(value).lower()

    return parse


@dataclass(frozen=True)
class Option:
    """One line of the table.

    Attributes:
        name: in Python.
        flags: on the command line: llama.cpp's, where it has the option. None: Python's alone.
        help: one sentence; the default is said here where it is no plain value.
        metavar: of the value in `--help`; "" for a flag, which takes none.
        parse: of what was given, a string or already a value.
        commands: that take it.
        group: heading in `--help`; "" is for what people use first.
        default: in Python.
        usual: in the commands, where it is another one.
        choices: for help and completion.
        multiple: may be given several times.
        server: llama-server's name of it.
        llama: an argument of llama_cpp.Llama; `number` makes its value of ours.
        unset: llama_cpp.Llama's number for a value that was not given, which programs may pass.
        envvar: that gives it, too.
        is_file: for completion.
        hidden: left out of help.
    """

    flags: tuple[str, ...]
    help: str
    metavar: str = ""
    parse: Callable[[Any], Any] = str
    commands: tuple[str, ...] = ()
    group: str = ""
    default: Any = None
    usual: Any = None
    choices: tuple[str, ...] = ()
    multiple: bool = False
    server: str = ""
    llama: bool = False
    number: Callable[[Any], Any] | None = None
    unset: int | None = None
    envvar: str | None = None
    is_file: bool = False
    hidden: bool = False
    name: str = ""

    @property
    def flag(self) -> str:
        """The longest, for sentences."""
        return max(self.flags, key=len, default=self.name)

    def read(self, value: Any) -> Any:
        """The value of what was given.

        Raises:
            OptionError: it makes no sense; the message names the option.
        """
        if self.unset is not None and value == self.unset and not isinstance(value, (str, bool)):
            return None
        try:
            if self.multiple:
                return tuple(map(self.parse, [value] if isinstance(value, str) else value))
            return self.parse(value)
        except OptionError as error:
            raise OptionError(f"`{self.name}`: {error.message}", hint=error.hint) from None
        except (ValueError, TypeError) as error:
            raise OptionError(f"`{self.name}`: {error}") from None

    def spell(self, value: Any) -> str:
        """A value as people write it."""
        if self.metavar == "SIZE" and isinstance(value, int):
            return f"{-(-value // MIB)}M"
        if self.metavar == "PERCENT" and isinstance(value, float):
            return f"{100 * value:g}%"
        if isinstance(value, bool):
            return "on" if value else "off"
        return ",".join(str(item) for item in value) if isinstance(value, (list, tuple)) else str(value)

    def server_arguments(self, value: Any) -> list[str]:
        """llama-server's, of a value that is not the default."""
        if not self.server or value is None or value == "" or (value is False and not self.metavar):
            return []
        return [self.server] if not self.metavar else [self.server, self.spell(value)]


def option(*flags: str, commands: str = "", default: Any = None, server: str | bool = "", **line: Any) -> Any:
    """A field that is an option; `Option` says what the arguments are. Without a metavar it is a flag: given or not. server=True: by the first flag's name."""
    if not line.get("metavar"):
        line["parse"] = parse_switch
    line["server"] = flags[0] if server is True else server
    return field(default=default, metadata={"option": Option(flags=flags, commands=tuple(commands.split()), default=default, **line)})


@functools.cache
def table_of(kind: type) -> dict[str, Option]:
    """The options that are declared in a class, by name in Python."""
    return {f.name: replace(f.metadata["option"], name=f.name) for f in fields(kind) if "option" in f.metadata}


def read(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values that a class has a field for, read; what is None was not given."""
    table = table_of(kind)
    names = {f.name for f in fields(kind)}
    return {name: table[name].read(value) if name in table else value for name, value in values.items() if name in names and value is not None}


class Options:
    """Base of a dataclass whose fields are options."""

    @classmethod
    def make(cls, **options: Any) -> Self:
        """Reads values as people write them. Raises OptionError for one that makes no sense."""
        return cls(**read(cls, options))
