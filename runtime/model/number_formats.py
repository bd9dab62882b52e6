"""PyTorch's number formats by the names that flags and layouts have for them."""

from __future__ import annotations

import torch

WEIGHT_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Formats that weights are computed with, and that stored ones may be turned into."""

DTYPES = {**WEIGHT_DTYPES, "fp8": torch.bfloat16, "mxfp8": torch.bfloat16}
"""Formats of activations; those in 8 bits are of GEMMs only."""

MXFP8_BLOCK = 32
"""Elements that share a scale in MXFP8: what the sides of a matrix must be multiples of."""

FLOAT8_SIDES = 16
"""The number that divides both sides of a matrix in 8 bits: the kernels read 16 bytes at a time."""
