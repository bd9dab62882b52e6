"""Bytes of ranks with several stages: what is held before each pass of a schedule."""

from __future__ import annotations

import numpy as np
import pytest

from costmodels import Layout, ModelSpec
from costmodels.bundled import covers, moments_of_ranks, peak_bytes, rank_peaks
from costmodels.bundled import sent_messages as sent_messages_module
from costmodels.bundled.pass_states import stages_of, states_of
from costmodels.bundled.sent_messages import sent_messages
from costmodels.spec.layout import Schedule
from costmodels.spec.schedules import FORWARD, INPUTS, WEIGHTS
from costmodels.spec.send_order import SENDS_OF_STAGE
from costmodels.spec.table import LayoutTable
from costmodels.tapes.player.message_times import message_times

GPT = ModelSpec(name="gpt", layers=8, hidden=512, heads=8, vocab=1024, seq=256)


def layout(schedule: Schedule, micro_batches: int = 8, **fields: object) -> Layout:
    return Layout.model_validate(
        {
            "pipeline_parallel": 4,
            "virtual_pipeline_parallel": 2,
            "layers_per_stage": (1,) * 8,
            "schedule": schedule,
            "global_batch_size": micro_batches,
            "precision": "bf16",
            **fields,
        }
    )


def test_a_message_comes_after_its_sender_and_before_its_use() -> None:
    stages = stages_of("zbv", 4, 2)
    every = message_times("zbv", stages, 8, awaits_reductions=False)
    for rank, own in enumerate(every):
        assert (np.diff(own.time) > 0).all()
        for stage in stages[rank].tolist():
            used = own.time[(own.stage == stage) & (own.kind == FORWARD)]
            come = own.inputs[stage]
            assert len(come) in (0, 8)
            assert (come < used[: len(come)]).all()


def test_a_v_holds_as_many_chunks_as_twice_its_ranks() -> None:
    classes = ((0, 1),) * 4
    states = states_of("zbv", 4, 2, 64, classes)
    alive = (states.columns["held"] + states.columns["waiting"]).sum(axis=1)
    # Without the pass's own micro batch (arXiv:2401.10241, section 6).
    own = np.isin(states.kind, (FORWARD, INPUTS, WEIGHTS))
    assert alive[own].max() + 1 == 2 * 4
    assert (states.columns["waiting"] >= 0).all()


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved_zb", "zbv", "dualpipev"])
def test_more_micro_batches_change_no_peak_once_a_schedule_is_steady(schedule: Schedule) -> None:
    table = LayoutTable.of([layout(schedule, count) for count in (32, 64)])
    assert covers(GPT, table).all()
    few, many = peak_bytes(GPT, table)
    # Token ids and labels of the whole batch lie on the device.
    assert many - few == pytest.approx(2 * 8 * 32 * GPT.seq)


def test_rows_of_several_schedules_do_not_change_each_other() -> None:
    layouts = [
        layout("zbv"),
        layout("interleaved"),
        layout("1f1b", virtual_pipeline_parallel=1, layers_per_stage=(2,) * 4),
    ]
    together, compositions = rank_peaks(GPT, LayoutTable.of(layouts))
    for row, one in enumerate(layouts):
        alone, _ = rank_peaks(GPT, LayoutTable.of([one]))
        assert together[row] == pytest.approx(alone[0])
    assert compositions.sum(axis=0) == pytest.approx(together)
    assert (moments_of_ranks(GPT, LayoutTable.of(layouts[:1])).peak() == together[0]).all()


def test_what_of_several_stages_is_not_known_is_told() -> None:
    unknown = [
        layout("interleaved", pipeline_parallel=3, layers_per_stage=(2, 2, 1, 1, 1, 1), micro_batches=7),
        layout("dualpipev", micro_batches=4),
    ]
    assert not covers(GPT, LayoutTable.of(unknown)).any()
    known = LayoutTable.of([layout("interleaved", pipeline_parallel=2, virtual_pipeline_parallel=4)])
    assert covers(GPT, known).all() and covers(GPT, known, compiled=True).all()
    assert not covers(GPT, LayoutTable.of([layout("zbv")]), compiled=True).any()


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved_zb", "zbv", "dualpipev"])
def test_no_rank_has_more_messages_under_way_than_it_may(
    schedule: Schedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those that PyTorch since 2.15 keeps until their send is awaited."""
    monkeypatch.setattr(sent_messages_module, "is_before", lambda major, minor: False)
    stages = stages_of(schedule, 4, 2)
    every = message_times(schedule, stages, 12, awaits_reductions=True)
    for timed, found in zip(every, sent_messages(every, stages), strict=True):
        # A pass begins once those that are too many have been awaited; gradients of weights keep two more,
        # and the first of two passes that travel together has given one.
        most = SENDS_OF_STAGE * 2 + (schedule == "dualpipev")
        waiting = np.cumsum(timed.kind == INPUTS) - np.cumsum(timed.kind == WEIGHTS)
        assert (found[1:] <= most + 2 * waiting).all()
        assert found[0] == 0
    assert max(found.max() for found in sent_messages(every, stages)) >= SENDS_OF_STAGE * 2


def test_parameters_are_there_from_their_first_pass_on() -> None:
    states = states_of("interleaved", 2, 4, 8, ((0, 1, 2, 3),) * 2)
    gathered, coming = states.columns["gathered"], states.columns["coming"]
    # Of the next three stages, with that of the pass itself, which is not among the others.
    there = (gathered + coming).sum(axis=1)
    assert there.max() <= 3 and coming.max() == 1
    assert not (gathered * coming).any()
