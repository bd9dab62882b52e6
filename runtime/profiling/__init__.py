"""Seconds of a step by part, as PyTorch's profiler sees them."""
