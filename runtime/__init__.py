"""Training of a `Plan` on PyTorch's distributed stack."""
