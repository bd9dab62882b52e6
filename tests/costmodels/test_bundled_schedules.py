"""Bytes of ranks with several stages: what is held before each pass of a schedule."""

from __future__ import annotations

import numpy as np
import pytest

from costmodels import Layout, ModelSpec
from costmodels.bundled import covers, moments_of_ranks, peak_bytes, rank_peaks
from costmodels.bundled.message_times import message_times
from costmodels.bundled.pass_states import stages_of, states_of
from costmodels.bundled.pytorch import is_before
from costmodels.layout import Schedule
from costmodels.schedules import FORWARD, INPUTS, WEIGHTS
from costmodels.table import LayoutTable

pytestmark = pytest.mark.skipif(
    not is_before(2, 15),
    reason="bytes of several stages on a rank are known for PyTorch before 2.15 only",
)

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
    every = message_times("zbv", stages, 8)
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
        layout("interleaved", data_parallel=2, zero_stage=3, global_batch_size=16),
        layout("interleaved", pipeline_parallel=2, virtual_pipeline_parallel=4),
        layout("dualpipev", micro_batches=4),
    ]
    assert not covers(GPT, LayoutTable.of(unknown)).any()
