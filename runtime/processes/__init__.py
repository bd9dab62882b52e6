"""Processes of one job: their start, their ties, and variables of launchers."""
