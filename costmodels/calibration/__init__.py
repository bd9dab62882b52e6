"""Constants of the devices at hand, fitted to measured kernels, collectives and steps."""
