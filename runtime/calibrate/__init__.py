"""Measurements of the devices at hand, from kernels to whole steps, to which the cost model is fitted."""
