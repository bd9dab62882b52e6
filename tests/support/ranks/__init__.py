"""Functions that run on every rank of a worker pool."""
