"""DeepSeek-V4's attention to windows and compressed entries, and its hyper-connections."""

import math
from typing import Any, cast

import numpy as np
import pytest
from pydantic import ValidationError

from costmodels.layers.operators import layer
from costmodels.memory.unit_sizes import rank_parameters, unit_sizes
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_flops import flops_per_sequence
from costmodels.spec.model_parts import AttentionKind
from costmodels.spec.table import LayoutTable
from costmodels.time.bubble import message_seconds
from tests.costmodels.test_memory import on_ranks

KINDS: tuple[AttentionKind, ...] = ("window", "compressed", "sparse")


def model_of(kind: AttentionKind | None = None, **fields: Any) -> ModelSpec:
    """Heads of 16 with queries of rank 24, and of the sizes of DeepSeek-V4-Flash where `hidden` is given."""
    base = {
        "name": "small",
        "layers": 3 if kind is None else 1,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 1,
        "head_dim": 16,
        "vocab": 256,
        "seq": 64,
        "gated": True,
        "activation": "silu",
        "norm": "rmsnorm",
        "position": "rope",
        "tied": False,
        "linear_bias": False,
        "attention_sinks": True,
        "window": 8,
        "attention_pattern": KINDS if kind is None else (kind,),
        "latent_attention": {
            "q_lora_rank": 24,
            "kv_lora_rank": 12,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 4,
            "v_head_dim": 16,
        },
        "compressed_attention": {"rate": 8, "sparse_rate": 2, "o_groups": 2, "o_lora_rank": 10},
        "indexer": {"heads": 3, "head_dim": 6, "top_k": 4},
        "experts": 4,
        "top_k": 2,
        "expert_ffn": 32,
        "shared_expert_ffn": 32,
        "router": {"score": "sqrtsoftplus"},
    }
    return ModelSpec.model_validate(base | fields)


FLASH: dict[str, Any] = {
    "hidden": 4096,
    "heads": 64,
    "head_dim": 512,
    "seq": 8192,
    "window": 128,
    "latent_attention": {
        "q_lora_rank": 1024,
        "kv_lora_rank": 448,
        "qk_nope_head_dim": 448,
        "qk_rope_head_dim": 64,
        "v_head_dim": 512,
    },
    "compressed_attention": {"rate": 128, "sparse_rate": 4, "o_groups": 8, "o_lora_rank": 1024},
    "indexer": {"heads": 64, "head_dim": 128, "top_k": 512},
    "expert_ffn": 2048,
    "shared_expert_ffn": 2048,
    "residual_streams": 4,
    "other_layer_parameters": 2 * 24 * 4 * 4096,
}


def count(*shapes: tuple[int, ...]) -> int:
    return sum(math.prod(shape) for shape in shapes)


def test_weights_one_by_one() -> None:
    # Queries by way of 24, one key of 16, two groups of 2 x 16 to 10 and from there to the output, sinks.
    window = count((64, 24), (24,), (24, 4 * 16), (64, 16), (16,), (2, 2 * 16, 10), (2 * 10, 64), (4,))
    compressed = count((64, 16), (64, 16), (8, 16), (16,))
    entries = count((64, 2 * 16), (64, 2 * 16), (2, 2 * 16), (16,))
    keys = count((64, 2 * 6), (64, 2 * 6), (2, 2 * 6), (6,))
    indexer = count((24, 3 * 6), (64, 3))
    model = model_of()
    assert [model.attention_parameters(kind) for kind in KINDS] == [
        window,
        window + compressed,
        window + entries + keys + indexer,
    ]
    mlp = count((64,), (64,), (64, 4)) + 5 * 3 * count((64, 32))
    attention = 3 * window + compressed + entries + keys + indexer
    assert model.parameters == 2 * count((256, 64)) + 64 + attention + 3 * mlp


def test_flops_of_scores_are_of_what_is_read() -> None:
    s, width = 8192, 64 * 512
    found = {kind: flops_per_sequence(model_of(kind, **FLASH)) for kind in KINDS}
    matrices = {kind: 6 * s * model_of(kind, **FLASH).attention_parameters(kind) for kind in KINDS}
    pairs = {kind: (found[kind] - matrices[kind]) / (12 * width) for kind in KINDS}
    heavy, window = pairs["compressed"] - pairs["window"], (2 * s - 128) * 128 / 2
    # One pair is scored and weighs a value, forward and twice backward: 12 FLOPs an element.
    assert heavy == pytest.approx(s * s / 2 / 128)
    assert model_of("window", **FLASH).score_share("window") * s * s / 2 == window
    chosen = (2 * s - 4 * 512) * 4 * 512 / 2 / 4
    scored = s * s / 2 / 4 * 64 * 128 / (2 * width)
    assert pairs["sparse"] - pairs["window"] == pytest.approx(chosen + scored)


@pytest.mark.parametrize(("kind", "rate", "most"), [("compressed", 128, 8192), ("sparse", 4, 512)])
def test_pairs_are_those_of_whole_entries(kind: AttentionKind, rate: int, most: int) -> None:
    positions = np.arange(1, 8193)
    read = np.minimum(positions, 128) + np.minimum(positions // rate, most)
    share = model_of(kind, **FLASH).score_share(kind)
    assert share * 8192**2 / 2 == pytest.approx(read.sum(), rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_work_of_a_layer_is_a_third_of_the_model_flops(kind, engine, layout) -> None:
    model = model_of(kind, **FLASH)
    table = LayoutTable.of([layout(model)])
    work = layer(model, engine("megatron"), table, "experts")
    found = sum(2 * m * k * n * times for m, k, n, times, *_ in work.gemms) + work.attention_flops / 2
    expected = flops_per_sequence(model) / 3
    # Without the head, with the router; norms and weights of positions count as matrices on paper.
    expected += 2 * model.seq * model.hidden * (model.experts - model.vocab)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_all_ranks_hold_the_one_key(engine, layout) -> None:
    model = model_of("window", **FLASH)
    table = LayoutTable.of([layout(model, tp=tp, sp=True) for tp in (2, 8)])
    work = layer(model, engine("megatron"), table, "experts")
    kept = work.attention_bytes - 2 * model.seq * model.hidden
    queries = 2 * 2 * model.seq * 64 * 512 / np.array([2, 8])
    assert (kept - queries).tolist() == [2 * model.seq * 512] * 2


@pytest.mark.parametrize("tp", [1, 2])
def test_parameters_of_ranks_add_up(tp, engine, layout) -> None:
    model = model_of(other_layer_parameters=120)
    table = LayoutTable.of([layout(model, tp=tp, dp=1)])
    shared, experts = rank_parameters(unit_sizes(model, engine("megatron"), table), on_ranks(model, table))
    found = tp * (shared[0, 0] + experts[0, 0])
    assert found == model.parameters if tp == 1 else found > model.parameters


def test_residuals_beside_each_other_cost_memory_traffic_and_messages(engine, cluster, layout) -> None:
    one, four = (model_of("window", **FLASH | {"residual_streams": count}) for count in (1, 4))
    table = LayoutTable.of([layout(one, pp=1, recompute=recompute) for recompute in ("none", "full")])
    residual = 2 * one.seq * one.hidden
    megatron = engine("megatron")
    kept = [unit_sizes(model, megatron, table).moe_activations for model in (one, four)]
    assert (kept[1] - kept[0]).tolist() == pytest.approx([2 * 4 * residual, 3 * residual])
    traffic = [layer(model, megatron, table, "experts").elementwise_forward[0] for model in (one, four)]
    assert traffic[1] - traffic[0] == pytest.approx(6 * 4 * residual)
    stages = LayoutTable.of([layout(model_of(**FLASH), pp=2, dp=1)])
    sent = [message_seconds(model, cluster(2), megatron, stages)[0] for model in (one, four)]
    assert sent[1] > 2 * sent[0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"indexer": None}, "need compressed_attention and an indexer"),
        ({"compressed_attention": None}, "need compressed_attention and an indexer"),
        ({"latent_attention": None}, "belong to latent_attention"),
        ({"lora": {"rank": 8, "alpha": 16}}, "layers of compressed_attention have no adapters"),
    ],
)
def test_what_has_no_meaning_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        model_of(**cast(Any, fields))
