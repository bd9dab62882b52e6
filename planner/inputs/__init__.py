"""Inputs of callers for a model, a cluster, a batch or a degree, resolved into the vocabulary."""
