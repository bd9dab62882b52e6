"""The space of layouts against plain loops, and the account of removed layouts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels import Layout, ModelSpec, even_split
from costmodels.errors import InputError
from costmodels.spec.table import ARRAY_FIELDS, RECOMPUTE_KINDS
from planner import search
from planner.inputs.batch import Batch
from planner.inputs.pins import Pins, WherePossible, parse_pins
from planner.space.grid import build, micro_batch_sizes, obstacle
from planner.space.rules import first_violation
from tests.support.layouts import layouts_of
from tests.support.models import small_spec

MIXTURE = {"experts": 4, "top_k": 2, "expert_ffn": 64}


def by_loops(model: ModelSpec, world: int, batch: Batch) -> tuple[int, set[tuple[Any, ...]]]:
    """Considered layouts and the legal ones, from the rules as one would say them."""
    considered, legal = 0, set()
    chunk_counts = range(1, max(1, model.layers // 2) + 1)
    meshes = [
        (tp, pp, cp, form, world // (tp * pp * cp))
        for tp in range(1, world + 1)
        for pp in range(1, world + 1)
        for cp in range(1, world + 1)
        for form in (("all_gather", "all_to_all", "ring") if cp > 1 else ("all_gather",))
        if world % (tp * pp * cp) == 0
    ]
    chunks = [(1, "1f1b")]
    chunks += [(vpp, schedule) for vpp in chunk_counts[1:] for schedule in ("interleaved", "interleaved_zb")]
    chunks += [(2, "zbv"), (2, "dualpipev")] if 2 in chunk_counts else []
    rest = [(sp, recompute, zero) for sp in (0, 1) for recompute in RECOMPUTE_KINDS for zero in range(4)]
    spreads = [ep for ep in range(1, model.experts + 1) if model.experts % ep == 0] or [1]
    expert_meshes = [
        (*mesh, ep, etp)
        for mesh in meshes
        for ep in spreads
        for etp in ({1, mesh[0]} if model.experts else {1})
    ]
    considered = len(expert_meshes) * len(chunks) * len(micro_batch_sizes(batch)) * len(rest)
    for tp, pp, cp, form, dp, ep, etp in expert_meshes:
        kv = model.kv_heads
        dense = model.ffn if model.dense_layers or not model.experts else 0
        split = (model.heads, dense, model.hidden, kv * model.head_dim, model.shared_expert_ffn)
        if any(size % tp for size in split) or model.expert_ffn % etp or tp * cp * dp % (ep * etp):
            continue
        if etp > 1 and ep > 1 and model.experts % (ep * etp) == 0:
            continue
        if model.experts and tp > 1 and model.seq % (tp * cp):
            continue
        if kv % tp and tp % kv:
            continue
        if cp > 1 and model.seq % (cp if form == "all_to_all" else 2 * cp):
            continue
        if form == "all_to_all" and model.heads // tp % cp:
            continue
        for vpp, schedule in chunks:
            if pp * vpp > model.layers or (vpp > 1 and (pp == 1 or model.layers % (pp * vpp))):
                continue
            for mbs in micro_batch_sizes(batch):
                gbs = batch.size
                if batch.maximum:
                    gbs -= gbs % (mbs * dp * (pp if schedule.startswith("interleaved") else 1))
                if gbs == 0 or gbs % (mbs * dp):
                    continue
                count = gbs // (mbs * dp)
                if count < pp or (schedule.startswith("interleaved") and count % pp):
                    continue
                if schedule in ("zbv", "dualpipev") and count < 2 * pp:
                    continue
                for sp, recompute, zero in rest:
                    if sp and (tp == 1 or model.seq % (tp * cp)):
                        continue
                    if (zero and dp * cp == 1) or (zero >= 2 and pp > 1):
                        continue
                    if recompute == "full" and schedule in ("interleaved_zb", "zbv", "dualpipev"):
                        continue
                    mesh = (tp, bool(sp), pp, vpp, schedule, cp, form, dp, ep, etp)
                    legal.add((*mesh, zero, mbs, gbs, recompute))
    return considered, legal


def key(layout: Layout) -> tuple[Any, ...]:
    return (
        layout.tensor_parallel,
        layout.sequence_parallel,
        layout.pipeline_parallel,
        layout.virtual_pipeline_parallel,
        layout.schedule,
        layout.context_parallel,
        layout.context_parallel_form,
        layout.data_parallel,
        layout.expert_parallel,
        layout.expert_tensor_parallel,
        layout.zero_stage,
        layout.micro_batch_size,
        layout.global_batch_size,
        layout.recompute,
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    layers=st.integers(1, 7),
    hidden=st.sampled_from([64, 60]),
    heads=st.sampled_from([(8, 8), (8, 2), (6, 3), (5, 5)]),
    ffn=st.sampled_from([256, 96, 30]),
    seq=st.sampled_from([64, 60, 7]),
    world=st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
    size=st.integers(1, 24),
    maximum=st.booleans(),
    experts=st.sampled_from(
        [{}, {}, {"experts": 6, "top_k": 2, "expert_ffn": 96}, MIXTURE | {"shared_expert_ffn": 30}]
    ),
)
def test_the_space_agrees_with_plain_loops(
    layers: int,
    hidden: int,
    heads: tuple[int, int],
    ffn: int,
    seq: int,
    world: int,
    size: int,
    maximum: bool,
    experts: dict[str, int],
) -> None:
    sizes: dict[str, Any] = {"layers": layers, "hidden": hidden, "ffn": ffn, "seq": seq}
    model = small_spec(**sizes, heads=heads[0], kv_heads=heads[1], **experts)
    batch = Batch(size, maximum)
    space = build(model, world, batch, "bf16", {})
    considered, legal = by_loops(model, world, batch)
    found = layouts_of(space.table)
    assert space.considered == considered
    assert len(found) == len(legal)
    assert {key(layout) for layout in found} == legal
    assert space.considered == len(found) + sum(space.illegal.values())
    assert all(first_violation(model, layout) is None for layout in found)
    assert all(layout.world_size == world for layout in found)
    assert all(
        layout.layers_per_stage == even_split(layers, len(layout.layers_per_stage)) for layout in found
    )


@cache
def free_layouts(batch: int) -> list[Layout]:
    """All layouts of a small model on 8 devices with at most `batch` sequences."""
    return layouts_of(build(small_spec(), 8, Batch(batch, True), "bf16", {}).table)


@pytest.mark.parametrize(
    ("pins", "holds"),
    [
        ({"tensor_parallel": 4}, lambda layout: layout.tensor_parallel == 4),
        (
            {"pipeline_parallel": 2, "data_parallel": 2},
            lambda layout: layout.tensor_parallel * layout.context_parallel == 2,
        ),
        ({"context_parallel_form": "ring"}, lambda layout: layout.context_parallel > 1),
        ({"schedule": "zbv"}, lambda layout: layout.virtual_pipeline_parallel == 2),
        ({"sequence_parallel": True}, lambda layout: layout.sequence_parallel),
        ({"schedule": "interleaved"}, lambda layout: layout.virtual_pipeline_parallel > 1),
        ({"schedule": "1f1b"}, lambda layout: layout.virtual_pipeline_parallel == 1),
        (
            {"recompute": "full", "zero_stage": 3},
            lambda layout: (layout.recompute, layout.zero_stage) == ("full", 3),
        ),
        ({"micro_batch_size": 3}, lambda layout: layout.micro_batch_size == 3),
        ({"layers_per_stage": (1, 3)}, lambda layout: layout.layers_per_stage == (1, 3)),
        ({"virtual_pipeline_parallel": 2}, lambda layout: layout.schedule != "1f1b"),
    ],
)
def test_pins_leave_only_what_agrees_and_still_add_up(pins: Pins, holds: Any) -> None:
    space = build(small_spec(), 8, Batch(24, True), "bf16", pins)
    layouts = layouts_of(space.table)
    assert layouts and all(holds(layout) for layout in layouts)
    assert space.considered == len(layouts) + sum(space.illegal.values())
    if "layers_per_stage" not in pins:
        every = set(map(key, free_layouts(24))) if "micro_batch_size" not in pins else None
        # A pinned stage of ZeRO asks for pipelines that keep gradients and parameters whole, too.
        usual = [one for one in layouts if one.pipeline_parallel == 1 or one.zero_stage < 2]
        assert every is None or {key(layout) for layout in usual} <= every


@pytest.mark.parametrize("stage", [2, 3])
def test_a_pinned_stage_of_zero_leaves_pipelines(stage: int) -> None:
    """ZeRO 1 would hold as much and is no answer to the question; without a pipeline a step takes longer."""
    result = search(
        "gpt3-13b",
        world_size=64,
        device="h200",
        global_batch_size=16,
        pin=f"zero={stage}",
        prefer="fastest",
    )
    assert result.best is not None
    assert result.best.layout.zero_stage == stage
    assert result.best.layout.pipeline_parallel > 1


@pytest.mark.parametrize(
    ("pin", "forbid", "holds"),
    [
        ("tp=2..4", None, lambda layout: 2 <= layout.tensor_parallel <= 4),
        (
            ["pp=2,4", "dp=..2"],
            None,
            lambda layout: layout.pipeline_parallel > 1 and layout.data_parallel < 4,
        ),
        ("zero=1..", "zero=2", lambda layout: layout.zero_stage in (1, 3)),
        ("mbs=2,4", None, lambda layout: layout.micro_batch_size in (2, 4)),
        (None, "vpp=2..", lambda layout: layout.virtual_pipeline_parallel == 1),
        (None, "schedule=zbv,dualpipev", lambda layout: layout.schedule not in ("zbv", "dualpipev")),
        (None, "recompute=full", lambda layout: layout.recompute != "full"),
        (None, "cp_form=ring", lambda layout: layout.context_parallel_form != "ring"),
        ("cp_form=ring,all_to_all", "cp=4..", lambda layout: layout.context_parallel < 4),
        (None, "sp=true", lambda layout: not layout.sequence_parallel),
    ],
)
def test_a_narrowed_space_is_the_part_of_the_whole_that_agrees(pin: Any, forbid: Any, holds: Any) -> None:
    batch = Batch(16, True)
    narrowed = build(small_spec(), 8, batch, "bf16", parse_pins(pin, forbid))
    forms = (
        ("ring", "all_to_all") if pin == "cp_form=ring,all_to_all" else ("all_gather", "ring", "all_to_all")
    )
    wanted = {
        layout
        for layout in free_layouts(16)
        if holds(layout) and (layout.context_parallel == 1 or layout.context_parallel_form in forms)
    }
    found = layouts_of(narrowed.table)
    assert set(found) == wanted and len(found) == len(wanted)
    assert narrowed.considered == len(found) + sum(narrowed.illegal.values())


@pytest.mark.parametrize(
    ("pin", "line"),
    [
        ("tp=3..3", "pin tensor_parallel=3..3: leaves none of the values that this job has: 1, 2, 4, 8"),
        (["tp=8", "pp=2.."], "pin pipeline_parallel=2..: leaves none of the values that this job has: 1"),
        ("ep=2..", "pin expert_parallel=2..: leaves none of the values that this job has: 1"),
        ("mbs=5..7", "pin micro_batch_size=5..7: leaves none of the values that this job has: 1, 2, 4, 8"),
        (
            ["vpp=1", "schedule=zbv,interleaved"],
            "virtual_pipeline_parallel=1 and schedule=zbv,interleaved leaves",
        ),
    ],
)
def test_ranges_that_leave_nothing_are_refused(pin: Any, line: str) -> None:
    with pytest.raises(InputError) as caught:
        build(small_spec(), 8, Batch(8), "bf16", parse_pins(pin))
    assert line in str(caught.value)


@pytest.mark.parametrize("pin", [None, ["pp=1", "vpp=1"], ["zero=1", "tp=2", "layers_per_stage=3,1"]])
def test_a_table_writes_out_what_is_asked_for_alone(pin: list[str] | None) -> None:
    space = build(small_spec(), 8, Batch(24, True), "bf16", parse_pins(pin))
    rows = np.random.default_rng(0).integers(0, len(space.table), 40)
    some = space.table.take(rows)
    assert "tensor_parallel" not in vars(space.table)
    layouts = [space.table.layout(int(row)) for row in rows]
    assert [some.layout(row) for row in range(len(rows))] == layouts
    for name in ARRAY_FIELDS:
        column = getattr(space.table, name)
        assert len(column) == len(space.table)
        assert (column[rows] == getattr(some, name)).all()
    # With its columns there, too, and as a table of its own.
    assert [space.table.take(rows).layout(row) for row in range(len(rows))] == layouts
    plain = replace(space.table, micro_batch_size=space.table.micro_batch_size)
    assert [plain.layout(int(row)) for row in rows] == layouts and len(plain) == len(space.table)


def test_rows_of_one_number_have_the_same_states() -> None:
    space = build(small_spec(), 4, Batch(8), "bf16", {})
    layouts = layouts_of(space.table)
    states: dict[int, set[tuple[Any, ...]]] = {}
    for number, layout in zip(space.states.tolist(), layouts, strict=True):
        mesh = (layout.tensor_parallel, layout.context_parallel, layout.context_parallel_form)
        states.setdefault(number, set()).add(
            (*mesh, layout.layers_per_stage, layout.schedule, layout.zero_stage)
        )
    assert len(states) > 100
    assert all(len(alike) == 1 for alike in states.values())


def test_where_possible_is_the_value_in_groups_and_off_elsewhere() -> None:
    pins: Pins = {"zero_stage": WherePossible(1), "sequence_parallel": WherePossible(True)}
    space = build(small_spec(), 8, Batch(24, True), "bf16", pins)
    free = build(small_spec(), 8, Batch(24, True), "bf16", {})
    layouts = layouts_of(space.table)
    wanted = [
        layout
        for layout in free_layouts(24)
        if layout.zero_stage == (layout.data_parallel * layout.context_parallel > 1)
        and layout.sequence_parallel == (layout.tensor_parallel > 1)
    ]
    assert {key(layout) for layout in layouts} == {key(layout) for layout in wanted}
    assert len(layouts) == len(wanted)
    kinds = {(layout.zero_stage, layout.sequence_parallel) for layout in layouts}
    assert kinds == {(0, True), (1, False), (1, True)}
    assert space.considered == len(layouts) + sum(space.illegal.values())
    assert free.considered == 8 * space.considered  # Four stages, with sequence parallelism and without.
    assert not {"zero_group", "sequence_parallel_group"} & space.illegal.keys()


def test_a_maximum_batch_is_used_up_to_the_last_whole_unit() -> None:
    table = build(small_spec(), 8, Batch(100, True), "bf16", {}).table
    turns = np.where(table.runs("interleaved", "interleaved_zb"), table.pipeline_parallel, 1)
    unit = table.micro_batch_size * table.data_parallel * turns
    assert (table.global_batch_size % unit == 0).all()
    assert ((100 - unit < table.global_batch_size) & (table.global_batch_size <= 100)).all()


def test_micro_batches_are_powers_of_two_and_divisors() -> None:
    assert micro_batch_sizes(Batch(12)) == [1, 2, 3, 4, 6, 8, 12]


def test_a_layer_count_that_the_pipeline_does_not_divide_is_legal() -> None:
    table = build(small_spec(layers=7), 4, Batch(8), "bf16", {"pipeline_parallel": 4}).table
    assert (2, 2, 2, 1) in {table.layout(row).layers_per_stage for row in range(len(table))}


@pytest.mark.parametrize(
    ("pins", "line"),
    [
        ({"tensor_parallel": 3}, "tensor_parallel 3 does not divide world size 8; use 1, 2, 4, 8"),
        ({"tensor_parallel": 8, "pipeline_parallel": 2}, "is 16; it must divide world size 8"),
        (
            {"tensor_parallel": 2, "pipeline_parallel": 2, "context_parallel": 1, "data_parallel": 1},
            "is 4; it must equal world size 8",
        ),
    ],
)
def test_pins_that_do_not_make_the_world_size_are_refused(pins: Pins, line: str) -> None:
    with pytest.raises(InputError, match=line):
        build(small_spec(), 8, Batch(8), "bf16", pins)


def test_a_context_parallel_form_where_possible_leaves_groups_of_one_alone() -> None:
    pins: Pins = {"context_parallel_form": WherePossible("ring")}
    table = build(small_spec(), 4, Batch(8), "bf16", pins).table
    kinds = {
        (layout.context_parallel > 1, layout.context_parallel_form)
        for layout in map(table.layout, range(len(table)))
    }
    assert kinds == {(False, "all_gather"), (True, "ring")}
    with pytest.raises(InputError, match="context_parallel_form ring needs context_parallel of at least 2"):
        build(small_spec(), 1, Batch(8), "bf16", {"context_parallel_form": "ring"})


@pytest.mark.parametrize("copies", [3, 128])
def test_copies_that_do_not_divide_the_ranks_are_the_obstacle_and_not_zero(copies: int) -> None:
    line = f"zero_replicas {copies} does not divide the 64 ranks of data_parallel x context_parallel"
    assert obstacle(small_spec(), 64, Batch(64), {"zero_replicas": copies}).startswith(line)


def test_whole_layers_that_are_recomputed_are_not_searched_with_offloading() -> None:
    table = build(small_spec(), 4, Batch(8), "bf16", {"offload_activations": True}).table
    assert {table.layout(row).recompute for row in range(len(table))} == {"none", "selective"}


def test_what_is_not_searched_is_pinned_in_every_row() -> None:
    pins: Pins = {
        "recompute": "selective",
        "recompute_modules": ("mlp", "norm"),
        "recompute_method": "block",
        "recompute_num_layers": 2,
        "offload_activations": True,
        "offload_optimizer": True,
        "zero_replicas": 2,
        "gradient_reduction": "bf16",
        "optimizer": "sgd",
    }
    table = build(small_spec(), 4, Batch(8), "bf16", pins).table
    assert len(table)
    for row in range(len(table)):
        layout = table.layout(row)
        assert all(getattr(layout, name) == value for name, value in pins.items())
        assert layout.zero_stage and layout.zero_shards == 2
