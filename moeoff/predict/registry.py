"""Predictors by name."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..errors import OptionError
from .base import Predictor
from .blend import Blend
from .gate import CrossLayerGate, StackedGate
from .learned import Learned
from .path import EAP, ActivationPath
from .router import Router
from .tokens import PreviousToken, TokenTable

PREDICTORS: dict[str, type[Predictor]] = {p.name: p for p in (CrossLayerGate, StackedGate, ActivationPath, EAP, TokenTable, PreviousToken, Learned, Blend)}


def register(predictor: type[Predictor], replace: bool = False) -> type[Predictor]:
    """Makes a user's predictor known by its `name`. Works as a decorator.

    Raises:
        OptionError: no name, not a predictor, or the name is taken.
    """
    if not (isinstance(predictor, type) and issubclass(predictor, Predictor)):
        raise OptionError(f"{predictor!r} is not a subclass of moeoff.predict.Predictor")
    if not predictor.name or (predictor.name in PREDICTORS and not replace):
        raise OptionError(f"{predictor.__name__} needs a `name` that is not taken: {predictor.name!r}")
    PREDICTORS[predictor.name] = predictor
    return predictor


def names() -> list[str]:
    return list(PREDICTORS)


def get_predictor(name: str) -> type[Predictor]:
    """The class behind a name.

    Raises:
        OptionError: there is none.
    """
    if name not in PREDICTORS:
        raise OptionError(f"unknown predictor {name!r}; there are: {', '.join(PREDICTORS)}")
    return PREDICTORS[name]


def create(name: str, router: Router, arrays: Mapping[str, np.ndarray] | None = None, **options) -> Predictor:
    """A new predictor of that name; `arrays`: its `profile_section` of a profile, if there is one."""
    return get_predictor(name)(router, arrays, **options)
