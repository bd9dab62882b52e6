"""Tensors that a pipeline stage keeps and lets go, between the calls of PyTorch's schedules."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from runtime.parallel.pipeline_stage import FREES_BUFFERS, LeanStage

pytestmark = pytest.mark.skipif(FREES_BUFFERS, reason="this PyTorch frees receive buffers itself")

BATCHES = 3


class Parts:
    """A stage of four, of which the last two may be on one rank, and what it has called."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, index: int = 1, has_backward: bool = True, is_v: bool = False
    ) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.stage = stage = LeanStage.__new__(LeanStage)
        stage.stage_index, stage.num_stages, stage.group_rank = index, 4, index
        stage.stage_index_to_group_rank = {0: 0, 1: 1, 2: 2, 3: 2 if is_v else 3}
        stage.device, stage.submod = torch.device("cpu"), torch.nn.Identity()
        self.stage.has_backward = has_backward
        for name in ("args_recv_info", "grad_recv_info"):
            infos = {n: (SimpleNamespace(buffer=torch.empty(2, device="meta")),) for n in range(BATCHES)}
            setattr(stage, name, infos)
        own: Any = stage
        own.fwd_cache = {number: ((torch.ones(1),), [torch.ones(1)]) for number in range(BATCHES)}
        documents: Any = SimpleNamespace(enter=lambda module, number: self.calls.append(("enter", number)))
        stage.documents = documents
        own.loss, own.labels = SimpleNamespace(labels=None), ["a", "b", "c"]
        self.copies = SimpleNamespace(
            add_gradients=lambda: self.calls.append(("add",)), reduce=lambda: self.calls.append(("reduce",))
        )
        stage.copies = self.copies  # type: ignore[assignment]
        for name in (
            *("get_fwd_recv_ops", "get_bwd_recv_ops", "forward_one_chunk", "get_fwd_send_ops"),
            *("backward_one_chunk", "backward_weight_one_chunk", "perform_reduce_grad"),
        ):
            monkeypatch.setattr(PipelineStage, name, self._noting(name))

    def _noting(self, name: str) -> Any:
        def note(stage: Any, *given: Any) -> str:
            self.calls.append((name, *given, self.places()))
            return name

        return note

    def places(self) -> list[str]:
        """Places of the buffers of inputs and of gradients, microbatch by microbatch."""
        every = (self.stage.args_recv_info, self.stage.grad_recv_info)
        return ["".join(infos[n][0].buffer.device.type[0] for n in range(BATCHES)) for infos in every]

    def kept(self) -> list[bool]:
        """True for each microbatch whose tensors for backward are there."""
        own: Any = self.stage
        return [bool(own.fwd_cache[number][0]) for number in range(BATCHES)]


@pytest.mark.parametrize("has_backward", [True, False])
@pytest.mark.parametrize("index", range(4))
def test_buffers_live_from_the_receive_to_the_use(
    index: int, has_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch, index, has_backward)
    stage, receives, returns = parts.stage, index > 0, has_backward and index < 3
    assert stage.get_fwd_recv_ops(1) == "get_fwd_recv_ops"
    assert parts.calls.pop() == ("get_fwd_recv_ops", 1, ["mcm" if receives else "mmm", "mmm"])
    [info] = stage.args_recv_info[1]
    assert info.buffer.requires_grad == (has_backward and receives)
    assert stage.forward_one_chunk(1, (), {}) == "forward_one_chunk"
    assert stage.loss is not None and stage.loss.labels == "b"
    assert parts.calls == [
        ("enter", 1),
        ("forward_one_chunk", 1, (), {}, ["mcm" if receives else "mmm", "mmm"]),
    ]
    assert parts.places() == ["mmm", "mmm"]
    # Outputs for the next rank are kept until they are sent.
    forgets = not has_backward and index == 3
    assert parts.kept() == [True, not forgets, True]
    stage.get_fwd_send_ops(1)
    assert parts.kept() == [True, has_backward, True]
    parts.calls.clear()
    stage.get_bwd_recv_ops(1)
    assert parts.calls.pop() == ("get_bwd_recv_ops", 1, ["mmm", "mcm" if returns else "mmm"])
    loss = (torch.ones(1, requires_grad=True) * 2) if index == 3 else None
    stage.backward_one_chunk(1, loss, False, True)
    assert parts.calls[0] == ("enter", 1)
    assert parts.calls[1][:3] == ("backward_one_chunk", 1, loss) and parts.calls[1][3:5] == (False, True)
    assert parts.places() == ["mmm", "mmm"]
    assert loss is None or loss.requires_grad != has_backward, "its graph would keep the stage's input"


@pytest.mark.parametrize(("is_v", "kept"), [(True, False), (False, True)])
def test_an_evaluation_forgets_what_goes_to_no_other_rank(
    is_v: bool, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch, index=2, has_backward=False, is_v=is_v)
    parts.stage.forward_one_chunk(0)
    assert parts.kept() == [kept, True, True]
    training = Parts(monkeypatch, index=2, has_backward=True, is_v=is_v)
    training.stage.forward_one_chunk(0)
    assert training.kept() == [True] * 3


@pytest.mark.parametrize("has_copies", [True, False])
def test_gradients_that_a_schedule_splits_off_are_added_and_reduced_once(
    has_copies: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(monkeypatch)
    if not has_copies:
        parts.stage.copies = None
    parts.stage.backward_weight_one_chunk(2, True)
    parts.stage.perform_reduce_grad(4)
    where = parts.places()
    assert parts.calls == [
        ("enter", 2),
        ("backward_weight_one_chunk", 2, True, where),
        *([("add",)] if has_copies else []),
        ("perform_reduce_grad", 4, where),
        *([("reduce",)] if has_copies else []),
    ]


def test_a_rank_sends_nothing_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(monkeypatch)
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(
        PipelineStage,
        "_get_init_p2p_neighbors_ops",
        lambda stage: [SimpleNamespace(peer=peer) for peer in (4, 5, 6, 5)],
    )
    assert [op.peer for op in parts.stage._get_init_p2p_neighbors_ops()] == [4, 6]


def test_buffers_are_made_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(monkeypatch)
    for name in ("_prepare_forward_infra", "_prepare_backward_infra"):
        monkeypatch.setattr(PipelineStage, name, lambda stage, *given, **named: (stage.device, given, named))
        made, *given = getattr(parts.stage, name)(1, more=2)
        assert made.type == "meta" and given == [(1,), {"more": 2}]
        assert parts.stage.device.type == "cpu"
