"""Seconds of operators, of collectives and of pipelines."""
