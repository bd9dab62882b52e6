"""Rules: what each removes from a space, and what it says of a layout."""

from __future__ import annotations

from typing import Any

import pytest

from costmodels import Layout, ModelSpec
from planner.inputs.batch import Batch
from planner.inputs.pins import Pins
from planner.space.grid import build
from planner.space.rules import RULES, first_violation
from tests.support.models import small_spec

MIXTURE = {"experts": 4, "top_k": 2, "expert_ffn": 64}


LORA: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8.0}}
NF4: dict[str, Any] = {"lora": {"rank": 4, "alpha": 8.0, "quantize_base": "nf4"}}


@pytest.mark.parametrize(
    ("rule", "sizes", "world", "batch", "pins"),
    [
        ("tensor_parallel_heads", {"heads": 5}, 8, 8, {}),
        ("tensor_parallel_kv_heads", {"heads": 12, "kv_heads": 6, "head_dim": 8}, 8, 8, {}),
        ("context_parallel", {"seq": 60}, 8, 8, {}),
        ("context_parallel_heads", {"heads": 3, "kv_heads": 1}, 8, 8, {}),
        ("v_micro_batches", {}, 8, 8, {}),
        ("zero_replicas", {}, 8, 8, {"zero_replicas": 2}),
        ("zero_replicas_stage", {}, 8, 8, {"zero_replicas": 2}),
        ("recompute_layers", {}, 8, 8, {"recompute_num_layers": 2}),
        ("recompute_depth", {}, 8, 8, {"recompute_num_layers": 3, "recompute": "full"}),
        ("recompute_split_backward", {}, 8, 16, {}),
        ("offload_recompute", {}, 8, 8, {"offload_activations": True}),
        ("tensor_parallel_ffn", {"ffn": 30}, 8, 8, {}),
        ("tensor_parallel_hidden", {"hidden": 60}, 8, 8, {}),
        ("tensor_parallel_shared_experts", MIXTURE | {"shared_expert_ffn": 30}, 8, 8, {}),
        ("expert_parallel_dense", {}, 8, 8, {"expert_parallel": 2}),
        ("expert_parallel_dense", {}, 8, 8, {"expert_tensor_parallel": 2}),
        ("expert_parallel", MIXTURE, 8, 8, {"expert_parallel": 8}),
        ("expert_parallel_group", MIXTURE, 2, 8, {}),
        ("expert_tensor_parallel", MIXTURE | {"expert_ffn": 30}, 8, 8, {}),
        ("expert_tensor_parallel_spread", MIXTURE, 8, 8, {}),
        ("expert_tokens", MIXTURE | {"seq": 60}, 8, 8, {}),
        ("zero_replicas_experts", MIXTURE, 12, 12, {"zero_replicas": 2, "expert_parallel": 4}),
        ("expert_halves_group", MIXTURE, 8, 8, {"expert_halves": True}),
        ("sequence_parallel_group", {}, 8, 8, {}),
        ("sequence_parallel_length", {"seq": 62}, 8, 8, {}),
        ("virtual_pipeline_group", {}, 8, 8, {}),
        ("pipeline_stages", {}, 8, 8, {}),
        ("layers_per_stage", {}, 8, 8, {"layers_per_stage": (1, 2, 1)}),
        ("layers_total", {}, 8, 8, {"layers_per_stage": (1, 2)}),
        ("virtual_pipeline_chunks", {"layers": 6}, 8, 8, {"pipeline_parallel": 2}),
        ("batch_too_small", {}, 8, 4, {}),
        ("batch_divisibility", {}, 8, 7, {}),
        ("pipeline_micro_batches", {}, 8, 2, {}),
        ("interleaved_micro_batches", {}, 8, 9, {}),
        ("zero_group", {}, 8, 8, {}),
        ("zero_pipeline", {}, 8, 8, {}),
        ("lora_split_backward", LORA, 8, 16, {}),
        ("lora_offload_optimizer", LORA, 8, 8, {"offload_optimizer": True}),
        ("lora_optimizer", LORA, 8, 8, {"optimizer": "muon"}),
        ("quantize_base_blocks", NF4, 8, 8, {}),
        ("cuda_graphs_pipeline", {}, 8, 8, {"cuda_graphs": True}),
        ("cuda_graphs_zero", {}, 8, 8, {"cuda_graphs": True}),
        ("cuda_graphs_offload", {}, 8, 8, {"cuda_graphs": True, "offload_optimizer": True}),
        ("cuda_graphs_ring", {}, 8, 8, {"cuda_graphs": True}),
        ("cuda_graphs_experts", MIXTURE, 8, 8, {"cuda_graphs": True}),
    ],
)
def test_each_rule_removes_what_breaks_it(
    rule: str, sizes: dict[str, Any], world: int, batch: int, pins: Pins
) -> None:
    assert build(small_spec(**sizes), world, Batch(batch), "bf16", pins).illegal.get(rule, 0) > 0
    assert [known.name for known in RULES].count(rule) == 1


@pytest.mark.parametrize(
    ("degrees", "line"),
    [
        ({"context_parallel": 2, "seq": 66}, "context_parallel 2 needs a sequence that 4 divides, not 66"),
        (
            {"context_parallel": 4, "context_parallel_form": "all_to_all", "tensor_parallel": 4},
            "all_to_all: tensor_parallel 4 x context_parallel 4 does not divide 8 heads; use all_gather",
        ),
        (
            {"tensor_parallel": 8, "kv_heads": 4, "head_dim": 1},
            "tensor_parallel 8 neither divides 4 kv_heads of width 1 nor is a multiple that splits their 4 "
            "columns; use 1, 2, 4",
        ),
        (
            {"data_parallel": 4, "zero_stage": 1, "zero_replicas": 4},
            "zero_replicas 4 does not divide the 4 ranks of data_parallel x context_parallel into groups",
        ),
        (
            {
                "pipeline_parallel": 2,
                "virtual_pipeline_parallel": 2,
                "schedule": "zbv",
                "layers_per_stage": (1,) * 4,
                "global_batch_size": 3,
            },
            "the zbv schedule needs a microbatch for each of its 4 stages, not 3; use a global batch of at "
            "least 4",
        ),
        (
            {"expert_parallel": 2, "data_parallel": 2},
            "expert_parallel 2 and expert_tensor_parallel 1 need a mixture of experts, and tiny has none",
        ),
        (
            {"expert_parallel": 2, "data_parallel": 2, "experts": 3},
            "expert_parallel 2 does not divide 3 experts; use 1, 3",
        ),
        (
            {"expert_tensor_parallel": 3, "data_parallel": 3, "experts": 4, "global_batch_size": 9},
            "expert_tensor_parallel 3 does not divide the 64 columns of an expert (expert_ffn); use 1, 2, 4",
        ),
        (
            {"tensor_parallel": 4, "experts": 4, "seq": 62},
            "tensor_parallel 4 x context_parallel 1 does not divide seq 62, whose tokens they share out",
        ),
        (
            {
                "data_parallel": 12,
                "zero_stage": 1,
                "zero_replicas": 2,
                "expert_parallel": 4,
                "experts": 4,
                "global_batch_size": 12,
            },
            "zero_replicas 2 does not divide the 3 devices that hold the same experts; use 1, 3",
        ),
        ({"tensor_parallel": 16}, "tensor_parallel 16 does not divide 8 heads; use 1, 2, 4, 8"),
        ({"layers_per_stage": (5,)}, "layers_per_stage adds up to 5 layers, but tiny has 4"),
        (
            {"global_batch_size": 2, "pipeline_parallel": 4, "layers_per_stage": (1,) * 4},
            "of at least 4 or fewer",
        ),
    ],
)
def test_an_illegal_layout_is_told_its_rule_and_numbers(degrees: dict[str, Any], line: str) -> None:
    sizes: dict[str, Any] = {
        name: degrees[name] for name in ("seq", "experts", "kv_heads", "head_dim") if name in degrees
    }
    moe = {"top_k": 1, "expert_ffn": 64} if "experts" in sizes else {}
    split = {name: value for name, value in degrees.items() if name not in sizes}
    layout = Layout(**{"layers_per_stage": (4,), "global_batch_size": 8, **split})
    assert line in str(first_violation(small_spec(**sizes, **moe), layout))


def test_experts_are_spread_over_all_that_the_stage_leaves() -> None:
    mixture = small_spec(experts=8, top_k=2, expert_ffn=64)
    table = build(mixture, 8, Batch(16), "bf16", {}).table
    spread = set(zip(table.expert_parallel.tolist(), table.expert_tensor_parallel.tolist(), strict=True))
    assert spread == {(1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8)}
    # Wider than that only where a pin asks for it.
    table = build(mixture, 8, Batch(16), "bf16", {"expert_tensor_parallel": 2}).table
    assert set(table.expert_parallel.tolist()) == {1, 2, 4}
    table = build(mixture, 8, Batch(16), "bf16", {"expert_parallel": 2}).table
    shared = set(zip(table.tensor_parallel.tolist(), table.expert_tensor_parallel.tolist(), strict=True))
    # Megatron-LM's default is among them: as many devices an expert as tensor-parallel ranks.
    assert {(2, 1), (2, 2), (4, 1), (4, 4)} <= shared
    dense = build(small_spec(), 8, Batch(16), "bf16", {}).table
    assert set(dense.expert_parallel.tolist()) == set(dense.expert_tensor_parallel.tolist()) == {1}


def test_latent_attention_has_keys_of_its_own_on_every_rank() -> None:
    sizes: dict[str, Any] = {
        "q_lora_rank": 0,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 2,
        "v_head_dim": 3,
    }
    model = ModelSpec.model_validate(
        {**small_spec(heads=6, head_dim=5, ffn=96).model_dump(), "hidden": 96, "latent_attention": sizes}
    )
    assert set(build(model, 12, Batch(12), "bf16", {}).table.tensor_parallel.tolist()) == {1, 2, 3, 6}


def test_a_redundant_layout_is_not_called_illegal() -> None:
    layout = Layout(
        pipeline_parallel=2, data_parallel=2, zero_stage=2, layers_per_stage=(2, 2), global_batch_size=8
    )
    assert first_violation(small_spec(), layout) is None


@pytest.mark.parametrize(
    "pins",
    [
        {"recompute": "full", "schedule": "zbv"},
        {"zero_stage": 2, "pipeline_parallel": 2},
        {"virtual_pipeline_parallel": 3, "pipeline_parallel": 2, "schedule": "interleaved"},
    ],
)
def test_pins_that_ask_for_a_redundant_layout_get_it(pins: Pins) -> None:
    table = build(small_spec(layers=8), 8, Batch(16), "bf16", pins).table
    assert len(table)
    layout = table.layout(0)
    assert all(getattr(layout, name) == value for name, value in pins.items())


def test_more_ranks_than_key_value_heads_share_them() -> None:
    table = build(small_spec(kv_heads=2), 8, Batch(8), "bf16", {"tensor_parallel": 8}).table
    assert len(table)
