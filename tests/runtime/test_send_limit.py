"""Sends are awaited in the middle of a step where PyTorch would await them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some
from torch.distributed.pipelining import schedules

from costmodels.spec.layout import Schedule
from costmodels.spec.schedules import schedule_exists
from runtime.parallel.send_limit import keeps_messages, limit_sends
from tests.support.schedule_orders import planned

torch_schedules: Any = schedules

pytestmark = pytest.mark.skipif(
    not keeps_messages(),
    reason="PyTorch awaits sends in the middle of a step since 2.15",
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    schedule=some.sampled_from(("interleaved", "interleaved_zb", "zbv", "dualpipev")),
    pipeline=some.integers(2, 5),
    chunks=some.integers(2, 4),
    micro_batches=some.integers(2, 12),
    most=some.integers(1, 6),
)
def test_the_runtime_awaits_the_sends_that_pytorch_would(
    schedule: Schedule, pipeline: int, chunks: int, micro_batches: int, most: int
) -> None:
    assume(schedule_exists(schedule, pipeline, chunks, micro_batches))
    plan = planned(schedule, pipeline, chunks, micro_batches)
    actions, rank_of = plan.pipeline_order_with_comms, plan.stage_index_to_group_rank.__getitem__
    try:
        expected = torch_schedules._add_wait_send_budget(actions, rank_of, most)
    except ValueError:
        with pytest.raises(RuntimeError, match="under way"):
            limit_sends(actions, rank_of, most)
        return
    assert limit_sends(actions, rank_of, most) == expected
