"""Keep in host memory what the device does not need at once."""

from __future__ import annotations

from costmodels import Layout
from runtime.model import Transformer


def offload_activations(stage: Transformer, layout: Layout) -> None:
    """Send what attention keeps for backward to host memory, and fetch it in time."""
