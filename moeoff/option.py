"""Declaration of options as dataclass fields, and parsing and spelling of their values.

`moeoff --help` imports this module, which imports neither numpy nor llama.cpp. The
table of options is in `moeoff.options`.
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


# --- parsers; their errors, ValueError or OptionError, do not name the option ---


def parse_switch(value: str | bool | int) -> bool:
    """Parse on, 1 or True, and off, 0 or False."""
    known = {"on": True, "1": True, "true": True, "off": False, "0": False, "false": False}
    if (switch := known.get(str(value).strip().lower())) is None:
        raise OptionError(f"expected on or off, got {value!r}")
    return switch


def integer(least: int, most: int = MOST) -> Callable[[Any], int]:
    def parse(value: str | int) -> int:
        try:
            parsed = int(value)
        except (ValueError, OverflowError):
            raise OptionError(f"expected a whole number, got {value!r}") from None
        if not least <= parsed <= most:
            has_most = most != MOST or parsed > most
            expected = f"{least} to {most}" if has_most else f"at least {least}"
            raise OptionError(f"expected {expected}, got {parsed}")
        return parsed

    return parse


def number(
    least: float | None = None, most: float | None = None, above: float | None = None
) -> Callable[[Any], float]:
    def parse(value: str | float) -> float:
        try:
            parsed = float(value)
        except (ValueError, OverflowError):
            parsed = math.nan
        if not math.isfinite(parsed):
            raise OptionError(f"expected a number, got {value!r}")
        if above is not None and parsed <= above:
            raise OptionError(f"must be greater than {above:g}, got {value}")
        if (least is not None and parsed < least) or (most is not None and parsed > most):
            expected = f"at least {least:g}" if most is None else f"{least:g} to {most:g}"
            raise OptionError(f"expected {expected}, got {value}")
        return parsed

    return parse


def one_of(
    names: tuple[str, ...], numbers: Mapping[str, int] | None = None
) -> Callable[[Any], str | None]:
    """Return a parser of names, llama.cpp's numbers for them, and False for none."""

    def parse(value: Any) -> str | None:
        if value is False:
            return None
        if isinstance(value, int) and numbers:
            value = next((name for name, number in numbers.items() if number == value), value)
        if str(value).lower() not in names:
            raise OptionError(f"expected one of {', '.join(names)}, got {value!r}")
        return str(value).lower()

    return parse


@dataclass(frozen=True)
class Option:
    """An option of the table.

    Attributes:
        flags: Flags on the command line, empty for options of Python alone.
        help: One sentence, with the default if that is no plain value.
        metavar: Name of the value in `--help`, empty for flags without one.
        group: Heading in `--help`, empty for the most important options.
        usual: Default of the commands if it is another one.
        choices: Values for help and completion.
        server: llama-server's flag.
        llama: True for an argument of llama_cpp.Llama; `number` converts to its value.
        unset: llama_cpp.Llama's number for an unset value.
        is_file: True to complete file names.
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
        """The longest flag, for messages."""
        return max(self.flags, key=len, default=self.name)

    def read(self, value: Any) -> Any:
        """Parse a value, or raise OptionError with the option's name."""
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
        """Return a value as users write it."""
        if self.metavar == "SIZE" and isinstance(value, int):
            return f"{-(-value // MIB)}M"
        if self.metavar == "PERCENT" and isinstance(value, float):
            return f"{100 * value:g}%"
        if isinstance(value, bool):
            return "on" if value else "off"
        return (
            ",".join(str(item) for item in value)
            if isinstance(value, (list, tuple))
            else str(value)
        )

    def server_arguments(self, value: Any) -> list[str]:
        """Return llama-server's arguments for a value other than the default."""
        if not self.server or value is None or value == "" or (value is False and not self.metavar):
            return []
        return [self.server] if not self.metavar else [self.server, self.spell(value)]


def option_field(
    *flags: str, commands: str = "", default: Any = None, server: str | bool = "", **line: Any
) -> Any:
    """Return a dataclass field with an `Option` of these attributes.

    Args:
        server: llama-server's flag, True for the first of `flags`.
    """
    if not line.get("metavar"):
        line["parse"] = parse_switch
    line["server"] = flags[0] if server is True else server
    line |= {"flags": flags, "commands": tuple(commands.split()), "default": default}
    return field(default=default, metadata={"option": Option(**line)})


@functools.cache
def table_of(kind: type) -> dict[str, Option]:
    """Return a class's options by name in Python."""
    return {
        f.name: replace(f.metadata["option"], name=f.name)
        for f in fields(kind)
        if "option" in f.metadata
    }


def read(kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Parse the values of a class's fields; None stands for absent ones."""
    table = table_of(kind)
    names = {f.name for f in fields(kind)}
    return {
        name: table[name].read(value) if name in table else value
        for name, value in values.items()
        if name in names and value is not None
    }


class Options:
    """Base of a dataclass whose fields are options."""

    @classmethod
    def make(cls, **options: Any) -> Self:
        """Create an object of values that users write, or raise OptionError."""
        return cls(**read(cls, options))
