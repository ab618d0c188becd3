"""The files beside a model: its experts again in other precisions (the companion), and what was measured of it (the profile)."""

from .file import Companion

__all__ = ["Companion"]
