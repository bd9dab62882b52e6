"""Reactions of a run to ranks that die, hang or lag, to bad steps, and to a machine that goes away."""
