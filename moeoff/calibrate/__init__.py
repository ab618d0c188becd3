"""Passes over text that measure a model: its profile, its perplexity, and what lower precision costs it."""

from .profile_fit import Calibrated, Effort, calibrate

__all__ = ["Calibrated", "Effort", "calibrate"]
