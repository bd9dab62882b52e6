"""What the seconds of a step went to, as PyTorch's profiler sees them."""
