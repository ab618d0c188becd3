"""Cache policies and predictors: which experts stay in memory, and which come next. One
file for each paper.

Knows no file, buffer, slot or thread: gate events come in, priorities and predictions
go out, the same live and simulated.
"""

from .. import _offer_modules

# Importing registers the policies.
from . import classic, edgemoe, fate, hobbit, promoe, score  # noqa: F401
from .base import CacheShape, FitOptions, GroupedPolicy, Policy, Prediction, Predictor
from .strategy import (
    POLICIES,
    PREDICTORS,
    PRESETS,
    Strategy,
    get_policy,
    get_predictor,
    get_strategy,
    policy_names,
    register,
    strategy_names,
)

__all__ = [
    "POLICIES",
    "PREDICTORS",
    "PRESETS",
    "CacheShape",
    "FitOptions",
    "GroupedPolicy",
    "Policy",
    "Prediction",
    "Predictor",
    "Strategy",
    "get_policy",
    "get_predictor",
    "get_strategy",
    "policy_names",
    "register",
    "strategy_names",
]

_offer_modules(globals())
