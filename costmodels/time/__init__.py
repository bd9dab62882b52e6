"""Seconds of units, of pipelines, of the exchange of data-parallel ranks, and how sure they are."""
