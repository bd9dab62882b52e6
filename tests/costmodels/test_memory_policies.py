"""Memory of published engines: bytes per parameter, logits, buffers, and memory outside of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from costmodels import Cluster, Engine, Layout, ModelSpec
from costmodels.catalogue import load_device, load_engine, load_model
from costmodels.catalogue.yaml_files import catalogue_file
from costmodels.memory.peak import DYNAMIC, communicator_count, stage_memory, update_bytes
from costmodels.memory.unit_sizes import unit_sizes
from costmodels.pricing import price
from costmodels.ranks.rank_layers import Ranks, all_ranks, ranks_entry
from costmodels.ranks.reductions import parts_of_rank, parts_total
from costmodels.spec.estimate import StageMemory
from costmodels.spec.table import Floats, LayoutTable

GIB = 2**30

Make = Callable[..., Engine]


def every_rank(model: ModelSpec, table: LayoutTable) -> Ranks:
    return all_ranks(*ranks_entry(model, table, 0)).each(lambda held: held[None, :])


def memory_of(model: ModelSpec, cluster: Cluster, engine: Engine, layout: Layout) -> dict[str, Floats]:
    table = LayoutTable.of([layout])
    ranks = every_rank(model, table)
    held = stage_memory(cluster, engine, table, unit_sizes(model, engine, table), ranks)
    shape = ranks.dense.shape
    return {part: np.broadcast_to(bytes_, shape) for part, bytes_ in held.items()}


def states(held: dict[str, Floats], model: ModelSpec) -> float:
    """Bytes of parameters, gradients and optimizer for each parameter of a model without pipeline."""
    return (
        sum(float(held[part][0, 0]) for part in ("parameters", "gradients", "optimizer")) / model.parameters
    )


@pytest.mark.parametrize(
    ("name", "bytes_by_stage"),
    [
        # megatron/training/theoretical_memory_usage.py, and its distributed optimizer.
        ("megatron", {0: 18, 1: 6 + 12 / 8}),
        ("mindspeed", {0: 18, 1: 6 + 12 / 8}),
        # Performance recipes keep gradients in bf16.
        ("nemo", {1: 4 + 12 / 8}),
        # Table 1 of arXiv:1910.02054.
        ("deepspeed", {0: 16, 1: 4 + 12 / 8, 2: 2 + 14 / 8}),
        # BF16_Optimizer sums gradients in fp32.
        ("megatron-deepspeed", {1: 8 + 12 / 8}),
        ("nanotron", {0: 20, 1: 8 + 12 / 8}),
    ],
)
def test_bytes_of_a_parameter_are_those_published(
    name: str,
    bytes_by_stage: dict[int, float],
    gpt: ModelSpec,
    cluster: Callable[..., Cluster],
    engine: Make,
    layout: Callable[..., Layout],
) -> None:
    for stage, per_parameter in bytes_by_stage.items():
        held = memory_of(gpt, cluster(8), engine(name), layout(gpt, dp=8, zero=stage, m=4))
        assert states(held, gpt) == pytest.approx(per_parameter)


def test_a_graph_frees_gradients_as_it_scatters_them_where_nothing_is_summed(
    gpt: ModelSpec, cluster: Callable[..., Cluster], engine: Make, layout: Callable[..., Layout]
) -> None:
    for m, per_parameter in ((1, 2 + 2 / 8 + 8 / 8), (4, 2 + 2 + 8 / 8)):
        held = memory_of(gpt, cluster(8), engine("mindformers"), layout(gpt, dp=8, zero=1, m=m))
        assert states(held, gpt) == pytest.approx(per_parameter)


def test_nanotron_frees_narrow_gradients_where_nothing_is_reduced(
    gpt: ModelSpec, cluster: Callable[..., Cluster], engine: Make, layout: Callable[..., Layout]
) -> None:
    held = memory_of(gpt, cluster(8), engine("nanotron"), layout(gpt, m=4))
    assert states(held, gpt) == pytest.approx(18)


def test_a_gathered_loss_keeps_whole_logits_on_every_rank(
    llama: ModelSpec, engine: Make, layout: Callable[..., Layout]
) -> None:
    table = LayoutTable.of([layout(llama, tp=tp) for tp in (1, 8)])

    def logits(gathers: bool) -> Floats:
        return unit_sizes(llama, engine("aleph-scaling", loss_gathers_logits=gathers), table).logits

    whole, part = logits(True), logits(False)
    assert whole[0] == whole[1] == part[0]
    copies = engine("aleph-scaling").loss.logits_copies
    assert whole[1] - part[1] == pytest.approx(llama.seq * llama.vocab * (4 + 4 * copies) * 7 / 8)


def test_a_split_loss_may_keep_more_copies_than_a_whole_one(
    llama: ModelSpec, engine: Make, layout: Callable[..., Layout]
) -> None:
    table = LayoutTable.of([layout(llama, tp=tp) for tp in (1, 8)])
    own, alike = (
        unit_sizes(llama, engine("fsdp", loss_split_logits_copies=copies), table).logits
        for copies in (3, None)
    )
    assert own[0] == alike[0]
    assert own[1] - alike[1] == pytest.approx(llama.seq * llama.vocab / 8 * 4)


def test_the_optimizer_step_of_nanotron_gathers_a_copy_of_the_parameters(
    gpt: ModelSpec, engine: Make, layout: Callable[..., Layout]
) -> None:
    nanotron = engine("nanotron", allocator_workspace_bytes=0.0, allocator_rotary_tables=False)
    table = LayoutTable.of([layout(gpt, dp=8, zero=1, m=4)])
    found = update_bytes(nanotron, table, unit_sizes(gpt, nanotron, table), every_rank(gpt, table))
    assert found[0, 0] == pytest.approx((8 + 12 / 8 + 2 + 2 / 8) * gpt.parameters)


def test_the_fuller_of_backward_and_optimizer_step_is_the_peak(
    gpt: ModelSpec, cluster: Callable[..., Cluster], engine: Make, layout: Callable[..., Layout]
) -> None:
    one = layout(gpt, dp=8, zero=1, m=4)
    usual = engine("nanotron", allocator_workspace_bytes=0.0, allocator_rotary_tables=False)
    policy = usual.memory["bf16"].model_copy(update={"stepping_whole": 1e3})
    small = memory_of(gpt, cluster(8), usual, one)
    large = memory_of(gpt, cluster(8), usual.model_copy(update={"memory": {"bf16": policy}}), one)
    assert small["activations"][0, 0] > 0 == small["temporaries"][0, 0]
    assert [float(large[part].max()) for part in DYNAMIC[:3]] == [0, 0, 0]
    assert large["temporaries"][0, 0] == pytest.approx((1e3 + 2 / 8) * gpt.parameters)
    assert large["reserve"][0, 0] == pytest.approx(usual.allocator.fragmentation * large["temporaries"][0, 0])


def test_loss_and_a_recomputed_layer_are_two_moments(
    gpt: ModelSpec, cluster: Callable[..., Cluster], engine: Make, layout: Callable[..., Layout]
) -> None:
    one = layout(gpt, recompute="full")
    together = memory_of(gpt, cluster(8), engine("megatron", loss_apart=False), one)
    apart = memory_of(gpt, cluster(8), engine("megatron", loss_apart=True), one)
    inputs = gpt.layers * 2 * gpt.seq * gpt.hidden
    working = together["activations"][0, 0] - inputs
    fuller = max(working, together["logits"][0, 0])
    assert apart["activations"][0, 0] + apart["logits"][0, 0] == inputs + fuller
    assert min(apart["activations"][0, 0] - inputs, apart["logits"][0, 0]) == 0


def test_asynchronous_reductions_hold_outputs_of_layers_until_the_host_waits(
    llama: ModelSpec, cluster: Callable[..., Cluster], engine: Make, layout: Callable[..., Layout]
) -> None:
    usual = engine("nanotron", allocator_sequence_buffers=0.0)
    whole = 2 * llama.seq * llama.hidden

    def held(**degrees: object) -> list[float]:
        found = memory_of(llama, cluster(64), usual, layout(llama, m=8, **degrees))["communication"]
        return (found[0] / whole).tolist()

    assert held(tp=8, sp=False) == [0]
    assert held(tp=8, sp=True) == [2 * llama.layers]
    # All but two of 4, 3, 2 and 1 microbatches in flight, and one on the last rank.
    layers = llama.layers / 4
    assert held(tp=8, sp=True, pp=4) == [2 * 2 * layers, 2 * layers, 0, 2 * layers]


def test_static_buffers_hold_gathered_inputs_of_layers(
    llama: ModelSpec, cluster: Callable[..., Cluster], engine: Make, layout: Callable[..., Layout]
) -> None:
    usual = engine("nanotron", allocator_reduction_outputs=0.0)
    found = memory_of(llama, cluster(8), usual, layout(llama, tp=8, sp=True))
    assert found["communication"][0, 0] == 2 * 2 * llama.seq * llama.hidden
    # The buffers stay, so that nothing of them is lost.
    dynamic = found["activations"][0, 0] + found["logits"][0, 0]
    assert found["reserve"][0, 0] == pytest.approx(usual.allocator.fragmentation * dynamic)


def test_unfused_kernels_keep_more(llama: ModelSpec, engine: Make, layout: Callable[..., Layout]) -> None:
    def kept(**constants: object) -> float:
        own = engine("aleph-scaling", **{"elementwise_norm_passes": 1.0, **constants})
        return float(unit_sizes(llama, own, LayoutTable.of([layout(llama)])).dense_activations[0])

    usual, tokens = kept(), llama.seq
    extra = engine("aleph-scaling").activations.unfused_norm_bytes * tokens * llama.hidden
    assert kept(elementwise_norm_passes=4.0) - usual == pytest.approx(extra)
    packed = 2 * tokens * (llama.q_size + 2 * llama.kv_heads * llama.head_dim)
    assert kept(activations_packs_attention=True) - usual == pytest.approx(packed)
    scores = llama.seq * tokens * llama.heads
    unfused = kept(attention_flash=False, activations_score_bytes=7.0)
    assert unfused - usual == pytest.approx(7.0 * scores - 4 * tokens * llama.heads)


def test_saving_every_second_product_lies_between_no_and_full_recomputation(
    llama: ModelSpec, engine: Make, layout: Callable[..., Layout]
) -> None:
    def kept(recompute: str, tp: int = 1) -> float:
        table = LayoutTable.of([layout(llama, tp=tp, recompute=recompute)])
        own = engine("fsdp", activations_saves_alternate_products=True)
        return float(unit_sizes(llama, own, table).dense_activations[0])

    token = 2 * llama.hidden * 2 + 2 * (2 * llama.q_size + llama.kv_heads * llama.head_dim + llama.ffn)
    assert kept("selective") == llama.seq * (token + 4 * llama.heads)
    for tp in (1, 8):
        assert kept("full", tp) < kept("selective", tp) < kept("none", tp)


def test_margin_terms_add_up_and_one_number_replaces_them(
    llama: ModelSpec, cluster: Callable[..., Cluster], engine: Make, layout: Callable[..., Layout]
) -> None:
    one = layout(llama, tp=2, pp=2, dp=2, m=4)
    usual, table = engine("megatron"), LayoutTable.of([layout(llama, tp=2, pp=2, dp=2, m=4)])
    estimate = price(llama, cluster(8), usual, table).estimate(0)
    stage = estimate.memory[0]
    assert stage.context == cluster(8).device.context_bytes
    assert stage.communicators == 3 * usual.allocator.communicator_bytes
    assert stage.reserve == pytest.approx(usual.allocator.fragmentation * (stage.activations + stage.logits))
    assert stage.overhead == stage.context + stage.communicators + stage.reserve
    assert stage.reserved == pytest.approx(stage.allocated + stage.reserve)
    assert stage.total == pytest.approx(stage.reserved + stage.context + stage.communicators + stage.doubt)
    assert estimate.peak_memory_bytes == pytest.approx(max(each.total for each in estimate.memory))
    for bytes_ in (0.0, 3.0 * GIB):
        told = cluster(8).model_copy(update={"memory_margin_bytes": bytes_})
        found = price(llama, told, usual, LayoutTable.of([one])).estimate(0).memory
        assert [each.total - bytes_ for each in found] == pytest.approx(
            [each.allocated for each in estimate.memory]
        )
        assert {each.overhead for each in found} == {bytes_}


def test_each_group_of_ranks_has_a_communicator(mixture: ModelSpec, layout: Callable[..., Layout]) -> None:
    def count(**degrees: object) -> float:
        table = LayoutTable.of([layout(mixture, **degrees)])
        return float(communicator_count(table, has_experts=True)[0])

    assert count() == 0
    assert count(tp=2, sp=True, etp=2) == 2
    assert count(pp=2) == 1
    # Data parallel ranks of all weights, and of experts.
    assert count(dp=8) == 2
    assert count(dp=8, ep=8) == 2
    assert count(dp=8, ep=4) == 3


def test_old_estimates_put_their_overhead_into_the_margin() -> None:
    parts = {"parameters": 1.0, "gradients": 2.0, "optimizer": 3.0, "activations": 4.0, "logits": 5.0}
    stage = StageMemory.model_validate({**parts, "overhead": 6.0})
    assert (stage.margin, stage.allocated, stage.total) == (6.0, 15.0, 21.0)


@given(
    rows=st.integers(1, 5),
    ranks=st.integers(1, 4),
    shapes=st.lists(st.sampled_from(["whole", "row", "one"]), min_size=1, max_size=4),
    seed=st.integers(0, 100),
)
@settings(max_examples=40, deadline=None)
def test_parts_that_broadcast_add_up_as_whole_ones(
    rows: int, ranks: int, shapes: list[str], seed: int
) -> None:
    sizes = {"whole": (rows, ranks), "row": (rows, 1), "one": (1, 1)}
    random = np.random.default_rng(seed)
    parts = {"first": random.random((rows, ranks))}
    parts |= {str(place): random.random(sizes[shape]) for place, shape in enumerate(shapes)}
    whole = {name: np.broadcast_to(held, (rows, ranks)) for name, held in parts.items()}
    np.testing.assert_allclose(parts_total(parts), sum(whole.values()))
    picked = random.integers(0, ranks, rows)
    for name, held in parts_of_rank(parts, picked).items():
        np.testing.assert_array_equal(held, whole[name][np.arange(rows), picked])


def test_fitted_memory_constants_reach_the_engines() -> None:
    fits = catalogue_file("calibrated_memory.yaml")["engines"]
    assert {"aleph-scaling", "bloom", "bundled", "nanotron"} <= set(fits)
    for name, fit in fits.items():
        engine = load_engine(name)
        assert engine == engine.with_constants(fit["constants"])


class Roots(TorchDispatchMode):
    """Counts the bytes of square roots of lists of tensors."""

    bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        found = function(*given, **(named or {}))
        if function is torch.ops.aten._foreach_sqrt.default:
            self.bytes += sum(one.numel() * one.element_size() for one in found)
        return found


def copied_bytes(parameter: torch.Tensor, adam: torch.optim.AdamW) -> int:
    """Bytes of the copy of a moment that Adam makes where it steps through lists of tensors."""
    for group in adam.param_groups:
        group["foreach"] = True
    parameter.grad = torch.ones_like(parameter)
    with Roots() as roots:
        adam.step()
    return roots.bytes


def test_states_in_16_bits_are_those_of_pytorchs_adam() -> None:
    weight = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    adam = torch.optim.AdamW(weight.parameters())
    weight(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
    adam.step()
    (parameter,) = weight.parameters()
    assert parameter.grad is not None
    moments = [held for held in adam.state[parameter].values() if held.numel() > 1]
    each = sum(held.element_size() for held in (parameter, parameter.grad, *moments))
    model = load_model("llama3-8b").model_copy(update={"seq": 1024})
    engine = load_engine("fsdp").with_constants({"sharding.narrow_stages": (0, 2, 3)})
    device = load_device("a100-80g")
    cluster = Cluster(device=device, world_size=8, devices_per_node=8, memory_bytes=device.memory_bytes)

    def held(**degrees: Any) -> float:
        layout = Layout(
            **degrees, micro_batch_size=1, global_batch_size=16, layers_per_stage=(32,), precision="bf16"
        )
        parts = memory_of(model, cluster, engine, layout)
        return sum(float(parts[name][0, 0]) for name in ("parameters", "gradients", "optimizer"))

    assert held(data_parallel=1) == pytest.approx(each * model.parameters)
    copies = load_engine("fsdp").with_constants(
        {"sharding.narrow_stages": (0,), "sharding.copies_moment": True}
    )
    layout = Layout(
        micro_batch_size=1, global_batch_size=16, layers_per_stage=(32,), precision="bf16", recompute="full"
    )
    peaks = memory_of(model, cluster, copies, layout)
    assert float(peaks["temporaries"][0, 0]) == pytest.approx(
        copied_bytes(parameter, adam) / parameter.numel() * model.parameters, rel=0.01
    )
    # DDP copies gradients into buckets.
    assert held(data_parallel=8) == pytest.approx((each + 2) * model.parameters)
    # FSDP2 keeps gathered weights beside its shards below ZeRO 3.
    assert held(data_parallel=8, zero_stage=2) == pytest.approx((each / 8 + 2) * model.parameters)
