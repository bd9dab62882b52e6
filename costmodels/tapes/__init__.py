"""Tapes of a model's units: what the runtime allocates and frees, recorded by the dry run, as data."""
