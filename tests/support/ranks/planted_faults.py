"""Errors of a runtime that a comparison of layouts must find."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

from torch.distributed.tensor import DTensor

from costmodels import Layout, ModelSpec
from runtime.optimizers.shards import ParameterShard, ShardedOptimizer
from runtime.train.trainer import Trainer
from tests.support.ranks.parity import Training, trained


def _scaled_gradients(factor: float) -> Any:
    """Gradients that are wrong by a factor, which Adam alone would hide."""
    collect = ShardedOptimizer.collect_gradients

    def wrong(self: ShardedOptimizer) -> None:
        collect(self)
        for owned in self.owned:
            if owned.shard.grad is not None:
                owned.shard.grad.mul_(factor)

    return patch.object(ShardedOptimizer, "collect_gradients", wrong)


def _unsummed_gradients() -> Any:
    """Norms of sequence-parallel ranks keep the part of the gradient that is of their own tokens."""
    collect = ShardedOptimizer.collect_gradients

    def wrong(self: ShardedOptimizer) -> None:
        with patch.object(DTensor, "redistribute", lambda gradient, **_: gradient):
            collect(self)

    return patch.object(ShardedOptimizer, "collect_gradients", wrong)


FAULTS: dict[str, Callable[[], Any]] = {
    "gradients twice as large": lambda: _scaled_gradients(2.0),
    "gradients averaged over data-parallel ranks": lambda: _scaled_gradients(0.5),
    "decay of biases and norms": lambda: patch.object(ParameterShard, "decayed", True),
    "no clipping": lambda: patch.object(Trainer, "_clip", lambda *_: None),
    "gradients of norms not summed": _unsummed_gradients,
}


def wrongly_trained(fault: str, spec: ModelSpec, layout: Layout, steps: int) -> Training:
    """A training with one of `FAULTS`."""
    with FAULTS[fault]():
        return trained(spec, layout, steps)
