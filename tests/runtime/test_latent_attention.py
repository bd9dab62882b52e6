"""Latent attention, and norms of queries and keys, compute the same however heads and tokens are split."""

from __future__ import annotations

from typing import Any

import pytest

from costmodels import LatentAttention, ModelSpec
from tests.support.gradients import check_gradients
from tests.support.layouts import parse_layout
from tests.support.models import LLAMA, MODELS
from tests.support.ranks.training import curve_and_gradients
from tests.support.worker_pool import WorkerPool

STEPS = 3


def latent(**sizes: int) -> ModelSpec:
    """Two dense layers of the small DeepSeek, with other sizes of attention."""
    spec = MODELS["deepseek"]
    assert spec.latent_attention is not None
    fields = {**spec.latent_attention.model_dump(), **sizes}
    return spec.model_copy(
        update={"layers": 2, "experts": 0, "latent_attention": LatentAttention.model_validate(fields)}
    )


def normed(**fields: Any) -> ModelSpec:
    """Two dense layers with norms of queries and keys."""
    return LLAMA.model_copy(update={"layers": 2, "qk_norm": True, "head_dim": 16, **fields})


SPECS = {
    "latent": latent(),
    "whole queries": latent(q_lora_rank=0),
    "wide values": latent(v_head_dim=40),
    "biased latent": latent().model_copy(update={"linear_bias": True}),
    "normed": normed(),
    "shared normed": normed(kv_heads=2, qkv_bias=True),
}

SPLITS = ("tp=2", "tp=2,sp=1", "cp=2,cp_form=all_gather", "cp=2,cp_form=all_to_all", "cp=2,cp_form=ring")

CASES = (
    *((name, text) for name in ("latent", "whole queries", "wide values", "normed") for text in SPLITS),
    ("biased latent", "tp=2"),
    ("biased latent", "tp=2,sp=1"),
    ("shared normed", "tp=4,sp=1"),
    ("latent", "tp=2,sp=1,cp=2,cp_form=ring"),
    ("wide values", "tp=2,cp=2,recompute=full"),
    ("latent", "tp=2,sp=1,recompute=selective,recompute_modules=norm;core_attention"),
    ("wide values", "pp=2,offload_activations=1"),
    ("latent", "dp=2,zero=3"),
)


@pytest.fixture(scope="module")
def references(pool: WorkerPool) -> dict[str, tuple[Any, Any]]:
    """Losses and gradients of one rank, by model."""
    alone = {name: parse_layout("gbs=4", spec) for name, spec in SPECS.items()}
    return {
        name: pool.run(curve_and_gradients, 1, spec, alone[name], STEPS)[0] for name, spec in SPECS.items()
    }


@pytest.mark.parametrize(("name", "text"), CASES, ids=[f"{name} {text}" for name, text in CASES])
def test_split_attention_trains_like_one_rank(
    pool: WorkerPool, references: dict[str, tuple[Any, Any]], name: str, text: str
) -> None:
    spec = SPECS[name]
    losses, gradients = references[name]
    layout = parse_layout("gbs=4," + text, spec)
    ranks = pool.run(curve_and_gradients, layout.world_size, spec, layout, STEPS)
    for curve, found in ranks:
        assert curve == ranks[0][0]
        assert curve == pytest.approx(losses, rel=1e-5)
        check_gradients(spec, found, gradients)
    assert set(gradients) <= {name for _, found in ranks for name in found}
