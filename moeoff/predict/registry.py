"""Predictors by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..registry import Registry
from .base import Predictor
from .blend import Blend
from .gate import CrossLayerGate, StackedGate
from .learned import Learned
from .path import EAP, ActivationPath
from .router import Router
from .tokens import PreviousToken, TokenTable

_registry = Registry(Predictor, "predictor", (CrossLayerGate, StackedGate, ActivationPath, EAP, TokenTable, PreviousToken, Learned, Blend), reserved=("none",))
PREDICTORS = _registry.classes


def register(predictor: type[Predictor], replace: bool = False) -> type[Predictor]:
    """Makes a user's predictor known by its `name`, to POLICY+PREDICTOR and to `moeoff calibrate`. Works as a decorator.

    Raises:
        OptionError: no name, not a predictor, or the name is taken.
    """
    return _registry.register(predictor, replace)


def names() -> list[str]:
    """All names."""
    return _registry.names()


def get_predictor(name: str) -> type[Predictor]:
    """The class behind a name.

    Raises:
        OptionError: there is none.
    """
    return _registry.get(name)


def create(name: str, router: Router, arrays: Mapping[str, np.ndarray] | None = None, **options: Any) -> Predictor:
    """A new predictor of that name; `arrays`: its `profile_section` of a profile, if there is one."""
    return get_predictor(name)(router, arrays, **options)
