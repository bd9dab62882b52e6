"""Training of a `Plan` on PyTorch's distributed stack."""

import os

PARENT = os.getppid()
"""The process that started this one, noted before the imports of PyTorch, which take seconds."""
