"""The memory traffic of adding up gradients and copying them, byte by byte."""

import numpy as np
import pytest

from costmodels import estimate
from costmodels.layers.operators import Gemm
from costmodels.spec.model_parts import Lora
from costmodels.time.gemms import GemmRates, gemm_seconds

RATE = 2.039e12 * 0.85
"""Bytes per second of an A100's memory at the engines' efficiency."""


def traffic(model, cluster, engine, layout):
    """Bytes per parameter of one step."""
    return estimate(model, cluster, engine, layout).time.accumulation * RATE / model.parameters


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        # The first gradient is cast (2 + 4), three are added (4 + 2 + 4), the sum is copied in (4 + 4); the
        # fp32 shard is cast (4 + 2) and what is gathered is copied out (2 + 2).
        ({"zero": 1, "m": 4}, 6 + 3 * 10 + 8 + 6 / 8 + 4),
        # Without FSDP2 gradients add up in that buffer, and parameters are cast to what computes.
        ({"zero": 0, "m": 4}, 6 + 3 * 10 + 6),
        # A single gradient is cast on the way into the buffer.
        ({"zero": 1, "m": 1}, 6 + 6 / 8 + 4),
        ({"zero": 1, "m": 4, "gradient_reduction": "bf16"}, 3 * 6 + 4 + 6 / 8 + 4),
        ({"zero": 1, "m": 4, "precision": "fp32"}, 3 * 12 + 8 + 8 / 8 + 8),
        # Two gatherings and one reduction of each microbatch; shards add up.
        ({"zero": 3, "m": 4}, 4 * (2 * (6 / 8 + 4) + 6 + 12 / 8)),
        ({"zero": 3, "m": 1}, 2 * (6 / 8 + 4) + 6),
    ],
)
def test_fsdp2_casts_adds_and_copies(fields, expected, gpt, cluster, engine, layout):
    one = layout(gpt, dp=8, **fields)
    assert traffic(gpt, cluster(8), engine("bundled"), one) == pytest.approx(expected)


@pytest.mark.parametrize("m", [1, 4])
def test_gemms_of_layers_that_fsdp2_does_not_wrap_add_to_the_buffer(m, gpt, cluster, engine, layout):
    """A GEMM writes the first gradient (4), and adds the others (4 + 4); parameters are cast (4 + 2).

    Gradients of embedding and head, of schedules that split backward, and in the format of the sum are added.
    """
    found, apart = engine("bundled", gemm_fused_plain=True), engine("bundled")
    layers = gpt.layers * gpt.dense_layer_parameters

    def seconds(of, **fields):
        fields = {"m": 8 * m, "precision": "bf16", "dp": 8} | fields
        return estimate(gpt, cluster(8 * fields.get("pp", 1)), of, layout(gpt, **fields)).time.accumulation

    ends = gpt.parameters - layers
    one = layout(gpt, dp=8, zero=0, m=m)
    expected = layers * (4 + (m - 1) * 8 + 6) + ends * (6 + (m - 1) * 10 + 6)
    assert traffic(gpt, cluster(8), found, one) * gpt.parameters == pytest.approx(expected)
    plain = gpt.parameters * (6 + (m - 1) * 10 + 6)
    assert traffic(gpt, cluster(8), apart, one) * gpt.parameters == pytest.approx(plain)
    for same in (
        {"zero": 1},
        {"precision": "fp32"},
        {"gradient_reduction": "bf16"},
        {"pp": 2, "vpp": 2, "layers_per_stage": (2, 2, 2, 2), "schedule": "interleaved_zb"},
    ):
        assert seconds(found, **same) == seconds(apart, **same)


def test_gemms_of_routed_experts_and_of_adapters_add_nothing(mixture, gpt, cluster, engine, layout):
    found, apart = engine("bundled", gemm_fused_plain=True), engine("bundled")

    def saved(model):
        one = layout(model, m=4, precision="bf16")
        return traffic(model, cluster(1), apart, one) - traffic(model, cluster(1), found, one)

    routed = (
        (mixture.layers - mixture.dense_layers) * mixture.experts * 3 * mixture.hidden * mixture.expert_ffn
    )
    ends = 2 * mixture.vocab * mixture.hidden + mixture.norm_parameters
    # 2 bytes of each gradient, the first included.
    expected = 4 * 2 * (mixture.parameters - routed - ends)
    assert saved(mixture) * mixture.parameters == pytest.approx(expected)
    adapted = gpt.model_copy(update={"lora": Lora(rank=4, alpha=8.0)})
    assert saved(adapted) == 0


def test_adding_16_bits_to_fp32_may_be_slower_than_a_copy(gpt, cluster, engine, layout):
    """Only what is added: neither casts and copies, nor sums in one format."""
    slower = engine("bundled", elementwise_accumulation_passes=1.5)
    one = layout(gpt, dp=8, zero=1, m=4)
    assert traffic(gpt, cluster(8), slower, one) == pytest.approx(6 + 3 * 1.5 * 10 + 8 + 6 / 8 + 4)
    for same in ({"precision": "fp32"}, {"gradient_reduction": "bf16"}):
        one = layout(gpt, dp=8, zero=1, m=4, **same)
        assert traffic(gpt, cluster(8), slower, one) == traffic(gpt, cluster(8), engine("bundled"), one)


def test_one_rank_in_fp32_adds_in_place(gpt, cluster, engine, layout):
    for m in (1, 4):
        one = layout(gpt, m=m, precision="fp32")
        assert traffic(gpt, cluster(1), engine("bundled"), one) == pytest.approx(12 * (m - 1))


def test_experts_that_tensor_parallel_ranks_replicate_are_reduced_from_a_buffer(
    mixture, cluster, engine, layout
):
    """In fp32 on tp ranks alone, where nothing else is copied."""

    def seconds(**degrees):
        one = layout(mixture, tp=2, precision="fp32", **degrees)
        return estimate(mixture, cluster(2), engine("bundled"), one).time.accumulation

    assert seconds(ep=2) == 0 < seconds(ep=1)


@pytest.mark.parametrize(
    ("name", "precision", "each"), [("nanotron", "bf16", 10), ("megatron-deepspeed", "fp16", 6)]
)
def test_other_engines_add_to_a_buffer(name, precision, each, gpt, cluster, engine, layout):
    one = layout(gpt, dp=8, zero=1, m=4, precision=precision)
    found = estimate(gpt, cluster(8), engine(name), one).time.accumulation
    rate = 2.039e12 * engine(name).for_device(cluster(8).device).elementwise.efficiency
    assert found * rate / gpt.parameters == pytest.approx(4 * each)


@pytest.mark.parametrize(("precision", "total"), [("bf16", 4), ("fp16", 2)])
def test_weight_gradient_gemms_that_add_hide_a_part_of_the_traffic(
    precision, total, gpt, cluster, engine, layout
):
    """The sum is read and written while the GEMM computes; the embedding's gradient alone is added apart."""
    one = layout(gpt, dp=8, zero=1, m=4, precision=precision)
    fused, plain = (
        estimate(gpt, cluster(8), engine("megatron", gemm_fused_accumulation=flag), one).time
        for flag in (True, False)
    )
    rate = 2.039e12 * engine("megatron").for_device(cluster(8).device).elementwise.efficiency
    ends = gpt.vocab * gpt.hidden + gpt.max_positions * gpt.hidden
    assert fused.accumulation == pytest.approx(4 * (2 * total + 2) * ends / rate, rel=0.01)
    sums = 4 * 2 * total * (gpt.parameters - gpt.max_positions * gpt.hidden) / rate
    assert 0.1 * sums < fused.compute - plain.compute < 0.9 * sums


def test_a_gemm_and_its_sum_take_their_p_norm():
    tokens, inputs, outputs, one = np.array([[1024.0], [4096.0], [8192.0], [1.0]])
    shape, rates = (Gemm(tokens, inputs, outputs, one),), GemmRates(2e14, 2e14, 1e12, 2)
    alone = gemm_seconds(shape, rates)
    sums = 8 * 4096 * 8192 / 1e12
    assert gemm_seconds(shape, rates, 8) == pytest.approx((alone**1.4 + sums**1.4) ** (1 / 1.4))


def test_every_rank_of_a_pipeline_adds_while_it_fills(gpt, cluster, engine, layout):
    """The bubble grows by pp - 1 microbatches of additions, each of a fourth of the layers."""
    one = layout(gpt, pp=4, m=8, precision="bf16", layers_per_stage=(2, 2, 2, 2))
    slower, plain = (
        estimate(gpt, cluster(4), engine("nanotron", elementwise_accumulation_passes=passes), one).time
        for passes in (1.2, 1.0)
    )
    # 2 bytes more of each parameter: of two layers, and on the outer ranks of the vocabulary.
    layers, ends = 8 * gpt.dense_layer_parameters, 2 * gpt.vocab * gpt.hidden
    positions, norm = gpt.max_positions * gpt.hidden, gpt.norm_parameters
    slowest = layers / 4 + gpt.vocab * gpt.hidden + norm
    assert slower.accumulation - plain.accumulation == pytest.approx(8 * 2 * slowest / RATE)
    others = layers + ends + positions + norm - slowest
    assert slower.bubble - plain.bubble == pytest.approx(2 * others / RATE)
