"""Comparisons: one question each, from runs to tables."""
