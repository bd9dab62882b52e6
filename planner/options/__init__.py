"""Inputs of a user: flags, pins, models, devices and batches, resolved into the vocabulary."""
