"""Helpers of several test files. No test imports from another test."""
