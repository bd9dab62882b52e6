"""Callers' inputs for a model, a cluster, a batch or a degree, resolved into records of `costmodels.spec`."""
