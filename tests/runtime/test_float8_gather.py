"""Weights that FSDP2 gathers in 8 bits: the same numbers as gathered in 16."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks.parity import losses_of
from tests.support.worker_pool import WorkerPool

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("llama", "gbs=2,dp=2,zero=3"),
        ("llama", "gbs=8,dp=2,zero=1"),
        ("llama", "gbs=4,dp=2,zero=2,recompute=full"),
        ("gpt2", "gbs=8,dp=2,zero=3,gradient_reduction=bf16"),
        ("llama", "gbs=4,dp=2,zero=3,cp=2"),
        ("llama", "gbs=4,dp=4,zero=1,zero_replicas=2"),
        ("llama", "gbs=4,dp=2,zero=3,tp=2,sp=1"),
        ("gpt2", "gbs=8,dp=2,zero=1,pp=2"),
        ("gpt2", "gbs=8,dp=2,zero=1,pp=2,vpp=2,schedule=zbv"),
        ("mixtral", "gbs=4,dp=2,zero=3,ep=2"),
    ],
)
def test_losses_are_those_of_weights_that_are_gathered_in_bf16(
    pool: WorkerPool, model: str, text: str
) -> None:
    """To the bit: a weight is cast by the same scale, on one side of the gathering or on the other."""
    spec = MODELS[model]
    plain = parse_layout(f"{text},precision=fp8,fp8_recipe=tensorwise", spec)
    narrow = plain.model_copy(update={"fp8_param_gather": True})
    assert narrow.gathers_fp8
    losses = pool.run(losses_of, plain.world_size, spec, narrow, 4)
    assert losses == pool.run(losses_of, plain.world_size, spec, plain, 4)
