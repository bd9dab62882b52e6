"""PyTorch's number formats by their names in flags and layouts."""

from __future__ import annotations

import torch

WEIGHT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats of weights in computation, and in conversion of stored weights."""

DTYPES = {**WEIGHT_DTYPES, "fp8": torch.bfloat16, "mxfp8": torch.bfloat16}
"""Formats of activations; 8-bit formats are for GEMMs only."""

MXFP8_BLOCK = 32
"""Elements that share a scale in MXFP8; the sides of a matrix must be multiples of it."""

FLOAT8_SIDES = 16
"""Number of which both sides of an 8-bit matrix must be multiples, as kernels read 16 bytes at a time."""
