"""What stays in memory: one small class for each policy. See `moeoff.cache.base` for what a policy is."""

from .base import Policy, Sections, Shape
from .registry import POLICIES, create, get_policy, names, register

__all__ = ["POLICIES", "Policy", "Sections", "Shape", "create", "get_policy", "names", "register"]
