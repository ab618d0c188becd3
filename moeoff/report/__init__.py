"""A page about one run of a model: where memory and time went, and what more memory would give."""

from .page import write_report

__all__ = ["write_report"]
