"""When messages between the ranks of a pipeline come."""

from __future__ import annotations

import numpy as np
import pytest

from costmodels import Layout
from costmodels.spec.layout import Schedule
from costmodels.spec.schedules import FORWARD
from costmodels.tapes.player.message_times import message_times


@pytest.mark.parametrize("schedule", ["interleaved", "interleaved_zb", "zbv", "dualpipev"])
def test_a_message_comes_after_its_sender_and_before_its_use(schedule: Schedule) -> None:
    layout = Layout(
        pipeline_parallel=4,
        virtual_pipeline_parallel=2,
        layers_per_stage=(1,) * 8,
        schedule=schedule,
        global_batch_size=8,
    )
    stages = np.array([layout.stages_of(rank) for rank in range(4)])
    every = message_times(schedule, stages, 8, awaits_reductions=False)
    given = {
        stage: own.time[(own.stage == stage) & (own.kind == FORWARD)]
        for own, there in zip(every, stages.tolist(), strict=True)
        for stage in there
    }
    for rank, own in enumerate(every):
        assert (np.diff(own.time) >= 0).all()
        for stage in stages[rank].tolist():
            come = own.inputs[stage]
            assert len(come) in (0, 8)
            assert (come < given[stage][: len(come)]).all()
            if len(come):
                assert (come == given[stage - 1]).all()
