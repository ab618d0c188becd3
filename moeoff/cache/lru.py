"""Least recently used: what the buffer does when nobody tells it anything."""

from .base import Policy


class LRU(Policy):
    """A table of zeros: every priority ties, and ties go to the least recent use. Costs no Python at all."""

    name, summary, static = "lru", "keeps the most recently used experts", True
