"""The sharded AdamW against PyTorch's own on the whole model."""

from __future__ import annotations

import pytest
import torch

from benchmarks.parity import MODELS, parse_layout
from benchmarks.worker_pool import WorkerPool
from runtime.optimizer import clip_factor, is_decayed
from runtime.options import TrainingOptions
from tests.runtime import rank_work


@pytest.mark.parametrize("clip_grad", [0.05, 0.0], ids=["clipped", "unclipped"])
@pytest.mark.parametrize(
    ("model", "text"), [("gpt2", ""), ("llama", ""), ("gpt2", "dp=2,zero=1"), ("llama", "tp=2")]
)
def test_steps_are_those_of_pytorchs_adamw(pool: WorkerPool, model: str, text: str, clip_grad: float) -> None:
    spec = MODELS[model]
    layout = parse_layout("gbs=4" + ("," + text if text else ""), spec)
    options = TrainingOptions(
        train_iters=4,
        lr=1e-2,
        lr_warmup_iters=2,
        weight_decay=0.5,
        adam_beta2=0.95,
        # Large enough that the rounding of gradients which are zero in theory is not blown up to a step.
        adam_eps=1e-4,
        clip_grad=clip_grad,
    )
    for steps in pool.run(rank_work.adamw_steps, layout.world_size, spec, layout, options):
        assert len(steps) == 4
        for norm, expected, differences in steps:
            assert norm == pytest.approx(expected, rel=1e-5)
            assert norm > 0.05
            assert differences and max(differences.values()) < 2e-5, differences


def test_gradients_are_clipped_as_pytorch_does() -> None:
    for norm, limit in ((10.0, 1.0), (0.5, 1.0), (1.0, 1.0), (0.0, 1.0)):
        weight = torch.nn.Parameter(torch.zeros(1))
        weight.grad = torch.tensor([norm])
        torch.nn.utils.clip_grad_norm_([weight], limit)
        assert weight.grad.item() == pytest.approx(norm * clip_factor(torch.tensor(norm), limit).item())


@pytest.mark.parametrize(
    ("name", "shape", "decayed"),
    [
        ("layers.0.mlp.up.weight", (4, 4), True),
        ("embedding.positions.weight", (4, 4), True),
        ("layers.0.mlp.up.bias", (4,), False),
        ("layers.0.mlp_norm.weight", (4,), False),
        ("norm.bias", (4,), False),
    ],
)
def test_weight_decay_leaves_out_biases_and_norms(name: str, shape: tuple[int, ...], decayed: bool) -> None:
    assert is_decayed(name, torch.zeros(shape)) is decayed
