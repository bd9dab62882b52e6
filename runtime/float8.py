"""Matrix products in 8 bits, by torchao."""

from __future__ import annotations

from runtime.model import Transformer


def float8(stage: Transformer) -> None:
    """Let the linear layers of the blocks of `stage` multiply in fp8."""
