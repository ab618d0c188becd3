"""Which experts come next: one small class for each predictor. See `moeoff.predict.base` for what a predictor is."""

from .base import FitOptions, Prediction, Predictor, top_k, widened
from .registry import PREDICTORS, create, get_predictor, names, register

__all__ = ["PREDICTORS", "FitOptions", "Prediction", "Predictor", "create", "get_predictor", "names", "register", "top_k", "widened"]
