"""Prices of whole steps: they add up, agree with each other, and with published measurements."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from costmodels import Cluster, ModelSpec, StageMemory, StepTime, estimate, price
from costmodels.errors import InputError
from costmodels.spec.table import LayoutTable
from planner.problem import resolve_problem

MEASURED = Path(__file__).parents[3] / "shared" / "measured" / "korthikanti22.csv"


@pytest.fixture
def layouts(llama, layout):
    """A variety of layouts of 64 devices."""
    found = []
    for tp, sp, pp, vpp, cp, zero in [
        (1, False, 1, 1, 1, 3),
        (2, True, 1, 1, 1, 1),
        (8, True, 1, 1, 2, 1),
        (4, False, 4, 1, 1, 0),
        (8, True, 8, 2, 1, 0),
        (8, True, 4, 5, 1, 1),
        (1, False, 16, 1, 1, 1),
        (2, False, 2, 1, 4, 2),
    ]:
        dp = 64 // (tp * pp * cp)
        for recompute in ("none", "selective", "full"):
            for mbs in (1, 2):
                degrees: dict[str, Any] = {"tp": tp, "sp": sp, "pp": pp, "vpp": vpp, "cp": cp, "dp": dp}
                stage = zero if dp * cp > 1 else 0
                found.append(layout(llama, **degrees, zero=stage, mbs=mbs, m=pp * 2, recompute=recompute))
    for fields in (
        {"tp": 4, "pp": 4, "vpp": 2, "dp": 4, "schedule": "zbv", "zero": 1, "zero_replicas": 2},
        {"tp": 4, "pp": 4, "vpp": 2, "dp": 4, "schedule": "dualpipev", "offload_optimizer": True},
        {"tp": 8, "pp": 2, "vpp": 4, "dp": 4, "schedule": "interleaved_zb", "recompute": "full"},
        {"tp": 2, "cp": 8, "dp": 4, "cp_form": "all_to_all", "offload_activations": True},
        {"tp": 2, "cp": 8, "dp": 4, "cp_form": "ring", "recompute": "full", "recompute_num_layers": 4},
        {"pp": 8, "dp": 8, "recompute": "full", "recompute_method": "block", "recompute_num_layers": 3},
        {"dp": 64, "recompute": "selective", "recompute_modules": ("mlp", "norm")},
    ):
        found.append(layout(llama, **fields, m=16))
    return found


@pytest.mark.parametrize(
    "name", ["bundled", *(pytest.param(name, marks=pytest.mark.slow) for name in ("megatron", "fsdp"))]
)
def test_a_table_prices_each_row_as_if_it_were_alone(name, llama, cluster, engine, layouts):
    prices = price(llama, cluster(64), engine(name), LayoutTable.of(layouts))
    assert len(prices) == len(layouts)
    for row, one in enumerate(layouts):
        found, alone = prices.estimate(row), estimate(llama, cluster(64), engine(name), one)
        assert found.step_time_s == pytest.approx(alone.step_time_s, rel=1e-12)
        assert found.peak_memory_bytes == pytest.approx(alone.peak_memory_bytes, rel=1e-12)
        assert found.time.total == pytest.approx(found.step_time_s)
        assert len(found.memory) == one.pipeline_parallel
        assert max(stage.total for stage in found.memory) == pytest.approx(found.peak_memory_bytes)
        tokens = one.global_batch_size * llama.seq
        assert found.tokens_per_s == pytest.approx(tokens / found.step_time_s)
        assert found.tokens_per_s_per_device == pytest.approx(found.tokens_per_s / 64)
        assert 0 < found.mfu < 1
        assert found.tflops_per_device == pytest.approx(found.mfu * 312)


def test_parts_have_the_names_of_the_records(llama, cluster, engine, layouts):
    prices = price(llama, cluster(64), engine("megatron"), LayoutTable.of(layouts))
    assert list(prices.time) == list(StepTime.model_fields)
    assert list(prices.memory) == list(StageMemory.model_fields)
    assert all((seconds >= 0).all() for seconds in prices.time.values())
    assert sum(prices.time.values()) == pytest.approx(prices.step_time_s)
    assert sum(prices.memory.values()) == pytest.approx(prices.peak_memory_bytes)


def test_blocks_change_nothing(llama, cluster, engine, layouts, monkeypatch):
    table = LayoutTable.of(layouts)
    whole = price(llama, cluster(64), engine("megatron"), table)
    monkeypatch.setattr("costmodels.spec.row_blocks.BLOCK", 7)
    parts = price(llama, cluster(64), engine("megatron"), table)
    np.testing.assert_allclose(parts.step_time_s, whole.step_time_s)
    np.testing.assert_allclose(parts.peak_memory_bytes, whole.peak_memory_bytes)


def test_no_layouts_cost_nothing(llama, cluster, engine, layouts):
    table = LayoutTable.of(layouts).take(np.zeros(0, dtype=np.int64))
    prices = price(llama, cluster(64), engine("megatron"), table)
    assert len(prices) == len(prices.peak_memory_bytes) == 0


def seconds(model, cluster, engine, layout):
    return estimate(model, cluster, engine, layout).time


def test_data_parallel_volume_is_that_of_zero(gpt, cluster, engine, layout):
    """Twice the parameters up to ZeRO 2, three times for ZeRO 3 (arXiv:1910.02054, section 7)."""
    plain = engine("megatron", overlap_data_parallel=0.0, network_efficiency=1.0)
    times = [
        seconds(gpt, cluster(8), plain, layout(gpt, dp=8, zero=stage, precision="fp16")).data_parallel
        for stage in (0, 1, 3)
    ]
    expected = 2 * 2 * gpt.parameters * 7 / 8 / 300e9
    assert times[0] == pytest.approx(expected, rel=0.1)  # and latency
    assert times[1] == pytest.approx(times[0])
    assert times[2] == pytest.approx(1.5 * times[0])


def test_zero_3_gathers_for_every_micro_batch(gpt, cluster, engine, layout):
    plain = engine("bundled", overlap_data_parallel=0.0)
    once, often = (
        seconds(gpt, cluster(8), plain, layout(gpt, dp=8, zero=3, m=m)).data_parallel for m in (1, 4)
    )
    assert often == pytest.approx(4 * once)
    once, often = (
        seconds(gpt, cluster(8), plain, layout(gpt, dp=8, zero=1, m=m)).data_parallel for m in (1, 4)
    )
    assert often == once


def test_overlap_hides_communication_behind_computation_only(gpt, cluster, engine, layout):
    one = layout(gpt, dp=16, zero=1, mbs=8)
    shown, hidden = (
        seconds(gpt, cluster(16), engine("megatron", overlap_data_parallel=share), one).data_parallel
        for share in (0.0, 0.9)
    )
    assert hidden == pytest.approx(0.1 * shown)
    tiny = ModelSpec.model_validate({**gpt.model_dump(), "seq": 16})
    shown, hidden = (
        seconds(
            tiny,
            cluster(16),
            engine("megatron", overlap_data_parallel=share, host_layer_overhead=0.0),
            layout(tiny, dp=16, zero=1),
        ).data_parallel
        for share in (0.0, 0.9)
    )
    assert hidden > 0.2 * shown


def test_tensor_parallelism_across_nodes_costs_more_than_inside(llama, cluster, engine, layout):
    inside, across = (
        seconds(llama, cluster(64, devices_per_node=per_node), engine("megatron"), layout(llama, tp=8, dp=8))
        for per_node in (8, 4)
    )
    assert across.tensor_parallel > 2 * inside.tensor_parallel
    assert across.compute == inside.compute


def test_interleaving_shrinks_the_bubble(llama, cluster, engine, layout):
    layouts = [layout(llama, tp=8, sp=True, pp=8, vpp=vpp, m=16) for vpp in (1, 5)]
    plain, chunked = price(llama, cluster(64), engine("megatron"), LayoutTable.of(layouts)).time["bubble"]
    assert chunked == pytest.approx(plain / 5)
    once, five = (seconds(llama, cluster(64), engine("megatron"), one) for one in layouts)
    assert five.bubble == pytest.approx(once.bubble / 5, rel=0.05)  # The head lengthens the last stage.
    assert five.pipeline_parallel > once.pipeline_parallel


def test_the_slowest_stage_sets_the_pace(llama, cluster, engine, layout):
    even = layout(llama, tp=8, pp=4, m=64, layers_per_stage=(20, 20, 20, 20))
    skewed = layout(llama, tp=8, pp=4, m=64, layers_per_stage=(10, 30, 20, 20))
    fast, slow = (estimate(llama, cluster(32), engine("megatron"), one).step_time_s for one in (even, skewed))
    assert slow / fast == pytest.approx(1.5, rel=0.1)


def test_expert_parallelism_trades_memory_for_messages(mixture, cluster, engine, layout):
    alone, spread = (
        estimate(mixture, cluster(16), engine("megatron"), layout(mixture, dp=16, ep=ep)) for ep in (1, 8)
    )
    assert alone.time.expert_parallel == 0 < spread.time.expert_parallel
    assert spread.memory[0].parameters < alone.memory[0].parameters / 2


def test_context_parallelism_shows_what_attention_does_not_hide(llama, cluster, engine, layout):
    long = ModelSpec.model_validate({**llama.model_dump(), "seq": 65536, "max_positions": 65536})
    short = ModelSpec.model_validate({**llama.model_dump(), "seq": 2048})
    hidden = seconds(long, cluster(64), engine("megatron"), layout(long, tp=8, cp=8, cp_form="ring"))
    shown = seconds(short, cluster(64), engine("megatron"), layout(short, tp=8, cp=8, cp_form="ring"))
    # Nothing hides the last hop of the gradients.
    assert hidden.context_parallel < 0.02 * hidden.attention
    assert shown.context_parallel > 0.2 * shown.attention


@pytest.fixture
def prompt(cluster, a100):
    """64 devices whose links have no latency."""
    links = {
        tier: getattr(a100, tier).model_copy(update={"latency": 0.0}) for tier in ("intra_node", "inter_node")
    }
    return cluster(64).model_copy(update={"device": a100.model_copy(update=links)})


def test_context_parallel_forms_move_what_their_papers_say(llama, prompt, engine, layout):
    plain = engine("megatron", network_efficiency=1.0, host_layer_overhead=0.0)
    found = {
        form: seconds(llama, prompt, plain, layout(llama, cp=8, dp=8, cp_form=form)).context_parallel
        for form in ("all_gather", "all_to_all")
    }
    own = 2 * llama.seq / 8
    kv, q = 2 * llama.kv_heads * llama.head_dim, llama.q_size
    gathered = 2 * llama.layers * own * kv * 7 / 300e9
    exchanged = 2 * llama.layers * own * (2 * q + kv) * 7 / 8 / 300e9
    assert found["all_gather"] == pytest.approx(gathered)
    assert found["all_to_all"] == pytest.approx(exchanged)


def test_copies_of_shards_gather_among_neighbours(gpt, prompt, engine, layout):
    """Shards in a node, and a sum over the eight nodes of each device's part of the gradients."""
    plain = engine("megatron", overlap_data_parallel=0.0, network_efficiency=1.0)
    one = layout(gpt, dp=64, zero=3, zero_replicas=8)
    found = seconds(gpt, prompt, plain, one).data_parallel
    inside = (4 + 2 * 2) * 7 / 8 / 300e9
    assert found == pytest.approx(gpt.parameters * (inside + 2 * 4 / 8 * 7 / 8 / 25e9))


def test_gradients_in_bf16_are_half_the_bytes(gpt, cluster, engine, layout):
    plain = engine("bundled", overlap_data_parallel=0.0)
    wide, narrow = (
        seconds(gpt, cluster(8), plain, layout(gpt, dp=8, gradient_reduction=kind)).data_parallel
        for kind in ("fp32", "bf16")
    )
    assert narrow == pytest.approx(wide / 2, rel=0.05)  # and latency


def test_the_host_link_bounds_what_is_offloaded(gpt, a100, cluster, engine, layout):
    slow = cluster(8).model_copy(update={"device": a100.model_copy(update={"host_bandwidth": 1e9})})
    usual, away = (
        seconds(gpt, slow, engine("bundled"), layout(gpt, dp=8, offload_activations=flag)) for flag in (0, 1)
    )
    moved = 8 * 2 * gpt.seq * 5 * gpt.hidden / (1e9 * 0.8)
    assert usual.offload == 0
    assert moved < away.offload + usual.total < 2 * moved + usual.total
    fast = seconds(gpt, cluster(8), engine("bundled"), layout(gpt, dp=8, offload_activations=True))
    assert fast.offload < 0.1 * away.offload
    away = seconds(gpt, slow, engine("bundled"), layout(gpt, dp=8, zero=1, offload_optimizer=True))
    assert away.optimizer > gpt.parameters / 8 * 6 / 1e9


def test_what_is_recomputed_costs_its_part_of_the_forward_pass(gpt, cluster, engine, layout):
    quick = engine("bundled", host_layer_overhead=0.0)

    def again(**fields):
        return seconds(gpt, cluster(8), quick, layout(gpt, **fields)).recompute

    one = {"recompute": "selective"}
    parts = {
        name: again(**one, recompute_modules=(name,))
        for name in ("core_attention", "mlp", "norm", "activation")
    }
    whole = again(recompute="full")
    zbv = {"pp": 4, "vpp": 2, "m": 8, "schedule": "zbv"}
    assert 0 < parts["activation"] < parts["mlp"] < whole
    assert 0 < parts["norm"] < parts["core_attention"] + parts["norm"]
    assert again(**one, recompute_modules=("core_attention", "mlp")) == pytest.approx(
        parts["core_attention"] + parts["mlp"]
    )
    half = again(recompute="full", recompute_method="block", recompute_num_layers=4)
    assert half == pytest.approx(whole / 2)
    quick = engine("bundled", host_layer_overhead=0.0, elementwise_split_backward=1.0)
    assert again(recompute="full", **zbv) == pytest.approx(2 * 8 * whole / 4)


def test_recomputation_ends_with_the_last_tensor_that_backward_needs(llama, a100, engine, layout, cluster):
    """The product that ends a layer, and the collective after it, run once; Megatron-LM's run twice."""
    bundled = engine("bundled", host_layer_overhead=0.0, gemm_launch=0.0, gemm_wave=0.0).for_device(a100)
    bundled = bundled.with_constants({"elementwise.efficiency": 1.0})
    last = llama.layers * 2 * llama.seq * llama.ffn * llama.hidden / (312e12 * bundled.gemm.efficiency)

    def time(stops, **fields):
        chosen = bundled.with_constants({"activations.recompute_stops_early": stops})
        return seconds(llama, cluster(8), chosen, layout(llama, **fields))

    mlp = {"recompute": "selective", "recompute_modules": ("mlp",)}
    units = {"recompute": "full", "recompute_num_layers": 4}
    for fields, spared in (({"recompute": "full"}, last), (mlp, last), (units, last / 4)):
        assert time(False, **fields).recompute - time(True, **fields).recompute == pytest.approx(
            spared, rel=1e-2
        )
    # Of a layer's all-gathers and reduce-scatters (4 forward, 4 backward) sequence parallelism repeats 3 with
    # full recomputation and 1 with that of the MLP; without it, 1 of 2 all-reduces and none.
    for sp, recompute, repeated in (
        (True, {"recompute": "full"}, 3),
        (True, mlp, 1),
        (False, {"recompute": "full"}, 2),
        (False, mlp, 0),
    ):
        usual, again = (time(True, tp=8, sp=sp, pp=1, **fields).tensor_parallel for fields in ({}, recompute))
        layer = (time(True, tp=8, sp=sp, pp=1).tensor_parallel - ends_of(llama, sp)) / 8
        assert again - usual == pytest.approx(repeated * layer)


def ends_of(model, sp):
    """Seconds of the collectives of embedding and head: two all-gathers each way, or all-reduces."""
    once = 2 * model.seq * model.hidden * 7 / 8 / (300e9 * 0.8) + 3 * 3e-6
    return 4 * once


def test_recomputing_every_layer_of_a_block_is_recomputing_all(gpt, cluster, engine, layout):
    for degrees in ({"m": 4}, {"pp": 4, "m": 8}, {"pp": 2, "vpp": 2, "m": 4}):
        full, block = (
            estimate(gpt, cluster(8), engine("bundled"), layout(gpt, **degrees, recompute="full", **fields))
            for fields in ({}, {"recompute_method": "block", "recompute_num_layers": 8})
        )
        assert block.time == full.time
        assert block.memory == full.memory


def test_what_splits_backward_is_not_compiled(gpt, cluster, engine, layout):
    fields = {"pp": 4, "vpp": 2, "m": 8}
    for constant, part in (
        ("elementwise_split_backward", "elementwise"),
        ("host_split_backward", "launch"),
    ):
        plain, slow = (
            engine("bundled", host_layer_overhead=1e-3, **{constant: factor}) for factor in (1.0, 2.0)
        )
        usual, apart = ({**fields, "schedule": name} for name in ("interleaved", "zbv"))
        before, after = (
            [getattr(seconds(gpt, cluster(4), one, layout(gpt, **each)), part) for each in (usual, apart)]
            for one in (plain, slow)
        )
        assert before[0] == after[0]
        assert after[1] > 1.5 * before[1]


def test_layers_that_nothing_wraps_take_the_host_less(gpt, cluster, engine, layout):
    one = engine("bundled", host_layer_overhead=10.0, host_plain=0.5, host_chained=0.25)
    wrapped = engine("bundled", host_layer_overhead=10.0, sharding_plain_whole=False)

    def launch(engine, devices=4, **fields):
        return seconds(gpt, cluster(devices), engine, layout(gpt, m=2, **fields)).launch

    for fields, factor in (
        ({"dp": 4}, 0.25),
        ({"dp": 4, "recompute": "full", "recompute_num_layers": 2}, 0.5),
        ({"dp": 4, "offload_activations": True}, 0.5),
        ({"dp": 2, "cp": 2, "cp_form": "ring"}, 0.5),
        ({"dp": 4, "zero": 1}, 1.0),
        ({"dp": 4, "offload_optimizer": True}, 1.0),
    ):
        assert launch(one, **fields) == pytest.approx(factor * launch(wrapped, **fields), rel=0.05), fields


def test_chains_take_experts_whose_sizes_the_host_knows(mixture, cluster, engine, layout):
    one = engine("bundled", host_layer_overhead=10.0, host_plain=0.5, host_chained=0.25)
    all_plain = engine("bundled", host_layer_overhead=10.0, host_plain=0.5, host_chained=0.5)

    def ratio(model=mixture, **fields):
        """The host's time over that with chains that save nothing."""
        given = layout(model, m=2, dp=4, **fields)
        chains, none = (seconds(model, cluster(4), each, given).launch for each in (one, all_plain))
        return chains / none

    assert ratio() == pytest.approx(0.5, rel=0.05)
    assert ratio(etp=2) == pytest.approx(0.5, rel=0.05)
    router = mixture.router.model_copy(update={"capacity_factor": 1.0})
    for model, fields in (
        (mixture, {"ep": 2}),
        (mixture, {"precision": "fp16"}),
        (mixture.model_copy(update={"router": router}), {}),
        (mixture.model_copy(update={"linear_bias": True}), {}),
    ):
        assert ratio(model, **fields) > 0.8, fields


def test_a_ring_across_nodes_goes_through_one_network_card(llama, prompt, engine, layout):
    """Nothing hides the last hop of the fp32 gradients of keys and values."""
    long = ModelSpec.model_validate({**llama.model_dump(), "seq": 262144, "max_positions": 262144})
    plain = engine("megatron", network_efficiency=1.0, host_layer_overhead=0.0)
    for size, rate in ((8, 300e9), (64, 25e9)):
        one = layout(long, cp=size, dp=64 // size, cp_form="ring")
        hop = 4 * long.seq / size * 2 * long.kv_heads * long.head_dim / rate
        assert seconds(long, prompt, plain, one).context_parallel == pytest.approx(long.layers * hop)


def test_gathered_keys_and_values_are_put_in_order(llama, prompt, engine, layout):
    """One read and one write of keys and values of the whole sequence in each direction."""
    plain = engine("megatron")
    gather, ring = (
        seconds(llama, prompt, plain, layout(llama, cp=8, dp=8, cp_form=form)).elementwise
        for form in ("all_gather", "ring")
    )
    moved = 2 * 2 * 2 * llama.seq * 2 * llama.kv_heads * llama.head_dim / (2.039e12 * 0.85)
    merged = 2 * 7 * (2 + 8) * llama.seq / 8 * llama.q_size * plain.elementwise.passes / (2.039e12 * 0.85)
    assert gather - ring == pytest.approx(llama.layers * (moved - merged))


def test_an_offloaded_optimizer_moves_fp32_shards(gpt, cluster, engine, layout):
    """Up for every gathering and down for every reduction; Megatron-LM sends 16-bit parameters up."""
    wire, host, device = 32e9 * 0.8, 51.2e9 * 0.85, 2.039e12 * 0.85

    def optimizer(name, **fields):
        one = layout(gpt, dp=8, offload_optimizer=True, **fields)
        return seconds(gpt, cluster(8), engine(name, host_step=0.0), one).optimizer / gpt.parameters

    assert optimizer("bundled", zero=1, m=4) == pytest.approx((28 / host + 8 / wire) / 8)
    # Two gatherings and a reduction for each of four microbatches; three times two gradients add up.
    expected = (28 + 3 * 12) / host + 4 * (2 * 4 + 4) / wire
    assert optimizer("bundled", zero=3, m=4) == pytest.approx(expected / 8)
    assert optimizer("megatron", zero=1, m=4) == pytest.approx((28 / host + 6 / wire) / 8 + 6 / device)


def test_whole_layers_that_are_recomputed_send_nothing_to_the_host(gpt, a100, cluster, engine, layout):
    slow = cluster(8).model_copy(update={"device": a100.model_copy(update={"host_bandwidth": 1e8})})
    block = {"recompute": "full", "recompute_method": "block", "offload_activations": True}
    sent = [
        seconds(gpt, slow, engine("bundled"), layout(gpt, **block, recompute_num_layers=layers)).offload
        for layers in (8, 4, 2)
    ]
    assert sent[0] == 0
    assert sent[2] == pytest.approx(1.5 * sent[1])


def test_a_step_on_this_kind_of_cpu_takes_seconds(a100, engine, layout):
    """GPT-2 124M, 512 tokens on a core with 118 GFLOP/s of peak: 6 s measured (AMD EPYC)."""
    cpu = a100.model_copy(
        update={"name": "cpu", "kind": "cpu", "peak_flops": {"fp32": 118e9}, "memory_bandwidth": 28e9}
    )
    machine = Cluster(device=cpu, world_size=1, devices_per_node=1, memory_bytes=8e9)
    gpt2 = ModelSpec(name="gpt2", layers=12, hidden=768, heads=12, vocab=50257, seq=512)
    found = estimate(gpt2, machine, engine("bundled"), layout(gpt2, precision="fp32"))
    assert 3 < found.step_time_s < 12


@pytest.mark.parametrize(("name", "precision"), [("megatron", "fp8"), ("nemo", "fp16")])
def test_a_precision_that_cannot_be_had_ends_in_one_line(name, precision, gpt, cluster, engine, layout):
    with pytest.raises(InputError, match=rf"^precision {precision}: (device|engine) \S+ .*; use [^\n]*$"):
        estimate(gpt, cluster(8), engine(name), layout(gpt, precision=precision))


def measured_rows():
    if not MEASURED.exists():
        return []
    with MEASURED.open(encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["step_time_s"]]


def test_published_steps_of_megatron_are_met_without_fitting(cluster, engine, layout):
    """Table 5 of arXiv:2205.05198: 22B to 1T on 8 to 512 A100s, full and selective recomputation."""
    rows = measured_rows()
    if not rows:
        pytest.skip(f"{MEASURED} is not here")
    assert len(rows) == 8
    # Core attention of 2022 wrote its scores to memory.
    megatron = engine("megatron", attention_flash=False)
    for row in rows:
        shape: dict[str, Any] = {
            name: int(row[name]) for name in ("layers", "hidden", "ffn", "heads", "vocab", "seq")
        }
        model = ModelSpec(name=row["model_name"], **shape)
        degrees: dict[str, Any] = {name: int(row[name] or 1) for name in ("tp", "pp", "vpp", "dp", "mbs")}
        batches = int(row["gbs"]) // (degrees["mbs"] * degrees["dp"])
        one = layout(
            model, m=batches, sp=row["sp"] == "1", recompute=row["recompute"], precision="fp16", **degrees
        )
        found = estimate(model, cluster(int(row["gpus"])), megatron, one)
        assert found.step_time_s == pytest.approx(float(row["step_time_s"]), rel=0.25), row["model_name"]


def test_a_layout_costs_the_same_beside_any_others() -> None:
    """Rows of one shape share the prices of a pass, whatever their numbers of microbatches."""
    problem = resolve_problem(
        "llama3-8b", 16, device="h100", global_batch_size=64, precision="fp8", pin="zero=0"
    )
    table = problem.space().table
    where = problem.model, problem.cluster, problem.constants
    every = price(*where, table).step_time_s
    rows = np.arange(0, len(table), max(1, len(table) // 60))
    alone = [price(*where, table.take(rows[at : at + 1])).step_time_s[0] for at in range(len(rows))]
    assert len(rows) > 50 and every[rows] == pytest.approx(np.array(alone), rel=1e-9)


def test_casts_of_weights_once_a_step_cost_one_cast_of_each_layer_parameter() -> None:
    pins = ["zero=0", "tp=1", "pp=1", "cp=1"]
    problem = resolve_problem("llama3-8b", 8, device="h100", global_batch_size=32, precision="fp8", pin=pins)
    engine, table = problem.constants, problem.space().table
    gemm = engine.gemm
    seconds = [
        price(problem.model, problem.cluster, replaced, table).time["optimizer"]
        for replaced in (
            engine.model_copy(update={"gemm": gemm.model_copy(update={"fp8_weights_once": once})})
            for once in (False, True)
        )
    ]
    bytes_ = (
        problem.model.layers * problem.model.dense_layer_parameters * gemm.of_recipe("default").fp8_cast_bytes
    )
    rate = problem.cluster.device.memory_bandwidth * engine.elementwise.efficiency
    assert len(table) > 3 and seconds[1] - seconds[0] == pytest.approx(bytes_ / rate, rel=1e-6)
