"""Memory that engines' own code takes: casts, copies and buffers, each as a formula written out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.calibration.measurements import read_measurements
from benchmarks.calibration.predictions import predict_memory
from costmodels import Cluster, Engine, Layout, ModelSpec
from costmodels.layers.shapes import filled_share, peak_load
from costmodels.memory.dispatch_buffers import dispatch_buffer_bytes
from costmodels.memory.peak import gathered_bytes, stage_memory, update_bytes
from costmodels.memory.states import model_states
from costmodels.memory.unit_sizes import rank_parameters, unit_sizes
from costmodels.ranks.rank_layers import Ranks, all_ranks, ranks_entry
from costmodels.spec.table import LayoutTable
from tests.support import ROOT

Make = Callable[..., Engine]
MakeLayout = Callable[..., Layout]
MEASURED = next(
    (
        folder / "shared" / "measured"
        for folder in (ROOT.parent, ROOT.parent.parent)
        if (folder / "shared" / "measured").is_dir()
    ),
    Path("absent"),
)


def every_rank(model: ModelSpec, table: LayoutTable) -> Ranks:
    return all_ranks(*ranks_entry(model, table, 0)).each(lambda held: held[None, :])


def parameter_bytes(model: ModelSpec, engine: Engine, layout: Layout) -> float:
    """Bytes of the parameters of the first pipeline rank."""
    table = LayoutTable.of([layout])
    sizes, ranks = unit_sizes(model, engine, table), every_rank(model, table)
    return float(model_states(engine, table, sizes, ranks, rank_parameters(sizes, ranks))[0][0, 0])


@pytest.mark.parametrize("name", ["fsdp", "torchtitan", "accelerate"])
@pytest.mark.parametrize(("zero", "each"), [(0, 2 + 4 + 8), (2, 2 + (4 + 8) / 8)])
def test_fsdp_gathers_parameters_in_16_bits_beside_its_fp32_shards(
    llama: ModelSpec, engine: Make, layout: MakeLayout, name: str, zero: int, each: float
) -> None:
    table = LayoutTable.of([layout(llama, dp=8, zero=zero)])
    sizes, ranks = unit_sizes(llama, engine(name), table), every_rank(llama, table)
    states = model_states(engine(name), table, sizes, ranks, rank_parameters(sizes, ranks))
    assert float(states[0][0, 0] + states[2][0, 0]) == pytest.approx(each * llama.parameters)


@pytest.mark.parametrize(("precision", "each"), [("fp8", 2.0), ("mxfp8", 2 + 2 / 32), ("nvfp4", 1 + 2 / 16)])
def test_casts_of_layers_stay_beside_their_parameters(
    llama: ModelSpec, engine: Make, layout: MakeLayout, precision: str, each: float
) -> None:
    plain, cast = (
        parameter_bytes(llama, engine("megatron"), layout(llama, dp=8, zero=1, precision=name))
        for name in ("bf16", precision)
    )
    ends = 2 * llama.vocab * llama.hidden + llama.norm_parameters
    assert cast - plain == pytest.approx(each * (llama.parameters - ends))


def test_zero_3_keeps_no_casts(llama: ModelSpec, engine: Make, layout: MakeLayout) -> None:
    plain, cast = (
        parameter_bytes(llama, engine("megatron"), layout(llama, dp=8, zero=3, precision=name))
        for name in ("bf16", "fp8")
    )
    assert cast == plain


def test_an_fp8_recipe_keeps_inputs_of_products_in_8_bits(
    llama: ModelSpec, engine: Make, layout: MakeLayout
) -> None:
    def kept(precision: str) -> float:
        table = LayoutTable.of([layout(llama, precision=precision)])
        return float(unit_sizes(llama, engine("megatron"), table).dense_activations[0])

    # A byte less of the inputs of queries, keys and values, of the MLP's first half and of its second; one
    # more of the result of attention, which attention keeps in 16 bits.
    saved = llama.seq * (llama.hidden + llama.hidden + llama.ffn - llama.q_size)
    assert kept("bf16") - kept("fp8") == pytest.approx(saved)


def step_bytes(model: ModelSpec, engine: Engine, layout: Layout) -> float:
    table = LayoutTable.of([layout])
    found = update_bytes(engine, table, unit_sizes(model, engine, table), every_rank(model, table))
    return float(found[0, 0]) - engine.allocator.workspace_bytes


def test_an_optimizer_reads_a_copy_of_16_bit_gradients_unless_its_moments_are_narrow(
    gpt: ModelSpec, engine: Make, layout: MakeLayout
) -> None:
    one = layout(gpt, dp=8, zero=1, m=2)
    assert step_bytes(gpt, engine("nemo"), one) == pytest.approx((4 + 12 / 8 + 4 / 8) * gpt.parameters)
    narrow = engine("nemo", sharding_narrow_moments=True)
    assert step_bytes(gpt, narrow, one) == pytest.approx((4 + 8 / 8) * gpt.parameters)
    # Gradients in fp32 are read as they are.
    assert step_bytes(gpt, engine("megatron"), one) == pytest.approx((6 + 12 / 8) * gpt.parameters)


def test_dropouts_are_those_of_models_with_layer_norms(
    llama: ModelSpec, gpt: ModelSpec, engine: Make, layout: MakeLayout
) -> None:
    for model, masks in ((llama, 0), (gpt, 2)):
        table = LayoutTable.of([layout(model)])
        some, none = (
            unit_sizes(model, engine("megatron", activations_dropout=drops), table).dense_activations[0]
            for drops in (True, False)
        )
        assert some - none == masks * model.seq * model.hidden


def test_rows_of_experts_count_once_kept_and_as_copies_on_their_way(
    mixture: ModelSpec, engine: Make, layout: MakeLayout
) -> None:
    table = LayoutTable.of([layout(mixture, dp=8, ep=8, zero=1)])
    own = 2 * mixture.seq * mixture.top_k * mixture.hidden
    rows = own * peak_load(mixture, 8)

    def sizes(**constants: object) -> tuple[float, float]:
        found = unit_sizes(mixture, engine("megatron", **constants), table)
        return float(found.moe_activations[0]), float(found.moe_recomputation[0])

    kept, working = sizes(activations_row_copies=0.0)
    assert sizes(activations_row_copies=0.0, activations_expert_outputs=True)[0] - kept == pytest.approx(own)
    assert sizes(activations_row_copies=3.0)[1] - working == pytest.approx(3 * rows)


@pytest.mark.parametrize("capacity", [1.0, 1.1, 1.5])
@pytest.mark.parametrize(("experts", "ranks"), [(128, 8), (16, 4)])
def test_a_capacity_that_drops_is_not_filled_by_experts_that_few_ask_for(
    mixture: ModelSpec, layout: MakeLayout, capacity: float, experts: int, ranks: int
) -> None:
    router = mixture.router.model_copy(update={"capacity_factor": capacity})
    model = mixture.model_copy(update={"experts": experts, "router": router})
    table = LayoutTable.of([layout(model, dp=ranks, ep=ranks)])
    load = peak_load(model, ranks)
    random, own = np.random.default_rng(1), experts // ranks
    width = (load - 1) * own**0.5 / random.normal(size=(20000, ranks)).max(axis=1).mean()
    asked = random.normal(1, min(width, 0.75), size=(200000, 8))
    mean = np.minimum(asked, capacity).mean()
    expected = min(1.0, mean * load / min(load, capacity))
    assert filled_share(model, table)[0] == pytest.approx(expected, abs=0.01)
    assert filled_share(mixture, table)[0] == 1


def test_torchtitan_gathers_the_head_without_the_embedding(
    llama: ModelSpec, engine: Make, layout: MakeLayout
) -> None:
    table = LayoutTable.of([layout(llama, dp=8, zero=3)])
    together, apart = (
        gathered_bytes(own, table, unit_sizes(llama, own, table), every_rank(llama, table))[0, 0]
        for own in (engine("torchtitan", sharding_ends_apart=ends) for ends in (False, True))
    )
    assert together - apart == 2 * llama.vocab * llama.hidden


def test_a_compiled_loss_keeps_logits_and_their_gradient(
    llama: ModelSpec, engine: Make, layout: MakeLayout
) -> None:
    sizes = unit_sizes(llama, engine("torchtitan"), LayoutTable.of([layout(llama, dp=8, zero=3)]))
    token = 2 * llama.hidden
    assert sizes.logits[0] == llama.seq * (4 * llama.vocab + 2 * token)


def test_deepspeed_holds_as_many_parameters_as_it_is_told(
    llama: ModelSpec, gpt: ModelSpec, engine: Make, layout: MakeLayout
) -> None:
    own = engine("deepspeed")
    for model, live in ((llama, 1e9), (gpt, gpt.parameters)):
        table = LayoutTable.of([layout(model, dp=8, zero=3)])
        found = gathered_bytes(own, table, unit_sizes(model, own, table), every_rank(model, table))
        assert found[0, 0] == pytest.approx(2 * live)


def test_transformers_keeps_fp32_copies_of_what_its_norms_take_in(
    llama: ModelSpec, engine: Make, layout: MakeLayout
) -> None:
    table = LayoutTable.of([layout(llama, dp=8, zero=3)])
    fused, own = (
        unit_sizes(llama, engine("deepspeed", activations_norm_bytes=more), table).dense_activations[0]
        for more in (0.0, 8.0)
    )
    assert engine("deepspeed").activations.norm_bytes == 8
    # 6 bytes of each of two norms where a fused one keeps 2.
    assert own - fused == 2 * (6 - 2) * llama.seq * llama.hidden


def deepep_bytes(hidden: int, ranks: int) -> int:
    """Bytes of DeepEP's buffers for 16-bit tokens, as its loops add them up."""
    found = 0
    token = 2 * hidden + 8 + 128 * 8 + 128 * 4 + 128 * 4
    for _ in range(10):
        found += sum(288 * token for _ in range(min(ranks, 8)))
        found += sum(2 * 128 * (token + 16) for _ in range(ranks // 8))
    return found


def test_libraries_of_exchanges_have_buffers_outside_of_the_allocator(
    mixture: ModelSpec, cluster: Callable[..., Cluster], engine: Make, layout: MakeLayout
) -> None:
    model = mixture.model_copy(update={"experts": 64, "hidden": 7168})
    table = LayoutTable.of([layout(model, dp=64, ep=64, zero=1)])

    def held(kind: str) -> float:
        return float(dispatch_buffer_bytes(model, engine("megatron", experts_buffers=kind), table)[0])

    assert held("") == 0
    assert held("deepep") == deepep_bytes(7168, 64)
    # The tokens of the eight ranks within reach, to experts and back.
    assert held("hybridep") == 2 * 8 * 2 * model.seq * model.hidden
    own = engine("megatron", experts_buffers="deepep")
    ranks = every_rank(model, table)
    with_, without = (
        stage_memory(cluster(64), each, table, unit_sizes(model, each, table), ranks)["communicators"]
        for each in (own, engine("megatron"))
    )
    assert with_[0, 0] - without[0, 0] == deepep_bytes(7168, 64)
    dense = model.model_copy(update={"experts": 0, "top_k": 0})
    assert not dispatch_buffer_bytes(dense, own, LayoutTable.of([layout(dense, dp=64)])).any()


@pytest.mark.skipif(not MEASURED.is_dir(), reason="the published measurements are not here")
def test_peaks_of_megatrons_own_tests_are_met() -> None:
    rows, _ = read_measurements(MEASURED / "megatron_golden.csv")
    large = [row for row in rows if "memory_speed" in row.model.name and not row.model.experts]
    assert len(large) == 6
    found = predict_memory(large).allocated_bytes
    measured = np.array([row.allocated_bytes for row in large])
    assert np.abs(found / measured - 1).max() < 0.025
