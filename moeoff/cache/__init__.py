"""What stays in memory: one small class for each policy. See `moeoff.cache.base` for what a policy is."""

from .base import Policy, Shape
from .registry import POLICIES, create, get_policy, names, register

__all__ = ["POLICIES", "Policy", "Shape", "create", "get_policy", "names", "register"]
