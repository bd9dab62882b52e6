"""Degrees of freedom that are solved instead of enumerated: splits, recomputation, copies, offloading."""
