"""Passes over text that measure a model: its profile, its perplexity, and what lower precision costs it."""

from .profile_fit import Calibrated, calibrate

__all__ = ["Calibrated", "calibrate"]
