"""Measurements of the devices at hand, from kernels to whole steps, that the cost model is fitted to."""
