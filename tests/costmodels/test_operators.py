"""Work of a layer against the model's own count of FLOPs."""

import numpy as np
import pytest

from costmodels.layers.operators import embedding, head, layer, padded_vocabulary
from costmodels.layers.shapes import routed_rows
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_flops import flops_per_sequence
from costmodels.spec.model_parts import LatentAttention
from costmodels.spec.table import LayoutTable


def flops(work):
    products = sum(2 * m * k * n * times for m, k, n, times, *_ in work.gemms)
    return products + work.attention_flops / 2


def model_flops(model, engine, table):
    """Forward FLOPs of all devices of a tensor-parallel group for one microbatch, with their routers'."""
    total = (model.layers - model.moe_layers) * flops(layer(model, engine, table, mlp="dense"))
    if model.experts:
        total = total + model.moe_layers * flops(layer(model, engine, table, mlp="experts"))
    total = total + flops(head(model, engine, padded_vocabulary(model, table), table))
    return total * table.tensor_parallel


@pytest.mark.parametrize("name", ["gpt", "llama", "mixture"])
def test_forward_work_is_a_third_of_the_model_flops_however_it_is_split(name, request, engine, layout):
    model = request.getfixturevalue(name)
    table = LayoutTable.of([layout(model, tp=tp, mbs=mbs) for tp in (1, 2, 4, 8) for mbs in (1, 2)])
    expected = flops_per_sequence(model) / 3 * table.micro_batch_size
    # Every rank routes tokens of its own.
    router = 2 * model.seq * model.hidden * model.experts * model.moe_layers
    found = model_flops(model, engine("megatron"), table)
    np.testing.assert_allclose(found, expected + router * table.micro_batch_size, rtol=1e-9)


def test_latent_attention_counts_its_projections_once(llama, engine, layout):
    mla = LatentAttention(
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
    )
    model = ModelSpec.model_validate({**llama.model_dump(), "latent_attention": mla})
    table = LayoutTable.of([layout(model)])
    # The model's count takes the weights of the latents' norms for matrices: 2048 of 148 million.
    expected = flops_per_sequence(model) / 3
    np.testing.assert_allclose(model_flops(model, engine("megatron"), table), expected, rtol=1e-4)


def test_expert_work_depends_on_neither_expert_nor_expert_tensor_parallelism(mixture, engine, layout):
    layouts = [
        layout(mixture, tp=2, sp=True, dp=8, ep=ep, etp=etp) for ep, etp in ((1, 1), (4, 1), (8, 1), (4, 2))
    ]
    balanced = engine("megatron", experts_load=1.0)
    work = layer(mixture, balanced, LayoutTable.of(layouts), mlp="experts")
    assert np.ptp(flops(work)) < 1e-6 * flops(work)[0]
    assert work.routed_bytes[0] == 0
    assert (work.routed_bytes[1:] == 2 * mixture.hidden * mixture.seq * mixture.top_k / 2).all()
    assert (work.expert_gather_bytes > 0).tolist() == [False, False, False, True]


def test_tokens_travel_once_for_each_expert_or_are_gathered_once(mixture, engine, layout):
    own = 2 * mixture.hidden * mixture.seq / 4
    kinds = {(1, 4): (0, 4 * own), (4, 1): (2 * own, 0), (2, 2): (2 * own, 2 * 2 * own), (1, 1): (0, 0)}
    table = LayoutTable.of([layout(mixture, tp=4, sp=True, dp=4, ep=ep, etp=etp) for ep, etp in kinds])
    work = layer(mixture, engine("bundled", experts_load=1.0), table, mlp="experts")
    found = zip(work.routed_bytes.tolist(), work.expert_gather_bytes.tolist(), strict=True)
    assert list(found) == list(kinds.values())


def test_without_sequence_parallelism_the_output_of_experts_is_gathered(mixture, engine, layout):
    table = LayoutTable.of([layout(mixture, tp=4, sp=sp, dp=4, ep=4) for sp in (True, False)])
    alone = ModelSpec.model_validate({**mixture.model_dump(), "shared_expert_ffn": 0})
    for model, expected in ((mixture, [4, 5]), (alone, [2, 3])):
        work = layer(model, engine("bundled"), table, mlp="experts")
        assert work.gathers_forward.tolist() == work.gathers_backward.tolist() == expected


def test_latent_attention_gathers_what_is_compressed(llama, engine, layout):
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    table = LayoutTable.of([layout(llama, tp=8, sp=True), layout(llama, tp=8)])
    for rank, gathered in ((1536, 1536 + 512 + 64), (0, 8192 + 512 + 64)):
        mla = LatentAttention(q_lora_rank=rank, **sizes)
        model = ModelSpec.model_validate({**llama.model_dump(), "latent_attention": mla})
        work = layer(model, engine("bundled"), table, mlp="dense")
        entry = gathered / 8192
        assert work.gathers_forward.tolist() == [3 + entry, 4]
        assert work.gathers_backward.tolist() == [3 + entry, 2 + 2 * entry]


def test_a_limited_capacity_bounds_the_rows(mixture, layout):
    table = LayoutTable.of([layout(mixture, tp=2, sp=True, dp=8, ep=4, etp=2)])
    rows = {
        factor: routed_rows(
            ModelSpec.model_validate({**mixture.model_dump(), "router": {"capacity_factor": factor}}),
            table,
            1.0,
        )[0]
        for factor in (0.0, 0.5, 1.0, 2.0)
    }
    assert rows[0.0] == rows[1.0] == rows[2.0] == mixture.seq * 2
    assert rows[0.5] == mixture.seq


def test_sequence_parallelism_splits_norms_and_regathers_inputs(gpt, engine, layout):
    table = LayoutTable.of([layout(gpt, tp=4), layout(gpt, tp=4, sp=True)])
    kept, again = (
        layer(gpt, engine("megatron", activations_regathers_sequence=flag), table, "dense")
        for flag in (False, True)
    )
    assert kept.gathers_forward.tolist() == again.gathers_forward.tolist() == [4, 4]
    assert kept.gathers_backward.tolist() == [4, 4]
    assert again.gathers_backward.tolist() == [4, 6]
    whole, split = kept.elementwise_forward
    saved = 6 * 2 * gpt.seq * gpt.hidden * (1 - 1 / 4)
    assert whole - split == pytest.approx(saved)


def test_a_shared_key_value_head_is_computed_on_every_device(llama, engine, layout):
    table = LayoutTable.of([layout(llama, tp=8), layout(llama, tp=16)])
    qkv = layer(llama, engine("megatron"), table, mlp="dense").gemms[0]
    assert qkv.n.tolist() == [8192 / 8 + 2 * 128, 8192 / 16 + 2 * 128]


def test_embedding_sums_once_over_the_vocabulary_slices(gpt, layout):
    table = LayoutTable.of([layout(gpt, tp=2), layout(gpt, tp=2, sp=True)])
    work = embedding(gpt, table)
    # An all-reduce is two passes; with sequence parallelism half of it moves to backward.
    assert (work.gathers_forward + work.gathers_backward).tolist() == [2, 2]
