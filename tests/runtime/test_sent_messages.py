"""How long messages are kept equals what PyTorch's schedules say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some
from torch.distributed.pipelining import schedules

from costmodels.bundled.pass_states import stages_of
from costmodels.bundled.sent_messages import sent_messages
from costmodels.spec.layout import Schedule
from costmodels.spec.schedules import BACKWARD, FORWARD, orders, schedule_exists
from costmodels.spec.send_order import SENDS_OF_STAGE
from costmodels.tapes.player.message_times import Timed, message_times
from runtime.parallel.send_limit import keeps_messages, limit_sends
from tests.support.schedule_orders import planned

torch_schedules: Any = schedules

pytestmark = pytest.mark.skipif(
    not keeps_messages(),
    reason="PyTorch awaits sends in the middle of a step since 2.15",
)


def lowered(stages: Any, micro_batches: int) -> dict[int, list[Any]]:
    """PyTorch's actions of each rank of an interleaved schedule, communication included."""
    kinds = {FORWARD: torch_schedules.F, BACKWARD: torch_schedules.B}
    pipeline, chunks = stages.shape
    rank_of = {stage: rank for rank, own in enumerate(stages.tolist()) for stage in own}
    actions: dict[int, list[Any]] = {}
    for rank, order in enumerate(orders("interleaved", pipeline, chunks, micro_batches)):
        passes = zip(order.kind.tolist(), order.stage.tolist(), order.micro_batch.tolist(), strict=True)
        own = [torch_schedules._Action(stage, kinds[kind], number) for kind, stage, number in passes]
        gathering = torch_schedules._add_unshard_reshard(own)
        actions[rank] = torch_schedules._add_reduce_grad(gathering, micro_batches)
    actions = torch_schedules._add_send_recv(actions, rank_of.__getitem__, stages.size)
    actions = torch_schedules._add_wait_send(actions)
    return limit_sends(actions, rank_of.__getitem__, SENDS_OF_STAGE * chunks)


def messages(actions: list[Any], timed: Timed) -> tuple[list[int], list[int]]:
    """Messages sent and not awaited yet, and receives posted, before each pass."""
    sent = received = 0
    found: tuple[list[int], list[int]] = ([], [])
    for action in actions:
        name = action.computation_type.value
        if name in ("SEND_F", "SEND_B"):
            sent += 1
        elif name in ("WAIT_SEND_F", "WAIT_SEND_B"):
            sent -= 1
        elif name in ("RECV_F", "RECV_B"):
            received += 1
        elif name in ("F", "B"):
            found[0].append(sent)
            found[1].append(received)
    assert len(found[0]) == len(timed.kind)
    return found


@pytest.mark.parametrize(
    ("pipeline", "chunks", "micro_batches"), [(2, 2, 6), (4, 2, 8), (3, 4, 9), (5, 2, 5)]
)
def test_sends_are_awaited_when_pytorch_awaits_them(pipeline: int, chunks: int, micro_batches: int) -> None:
    stages = stages_of("interleaved", pipeline, chunks)
    every = message_times("interleaved", stages, micro_batches, awaits_reductions=True)
    actions = lowered(stages, micro_batches)
    for rank, (timed, found) in enumerate(zip(every, sent_messages(every, stages), strict=True)):
        sent, received = messages(actions[rank], timed)
        assert found[:-1].tolist() == sent
        come = np.sort(np.concatenate([*timed.inputs.values(), *timed.gradients.values()]))
        assert np.searchsorted(come, timed.time).tolist() == received


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
