"""Reasons for the rank of a plan, and the gain of changes."""
