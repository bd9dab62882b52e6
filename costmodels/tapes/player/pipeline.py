"""A rank of a pipeline with one stage: 1F1B of `torch.distributed.pipelining` (`schedules.py`, `stage.py`)
and what it holds of messages."""

from __future__ import annotations

from collections.abc import Hashable

from costmodels.tapes.player.heap import Heap, Storage
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
        """`forward_one_chunk`; returns the output, which a last stage keeps to the end of the step."""
        self.stage.forward()
        output = Shared(self.stage.output)
        names, index = self.names, self.index
        names.put(("kept output", index, number), output)
        if self.stage.is_last:
            names.put(("loss", index, number), output)
        names.put(("kept input", index, number), names.held.get(("input", index, number)))
        names.pop(("input", index, number))
        return output

    def release(self, number: int) -> None:
        """`release_fwd_send_outputs`."""
        self.names.pop(("kept output", self.index, number))

    def backward(self, number: int) -> None:
        """`backward_one_chunk`; leaves the gradient of the input."""
        self.stage.backward(is_last=False)
        self._keep_gradient(number)
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
    awaits = stage.stage.setting.ways.awaits_sends

    def forward(number: int) -> None:
        names.put("fwd_recvs", stage.receive_input(number))
        output = stage.forward(number)
        names.put("output", output)

    def send() -> None:
        names.put("fwd_sends", None if last else names.held["output"])
        if awaits:
            names.pop("output")

    def wait(number: int) -> None:
        if awaits:
            names.pop("fwd_sends")
            stage.release(number)

    def backward(number: int) -> None:
        names.put("bwd_recvs", stage.receive_gradient(number))
        if awaits and number + warm_up <= micro_batches:
            # The last output has gone together with it.
            wait(number + warm_up - 1)
            names.pop("bwd_recvs")
        stage.backward(number)
        names.put("bwd_sends", stage.input_gradient(number))
        names.pop("sending")

    for number in range(warm_up):
        forward(number)
        if number:
            wait(number - 1)
        send()
    for number in range(micro_batches):
        backward(number)
        if warm_up + number < micro_batches:
            forward(warm_up + number)
            send()
    stage.reduce()
    names.clear()
