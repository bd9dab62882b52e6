"""Constants of the devices at hand, fitted to kernels, collectives and steps that were measured on them."""
