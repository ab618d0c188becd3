"""Cache policies and predictors, a file for each paper.

They map gate events to priorities and predictions, live or simulated, independent of
files, buffers and threads.
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
