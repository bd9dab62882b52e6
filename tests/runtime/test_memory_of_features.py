"""What tapes play of memory equals the dry run for features that random examples seldom show."""

from __future__ import annotations

import pytest

from costmodels import Layout, ModelSpec, Router
from tests.support.played_memory import compare

DENSE = ModelSpec(
    name="dense",
    layers=2,
    hidden=1024,
    ffn=2048,
    heads=8,
    kv_heads=8,
    head_dim=128,
    vocab=8000,
    seq=512,
    max_positions=512,
)
ROUTED = ModelSpec.model_validate(
    DENSE.model_dump()
    | {
        "name": "routed",
        "seq": 1024,
        "max_positions": 1024,
        "gated": True,
        "activation": "silu",
        "norm": "rmsnorm",
        "experts": 8,
        "top_k": 2,
        "expert_ffn": 512,
        "shared_expert_ffn": 1024,
        "router": {"groups": 4, "top_groups": 2, "group_score": "top2", "expert_bias": True},
    }
)

GROUPED = DENSE.model_copy(update={"kv_heads": 2})

LAYERED = DENSE.model_copy(update={"layers": 3})

WIDE = ROUTED.model_copy(update={"ffn": 2048, "expert_ffn": 2048})

MIXED = ROUTED.model_copy(update={"dense_layers": 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "fields", "compiled"),
    [
        pytest.param(DENSE, {"optimizer": "muon", "zero_stage": 1}, False, id="muon"),
        pytest.param(DENSE, {"optimizer": "adafactor", "zero_stage": 3}, False, id="adafactor"),
        pytest.param(DENSE, {"optimizer": "came", "zero_stage": 1, "tensor_parallel": 2}, False, id="came"),
        pytest.param(DENSE, {"context_parallel": 2, "context_parallel_form": "ring"}, False, id="ring"),
        pytest.param(GROUPED, {"precision": "fp32"}, False, id="scores-of-attention"),
        pytest.param(DENSE, {"offload_optimizer": True, "zero_stage": 2}, False, id="offloaded-optimizer"),
        pytest.param(
            LAYERED, {"recompute": "full", "recompute_num_layers": 2, "zero_stage": 3}, False, id="layers"
        ),
        pytest.param(
            LAYERED,
            {"recompute": "full", "recompute_num_layers": 2, "zero_stage": 1},
            True,
            id="again-at-once",
        ),
        pytest.param(
            LAYERED, {"offload_activations": True, "zero_stage": 3}, True, id="offloaded-activations"
        ),
        pytest.param(
            LAYERED,
            {"data_parallel": 1, "global_batch_size": 4, "gradient_reduction": "bf16", "optimizer": "sgd"},
            True,
            id="chained-layers",
        ),
        pytest.param(DENSE, {"precision": "fp8", "tensor_parallel": 2}, True, id="fp8-of-split-layers"),
        pytest.param(ROUTED, {"expert_parallel": 2, "zero_stage": 1}, False, id="groups-of-experts"),
        pytest.param(ROUTED, {"precision": "fp16", "zero_stage": 3}, False, id="experts-one-by-one"),
        pytest.param(
            WIDE, {"precision": "fp32", "gradient_reduction": "bf16"}, False, id="narrowed-one-by-one"
        ),
        pytest.param(MIXED, {"recompute": "full", "zero_stage": 1}, True, id="compiled-experts-again"),
        pytest.param(
            ROUTED.model_copy(
                update={"top_k": 1, "router": Router(capacity_factor=0.5), "shared_expert_ffn": 0}
            ),
            {"precision": "fp32", "expert_parallel": 2, "tensor_parallel": 2},
            False,
            id="limited-experts-one-by-one",
        ),
        pytest.param(
            DENSE.model_copy(update={"kv_heads": 2, "head_dim": 64}),
            {"precision": "fp8", "tensor_parallel": 4, "global_batch_size": 16},
            False,
            id="shared-heads-in-fp8",
        ),
        pytest.param(
            DENSE.model_copy(
                update={
                    "hidden": 2048,
                    "heads": 16,
                    "kv_heads": 16,
                    "norm": "rmsnorm",
                    "position": "rope",
                    "qk_norm": True,
                    "qkv_bias": True,
                    "linear_bias": False,
                }
            ),
            {"precision": "fp8", "tensor_parallel": 2, "sequence_parallel": True, "zero_stage": 1},
            True,
            id="tables-of-wrapped-layers",
        ),
        pytest.param(
            DENSE.model_copy(update={"kv_heads": 2}),
            {"tensor_parallel": 2, "context_parallel": 2, "context_parallel_form": "all_to_all"},
            False,
            id="repeated-heads",
        ),
        pytest.param(
            ROUTED,
            {"expert_parallel": 4, "zero_stage": 3, "offload_optimizer": True},
            False,
            id="experts-of-one-rank",
        ),
    ],
)
def test_a_feature_is_played(model: ModelSpec, fields: dict[str, object], compiled: bool) -> None:
    if fields.get("precision") == "fp8":
        pytest.importorskip("torchao")
    layout = Layout.model_validate(
        {
            "layers_per_stage": (model.layers,),
            "data_parallel": 4,
            "precision": "bf16",
            "global_batch_size": 8,
            **fields,
        }
    )
    errors = compare(model, layout, 0, compiled)
    assert not errors.misses, (errors.misses, errors.peak, errors.by_kind, errors.traced)
