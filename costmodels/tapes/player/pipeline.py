"""A rank of a pipeline: the schedules of `torch.distributed.pipelining` (`schedules.py`, `stage.py`) and what
they hold of messages."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from costmodels.spec.layout import Schedule
from costmodels.spec.schedules import BACKWARD, FORWARD, GATHERED_STAGES, WEIGHTS
from costmodels.tapes.player.heap import Heap, Storage
from costmodels.tapes.player.message_times import Timed, message_times
from costmodels.tapes.player.stage import Stage


class Shared:
    """A storage with several holders."""

    def __init__(self, storage: Storage, base: Shared | None = None) -> None:
        """`base`: what it is another tensor of."""
        self.holders: int = 0
        self.storage, self.base = storage, base
        self.holders = 0
        if base is not None:
            base.holders += 1
        self.gradient: Shared | None = None
        """What its tensor keeps as `grad`."""


class Names:
    """Variables, and what each of them holds."""

    def __init__(self, heap: Heap) -> None:
        self.heap = heap
        self.held: dict[Hashable, Shared] = {}

    def put(self, name: Hashable, shared: Shared | None) -> None:
        """Let a name hold this instead of what it has held."""
        before = self.held.pop(name, None)
        if shared is not None:
            shared.holders += 1
            self.held[name] = shared
        if before is not None:
            self._drop(before)

    def pop(self, name: Hashable) -> None:
        """Let a name hold nothing."""
        self.put(name, None)

    def _drop(self, shared: Shared) -> None:
        shared.holders -= 1
        if not shared.holders:
            if shared.base is None:
                self.heap.free(shared.storage)
            else:
                self._drop(shared.base)
            if shared.gradient is not None:
                self._drop(shared.gradient)

    def clear(self) -> None:
        """The end of all names."""
        for name in list(self.held):
            self.pop(name)


class PipelineStage:
    """One stage and its messages (`runtime.parallel.pipeline_stage.LeanStage`)."""

    def __init__(self, stage: Stage, index: int, names: Names) -> None:
        self.stage, self.index, self.names, self.heap = stage, index, names, stage.heap

    def receive_input(self, number: int) -> Shared | None:
        """`get_fwd_recv_ops`."""
        if self.stage.input is None:
            return None
        shared = Shared(self.heap.allocate(self.stage.input))
        self.names.put(("input", self.index, number), shared)
        return shared

    def receive_gradient(self, number: int) -> Shared | None:
        """`get_bwd_recv_ops`."""
        if self.stage.is_last:
            return None
        shared = Shared(self.heap.allocate(self.stage.output_gradient))
        self.names.put(("gradient", self.index, number), shared)
        return shared

    def forward(self, number: int) -> Shared:
        """`forward_one_chunk`; returns the output."""
        self.stage.forward()
        output = Shared(self.stage.output)
        names, index = self.names, self.index
        names.put(("kept output", index, number), output)
        names.put(("kept input", index, number), names.held.get(("input", index, number)))
        names.pop(("input", index, number))
        return output

    def backward(self, number: int) -> None:
        """`backward_one_chunk`; leaves the gradient of the input."""
        self.stage.backward(is_last=False)
        self._keep_gradient(number)
        self._end(number)

    def inputs(self, number: int) -> None:
        """The same for gradients of inputs; the first stage, which has none, does nothing yet."""
        if self.stage.is_first:
            return
        self.stage.inputs()
        self._keep_gradient(number)
        if self.stage.is_last:
            self.names.pop(("kept output", self.index, number))

    def weights(self, number: int) -> None:
        """`backward_weight_one_chunk`."""
        if self.stage.is_first:
            self.stage.backward(is_last=False)
        else:
            self.stage.weights()
        self._end(number)

    def _keep_gradient(self, number: int) -> None:
        names, index = self.names, self.index
        gradient = self.stage.input_gradient
        if gradient is not None:
            shared = Shared(gradient)
            names.put(("input gradient", index, number), shared)
            kept = names.held[("kept input", index, number)]
            kept.gradient = shared
            shared.holders += 1

    def _end(self, number: int) -> None:
        names, index = self.names, self.index
        names.pop(("kept output", index, number))
        names.pop(("kept input", index, number))
        names.pop(("gradient", index, number))

    def input_gradient(self, number: int) -> Shared | None:
        """`get_bwd_send_ops`."""
        name = "input gradient", self.index, number
        found = self.names.held.get(name)
        if found is not None:
            # The operation has it before the cache lets go.
            self.names.put("sending", found)
            self.names.pop(name)
        return found

    def reduce(self) -> None:
        """`perform_reduce_grad`."""
        self.stage.reduce()


def one_forward_one_backward(stage: PipelineStage, ahead: int, micro_batches: int) -> None:
    """`Schedule1F1B._step_microbatches` of one rank, whose variables are the names.

    Args:
        ahead: forward passes before the first backward pass, where there are as many micro batches.
    """
    names = stage.names
    warm_up = min(micro_batches, ahead)
    last = stage.stage.is_last

    def forward(number: int) -> None:
        names.put("fwd_recvs", stage.receive_input(number))
        output = stage.forward(number)
        names.put("output", output)

    def send_and_score(number: int, scores_first: bool) -> None:
        if last and scores_first:
            stage.stage.loss()
        names.put("fwd_sends", None if last else names.held["output"])
        if last and not scores_first:
            stage.stage.loss()

    def backward(number: int) -> None:
        names.put("bwd_recvs", stage.receive_gradient(number))
        stage.backward(number)
        names.put("bwd_sends", stage.input_gradient(number))
        names.pop("sending")

    for number in range(warm_up):
        forward(number)
        send_and_score(number, scores_first=False)
    for number in range(micro_batches):
        backward(number)
        if warm_up + number < micro_batches:
            forward(warm_up + number)
            send_and_score(warm_up + number, scores_first=True)
    stage.reduce()
    names.clear()


class Action(NamedTuple):
    """What a rank with several stages does next, in PyTorch's words."""

    name: str
    stage: int
    micro_batch: int = -1


@lru_cache(maxsize=256)
def rank_actions(
    schedule: Schedule, stages: tuple[tuple[int, ...], ...], rank: int, micro_batches: int
) -> list[Action]:
    """The actions of one of the ranks that have these stages."""
    timed = _times(schedule, stages, micro_batches)[rank]
    return actions_of(timed, stages[rank], micro_batches)


@lru_cache(maxsize=64)
def _times(schedule: Schedule, stages: tuple[tuple[int, ...], ...], micro_batches: int) -> list[Timed]:
    return message_times(schedule, np.array(stages), micro_batches, awaits_reductions=False)


def actions_of(timed: Timed, stages: Sequence[int], micro_batches: int) -> list[Action]:
    """The actions of a rank with several stages, communication included, in their order.

    Those of `_add_unshard_reshard` and `_add_reduce_grad` take a turn of the rank each; a receive is where
    its sender has its turn (`_add_send_recv`).
    """
    found: list[tuple[int, int, Action]] = []

    def at(time: int, *actions: Action) -> None:
        for action in actions:
            found.append((time, len(found), action))

    turn = 0
    before: list[Action] = []
    around = _gathering(timed, stages)
    left = dict.fromkeys(stages, micro_batches)
    rank = int(timed.time[0]) % timed.turn if len(timed.time) else 0
    for kind, stage, number, time in zip(
        timed.kind.tolist(),
        timed.stage.tolist(),
        timed.micro_batch.tolist(),
        timed.time.tolist(),
        strict=True,
    ):
        before += next(around)
        for pause, action in enumerate(before):
            at((turn + pause) * timed.turn + rank, action)
        before = []
        turn = time // timed.turn + 1
        if kind == FORWARD:
            at(time, Action("forward", stage, number))
            if len(timed.gradients[stage]):
                at(time, Action("send_forward", stage, number))
        else:
            at(time, Action({BACKWARD: "backward", WEIGHTS: "weights"}.get(kind, "inputs"), stage, number))
            if kind != WEIGHTS and len(timed.inputs[stage]):
                at(time, Action("send_backward", stage, number))
        if kind in (BACKWARD, WEIGHTS):
            left[stage] -= 1
            if not left[stage]:
                before.append(Action("reduce", stage))
    for action in [*before, *next(around)]:
        at(turn * timed.turn + rank, action)
        turn += 1
    for name, messages in (("receive_forward", timed.inputs), ("receive_backward", timed.gradients)):
        for stage, times in messages.items():
            for number, time in enumerate(times.tolist()):
                at(time, Action(name, stage, number))
    return [action for _, _, action in sorted(found)]


def _gathering(timed: Timed, stages: Sequence[int]) -> Iterator[list[Action]]:
    """What `_add_unshard_reshard` puts before each pass, and after the last one."""
    order = timed.stage.tolist()
    coming = {stage: [place for place, one in enumerate(order) if one == stage][::-1] for stage in stages}
    active: list[int] = []
    for place in range(len(order)):
        for places in coming.values():
            while places and places[-1] < place:
                places.pop()
        nearest = sorted((places[-1], stage) for stage, places in coming.items() if places)
        wanted = [stage for _, stage in nearest[:GATHERED_STAGES]]
        evicted = [stage for stage in active if stage not in wanted]
        fetched = [stage for stage in wanted if stage not in active]
        active = sorted([*(stage for stage in active if stage in wanted), *fetched])
        yield [
            *(Action("reshard", stage) for stage in evicted),
            *(Action("unshard", stage) for stage in fetched),
        ]
    yield [Action("reshard", stage) for stage in active]


def run_actions(stages: dict[int, PipelineStage], actions: Sequence[Action], names: Names) -> None:
    """`_PipelineScheduleRuntime._step_microbatches` of one rank."""
    asked: set[int] = set()
    for name, index, number in actions:
        stage = stages[index]
        own = stage.stage
        match name:
            case "receive_forward":
                stage.receive_input(number)
            case "receive_backward":
                stage.receive_gradient(number)
            case "unshard":
                own.unshard()
                asked.add(index)
            case "reshard":
                own.reshard()
            case "reduce":
                stage.reduce()
            case "send_backward":
                stage.input_gradient(number)
                names.pop("sending")
            case "send_forward":
                pass
            case _:
                if index in asked:
                    asked.remove(index)
                    own.wait()
                if name == "forward":
                    names.put("output", stage.forward(number))
                    if own.is_last:
                        own.loss()
                    elif index + 1 in stages:
                        output = names.held["output"]
                        names.put(("input", index + 1, number), Shared(output.storage, output))
                    names.pop("output")
                elif name == "weights":
                    stage.weights(number)
                else:
                    if name == "backward":
                        stage.backward(number)
                    else:
                        stage.inputs(number)
                    if index - 1 in stages:
                        gradient = stage.input_gradient(number)
                        names.put(("gradient", index - 1, number), gradient)
                        names.pop("sending")
    names.clear()
