"""The player of tapes: what holds of every step, whatever its layout."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from costmodels import Layout, even_split
from costmodels.spec.layout import SPLIT_BACKWARD, Schedule
from costmodels.spec.schedules import schedule_exists
from costmodels.tapes import player
from costmodels.tapes.player.bundle import Bundle, Policy
from costmodels.tapes.player.heap import GRADIENTS, TEMPORARIES, Heap, Storage
from costmodels.tapes.player.pipeline import Names, Shared
from costmodels.tapes.player.setting import Setting
from costmodels.tapes.player.sharding import Group, Traffic
from costmodels.tapes.player.stage import Stages
from costmodels.tapes.player.stage_program import DOES, INPUT, NEXT_PASS, program_of
from costmodels.tapes.player.step import Rank
from costmodels.tapes.player.units import Parameter
from costmodels.tapes.player.ways import ways_of
from tests.support import models

VERSIONS = VERSION, NEWEST = "2.14", "2.15"
"""Before and after FSDP2 and pipelines of PyTorch changed."""

LLAMA = models.LLAMA.model_copy(update={"layers": 6, "tied": True})

LAYOUTS = st.fixed_dictionaries(
    {
        "tensor_parallel": st.sampled_from((1, 2)),
        "pipeline_parallel": st.sampled_from((1, 2, 3)),
        "virtual_pipeline_parallel": st.sampled_from((1, 1, 2)),
        "data_parallel": st.sampled_from((1, 2, 4)),
        "zero_stage": st.sampled_from((0, 1, 2, 3)),
        "zero_replicas": st.sampled_from((1, 1, 2)),
        "schedule": st.sampled_from(("interleaved", "interleaved", *SPLIT_BACKWARD)),
        "micro_batches": st.integers(1, 4),
        "gradient_reduction": st.sampled_from(("fp32", "bf16")),
        "optimizer": st.sampled_from(("adam", "sgd", "adafactor", "muon")),
        "offload_optimizer": st.booleans(),
        "recompute": st.sampled_from(("none", "full")),
    }
)


def layout(micro_batches: int, schedule: Schedule = "interleaved", **fields: Any) -> Layout | None:
    """A layout of `LLAMA`, with `schedule` where ranks have several stages; None where fields contradict each
    other."""
    pipeline, chunks = fields["pipeline_parallel"], fields["virtual_pipeline_parallel"]
    count = max(1, micro_batches) * (pipeline if pipeline > 1 else 1)
    schedule = schedule if chunks > 1 else "1f1b"
    if not schedule_exists(schedule, pipeline, chunks, count):
        return None
    try:
        return Layout.model_validate(
            {
                "layers_per_stage": even_split(LLAMA.layers, pipeline * chunks),
                "schedule": schedule,
                "global_batch_size": fields["data_parallel"] * count,
                "precision": "bf16",
                **fields,
            }
        )
    except ValueError:
        return None


@given(LAYOUTS, st.integers(0, 2), st.sampled_from(VERSIONS))
def test_a_step_leaves_what_it_began_with(fields: dict[str, Any], rank: int, version: str) -> None:
    drawn = layout(**fields)
    assume(drawn is not None and rank < drawn.pipeline_parallel)
    assert drawn is not None
    assume(player.plays(LLAMA, drawn, compiled=False, version=version))
    units = [
        player.units_of(LLAMA, drawn, stage, compiled=False, version=version)
        for stage in drawn.stages_of(rank)
    ]
    played = Rank(Stages(Setting(LLAMA, drawn, ways_of(version))), units, rank)
    before, batch = played.heap.total, sum(storage.size for storage in played.batch)
    played.run()
    assert played.heap.total >= before
    played.update()
    assert played.heap.total == before - batch
    assert all(moment.total >= before - batch for moment in played.heap.moments())


@pytest.mark.slow
@given(LAYOUTS)
def test_no_rank_needs_less_with_more_micro_batches(fields: dict[str, Any]) -> None:
    one, other = layout(**fields), layout(**fields | {"micro_batches": fields["micro_batches"] + 1})
    assume(one is not None and other is not None)
    assert one is not None and other is not None
    assume(player.plays(LLAMA, one, compiled=True, version=VERSION))
    less, _ = player.rank_peaks(LLAMA, [one], compiled=True, version=VERSION)
    more, _ = player.rank_peaks(LLAMA, [other], compiled=True, version=VERSION)
    assert (more >= less).all()


def test_a_passes_effect_is_the_same_again() -> None:
    """Passes that find the same state are played once."""
    fields: dict[str, Any] = {
        "pipeline_parallel": 2,
        "virtual_pipeline_parallel": 1,
        "data_parallel": 2,
        "zero_stage": 3,
    }
    drawn = layout(3, **fields)
    assert drawn is not None
    once = player.rank_peaks(LLAMA, [drawn], compiled=False, version=VERSION)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Heap, "repeat", lambda heap, effects, key, play: play())
        patch.setattr("costmodels.tapes.player.stage.Stage._once", lambda stage, name, play: play())
        again = player.rank_peaks(LLAMA, [drawn], compiled=False, version=VERSION)
    assert (once[0] == again[0]).all() and (once[1] == again[1]).all()


def test_layouts_without_tapes_are_told() -> None:
    drawn = layout(1, pipeline_parallel=1, virtual_pipeline_parallel=1, data_parallel=1)
    assert drawn is not None
    assert player.missing(LLAMA, drawn, compiled=False, version=VERSION) == ()
    unknown = LLAMA.model_copy(update={"activation": "relu2", "gated": False})
    (found,) = player.missing(unknown, drawn, compiled=False, version=VERSION)
    assert found.activation == "relu2"
    assert not player.plays(unknown, drawn, compiled=False, version=VERSION)
    with pytest.raises(KeyError, match="relu2"):
        player.rank_moments(unknown, drawn, 0, compiled=False, version=VERSION)


def test_versions_with_other_ways_are_not_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(player, "has_tapes", lambda *_: True)
    drawn = layout(1, pipeline_parallel=1, virtual_pipeline_parallel=1, data_parallel=1)
    assert drawn is not None
    assert player.plays(LLAMA, drawn, compiled=False, version=NEWEST)
    assert not player.plays(LLAMA, drawn, compiled=False, version="2.16")


def test_compiled_layers_split_no_backward() -> None:
    drawn = layout(2, pipeline_parallel=2, virtual_pipeline_parallel=2, data_parallel=1)
    assert drawn is not None
    for schedule in SPLIT_BACKWARD:
        split = drawn.model_copy(update={"schedule": schedule})
        assert not player.plays(LLAMA, split, compiled=True, version=VERSION)


def test_a_storage_ends_with_the_last_of_its_names() -> None:
    heap = Heap()
    heap.enter("schedule")
    names = Names(heap)
    shared = Shared(heap.allocate(Storage(0, 512)))
    names.put("output", shared)
    names.put("input", Shared(shared.storage, shared))
    names.pop("output")
    assert heap.total == 512
    names.put("input", None)
    assert heap.total == 0


def test_a_rank_with_the_first_stage_splits_backward_of_its_others() -> None:
    model = LLAMA.model_copy(update={"layers": 4})
    layout = Layout(
        pipeline_parallel=2,
        virtual_pipeline_parallel=2,
        schedule="interleaved_zb",
        layers_per_stage=(1,) * 4,
        micro_batch_size=2,
        global_batch_size=8,
    )
    totals, _ = player.rank_peaks(model, [layout], compiled=False, version=VERSION)
    assert (totals > 0).all()


def test_the_input_of_a_stage_ends_before_gradients_of_its_weights_are_added_up() -> None:
    stages = (0, 3), (1, 2)
    program = program_of("zbv", stages, 1, micro_batches=4, awaits=False, adds=True)
    passes = iter(zip(program.does.tolist(), program.chunks.tolist(), strict=True))
    computed, ended, added = [0, 0], 0, 0
    for change in program.changes.tolist():
        if change == NEXT_PASS:
            does, chunk = next(passes)
            computed[chunk] += DOES[does] == "weights"
            if DOES[does] == "add_up":
                assert ended == computed[0]
                added += 1
        elif change == 2 * INPUT + 1:
            # Only the first of the two stages has its input from another rank.
            ended += 1
    assert added == sum(computed) == 8
    assert ended == 4


def group_of_three() -> Group:
    """Three matrices on two ranks, whose gradients are made in bf16 and reduced in fp32."""
    policy = Policy(
        shards=2,
        holders=2,
        all_reduces=False,
        frees=False,
        width=2,
        reduced=4,
        converts=True,
        widens=True,
        offloads=False,
        any_side=False,
    )
    matrices = [Parameter(str(number), (512 * number, 4), True, False) for number in (1, 2, 3)]
    made = [Storage(GRADIENTS, 2 * one.elements) for one in matrices]
    return Group(Heap(), Traffic(), Bundle(matrices, made, policy, ways_of(VERSION)), False, True)


def give(group: Group, passing: list[int]) -> None:
    """New gradients of all parameters, of which FSDP2 comes to some before the pass ends."""
    for number, storage in enumerate(group.bundle.made):
        group.heap.allocate(storage._replace(category=TEMPORARIES) if number in passing else storage)


def test_gradients_that_come_late_wait_for_the_next_time_that_fsdp2_comes() -> None:
    group = group_of_three()
    heap, bundle = group.heap, group.bundle
    made, sums = ([one.size for one in storages] for storages in (bundle.made, bundle.sums))
    for gradients, listed in ((sums[0] + sums[1] + made[2], 0), (sum(sums) + made[2], made[2])):
        give(group, [0, 1])
        assert group.see([0, 1], is_first=True, last=[1])
        # What was there before a pass ends with it.
        assert heap.bytes[GRADIENTS] == gradients + listed
        group.traffic.end_list(heap)
        assert heap.bytes[GRADIENTS] == gradients
    group.post_backward(is_last=False, reshards=False)
    assert heap.bytes[GRADIENTS] == sum(sums)
    assert (group.has_fresh, group.has_sums, heap.bytes[TEMPORARIES]) == (False, True, 0)


def test_to_gradients_that_came_late_alone_backward_adds_others() -> None:
    group = group_of_three()
    give(group, [0, 1])
    group.see([0, 1], is_first=True)
    assert (group.manner(is_last=False), group.late) == ("makes", (2,))
    group.come("makes")
    assert (group.manner(is_last=False), group.late) == ("adds", ())


@pytest.mark.parametrize("waits", [False, True])
def test_gradients_that_come_late_are_reduced_with_the_others(waits: bool) -> None:
    group = group_of_three()
    give(group, [0, 1])
    assert group.see([0, 1], is_first=True)
    if not waits:
        group.post_backward(is_last=False, reshards=False)
    group.post_backward(is_last=True, reshards=True)
    assert group.heap.bytes[GRADIENTS] == group.bundle.gradient.size
    assert (group.has_fresh, group.has_sums) == (False, False)


def test_of_gradients_that_come_in_parts_fsdp2_sees_each_once() -> None:
    group = group_of_three()
    give(group, [0, 1, 2])
    assert group.see([0], is_first=True)
    assert group.see([1, 2], is_first=False)
    assert group.heap.bytes[GRADIENTS] == sum(one.size for one in group.bundle.sums)
    assert not group.has_fresh
