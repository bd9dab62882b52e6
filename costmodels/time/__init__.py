"""Seconds of units, of pipelines and of data-parallel communication, and the uncertainty of estimates."""
