"""A feature of the block that nobody else knows of: the dry run has exactly its bytes."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from costmodels import Layout, ModelSpec
from runtime.dryrun.memory_trace import block_bytes
from runtime.dryrun.run import trace
from runtime.model import transformer
from runtime.model.norms import make_norm
from tests.support.models import LLAMA

MODEL = LLAMA.model_copy(update={"hidden": 512, "ffn": 1024, "seq": 256})

LAYOUT = Layout(
    layers_per_stage=(MODEL.layers,), data_parallel=2, zero_stage=1, global_batch_size=4, precision="bf16"
)


class SecondNorm(transformer.Block):
    """A layer whose output is normalised once more."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__(spec, layer)
        self.second_norm = make_norm(spec)

    @property
    def norms(self) -> list[nn.Module]:
        return [*super().norms, self.second_norm]

    def forward(self, x_BSD: Tensor) -> Tensor:
        result: Tensor = self.second_norm(super().forward(x_BSD))
        return result


def forward_peak() -> dict[str, int]:
    """Bytes by category at the highest moment of forward."""
    return dict(trace(MODEL, LAYOUT, compiled=False).moments["forward"].allocated)


def test_a_second_norm_is_in_the_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    before = forward_peak()
    monkeypatch.setattr(transformer, "Block", SecondNorm)
    after = forward_peak()
    tokens = MODEL.seq
    # The block keeps its input in 16 bits, and the root of a mean of each token in 32.
    kept = block_bytes(2 * tokens * MODEL.hidden) + block_bytes(4 * tokens)
    assert after["activations"] - before["activations"] == MODEL.layers * kept
    # A weight: half of it in fp32 on each of two ranks, with Adam's moments.
    master = block_bytes(4 * MODEL.hidden // 2)
    assert after["parameters"] - before["parameters"] == MODEL.layers * master
    assert after["optimizer"] - before["optimizer"] == MODEL.layers * (2 * master + block_bytes(4))
