"""Ranks on this machine, started, watched and ended together."""
