"""Budgets of memory and of lost quality. Numbers in, decisions out; nothing here loads or runs a model."""
