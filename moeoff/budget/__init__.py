"""Budgets of memory and of quality loss. Nothing here loads or runs a model."""
