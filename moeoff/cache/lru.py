"""Least recently used: the expert buffer's own eviction order."""

from .base import Policy


class LRU(Policy):
    """A table of zeros: every priority ties, and of equals the least recently used is evicted. No driver is attached for it."""

    name, summary, static = "lru", "keeps the most recently used experts", True
