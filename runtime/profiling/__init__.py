"""Seconds of a step by part, from PyTorch's profiler."""
