"""Compute activations again in backward instead of keeping them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from costmodels import Layout
from runtime.model import Transformer


def recompute(stage: Transformer, layout: Layout) -> None:
    """Wrap what `layout` recomputes."""
    for block in stage.blocks:
        if layout.recompute == "full":
            _wrap(block)
        if layout.recompute == "selective":
            _wrap(block.attention.core)


def _wrap(module: nn.Module) -> None:
    forward = module.forward

    def again(*arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*arguments)
        return checkpoint(forward, *arguments, use_reentrant=False, preserve_rng_state=False)

    module.forward = again  # type: ignore[method-assign]
