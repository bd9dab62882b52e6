"""The memory traffic of adding up gradients and copying them, byte by byte."""

import pytest

from costmodels import estimate

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
    ("name", "precision", "each"),
    [("megatron", "bf16", 8), ("megatron", "fp16", 4), ("nanotron", "bf16", 10), ("nemo", "bf16", 8)],
)
def test_other_engines_add_to_a_buffer(name, precision, each, gpt, cluster, engine, layout):
    one = layout(gpt, dp=8, zero=1, m=4, precision=precision)
    assert traffic(gpt, cluster(8), engine(name), one) == pytest.approx(4 * each)


def test_every_rank_of_a_pipeline_adds_while_it_fills(gpt, cluster, engine, layout):
    """The bubble grows by pp - 1 microbatches of additions, each of a fourth of the layers."""
    one = layout(gpt, pp=4, m=8, precision="bf16", layers_per_stage=(2, 2, 2, 2))
    fused, plain = (
        estimate(gpt, cluster(4), engine("nanotron", gemm_fused_accumulation=flag), one).time
        for flag in (True, False)
    )
    # 2 bytes less of each parameter: of two layers, and on the outer ranks of the vocabulary.
    layers, ends = 8 * gpt.dense_layer_parameters, 2 * gpt.vocab * gpt.hidden
    positions, norm = gpt.max_positions * gpt.hidden, gpt.norm_parameters
    slowest = layers / 4 + gpt.vocab * gpt.hidden + norm
    assert plain.accumulation - fused.accumulation == pytest.approx(8 * 2 * slowest / RATE)
    others = layers + ends + positions + norm - slowest
    assert plain.bubble - fused.bubble == pytest.approx(2 * others / RATE)
