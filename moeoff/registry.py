"""Classes by name: what the registries of cache policies and of predictors have in common. Knows neither."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Generic, TypeVar

from .errors import OptionError

T = TypeVar("T")


class Registry(Generic[T]):
    """Subclasses of one base class by their `name`.

    Args:
        base: every class is a subclass of it.
        kind: what messages call an entry, as "policy".
        classes: the first entries.
        variants: names of a class with other options than its defaults: name -> (name of the class, options).
        reserved: names that mean something else.

    Attributes:
        classes: name -> class, without the variants, in the order of registration.
    """

    def __init__(self, base: type[T], kind: str, classes: Iterable[type[T]], *,
                 variants: Mapping[str, tuple[str, dict[str, Any]]] | None = None, reserved: Collection[str] = ()):  # fmt: skip
        self._base, self._kind, self._variants, self._reserved = base, kind, variants or {}, reserved
        self.classes: dict[str, type[T]] = {}
        for cls in classes:
            self.register(cls)

    def register(self, cls: type[T], replace: bool = False) -> type[T]:
        """Makes a class known by its `name`; `replace` allows the name of another class. Returns the class.

        Raises:
            OptionError: not a subclass of the base, no name, or the name is taken.
        """
        if not (isinstance(cls, type) and issubclass(cls, self._base)):
            raise OptionError(f"{cls!r} is not a subclass of {self._base.__module__.rpartition('.')[0]}.{self._base.__name__}")
        name: str = getattr(cls, "name", "")
        taken = name in self._variants or name in self._reserved or (name in self.classes and not replace)
        if not name or taken:
            raise OptionError(f"{cls.__name__} needs a `name` that is not taken: {name!r}")
        self.classes[name] = cls
        return cls

    def names(self) -> list[str]:
        """All names, the variants last."""
        return [*self.classes, *self._variants]

    def get(self, name: str) -> type[T]:
        """The class behind a name or a variant's.

        Raises:
            OptionError: there is none.
        """
        base = self._variants[name][0] if name in self._variants else name
        if base not in self.classes:
            raise OptionError(f"unknown {self._kind} {name!r}; there are: {', '.join(self.names())}")
        return self.classes[base]

    def options(self, name: str) -> dict[str, Any]:
        """What a variant sets; empty for any other name."""
        return dict(self._variants[name][1]) if name in self._variants else {}
