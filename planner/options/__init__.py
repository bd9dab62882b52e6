"""Inputs of a user (flags, pins, models, devices, batches), resolved into the records of
`costmodels.spec`."""
