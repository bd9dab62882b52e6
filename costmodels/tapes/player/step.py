"""A training step of one rank: micro batches through its stages, reduction of gradients, update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.tapes.dimensions import dimensions
from costmodels.tapes.player.heap import (
    ACTIVATIONS,
    COMMUNICATION,
    PARAMETERS,
    TEMPORARIES,
    Heap,
    Storage,
    block_bytes,
)
from costmodels.tapes.player.message_times import message_times
from costmodels.tapes.player.optimizer import Updated, state_of, step, updated
from costmodels.tapes.player.pipeline import (
    Names,
    PipelineStage,
    actions_of,
    one_forward_one_backward,
    run_actions,
)
from costmodels.tapes.player.sharding import Group
from costmodels.tapes.player.stage import Stage, Unit
from costmodels.tapes.player.steady import enough_micro_batches
from costmodels.tapes.player.units import Sizes

ENOUGH_MICRO_BATCHES = 3
"""Without a pipeline: the first makes gradients, others add to them, and the last reduces them."""


class Rank:
    """The stages of one rank and what lasts as long as its step."""

    def __init__(self, model: ModelSpec, layout: Layout, stages: Sequence[Sequence[Unit]], rank: int) -> None:
        self.model, self.layout, self.heap = model, layout, Heap()
        self.heap.enter("build")
        sizes = Sizes(dimensions(model, layout))
        self.stages = [Stage(self.heap, model, layout, units, sizes) for units in stages]
        self.parameters = self._updated(stages)
        self.rank = rank
        self._hold()

    @property
    def groups(self) -> list[Group]:
        """Of all stages."""
        return [group for stage in self.stages for group in stage.groups]

    def _updated(self, stages: Sequence[Sequence[Unit]]) -> list[Updated]:
        """The parameters as the optimizer sees them."""
        alone = {"tensor_parallel": 1, "sequence_parallel": False, "expert_tensor_parallel": 1}
        whole = Sizes(dimensions(self.model, self.layout.model_copy(update=alone)))
        found: list[Updated] = []
        for stage in self.stages:
            sides = stage.whole_sides(whole)
            for group in stage.groups:
                found += updated(group.parts, sides[id(group)], group is not stage.root)
        return found

    def _hold(self) -> None:
        """What is there from the beginning of the step to its end."""
        heap, model, layout = self.heap, self.model, self.layout
        for group in self.groups:
            for storage in group.masters():
                heap.allocate(storage)
        for storage in state_of(layout, self.parameters):
            heap.allocate(storage)
        positions = model.seq // layout.context_parallel
        if model.position == "rope":
            latent = model.latent_attention
            width = model.head_dim if latent is None else latent.qk_rope_head_dim
            for _ in range(2 * len(self.stages)):
                heap.allocate(Storage(PARAMETERS, block_bytes(4 * positions * width)))
        ids = block_bytes(8 * layout.micro_batches * layout.micro_batch_size * positions)
        is_first = self.stages[0].places[0].kind == "embedding"
        if is_first:
            heap.allocate(Storage(PARAMETERS, block_bytes(8 * positions)))
        saves = is_first and layout.tensor_parallel == 1
        self.batch = [Storage(ACTIVATIONS if saves else TEMPORARIES, ids), Storage(TEMPORARIES, ids)]
        for storage in self.batch:
            heap.allocate(storage)

    def accumulate(self) -> None:
        """Micro batches one after the other (`runtime.train.executor.Accumulation`)."""
        (stage,) = self.stages
        count = min(self.layout.micro_batches, ENOUGH_MICRO_BATCHES)
        for number in range(1, count + 1):
            is_last = number == count or self.layout.zero_stage == 3
            stage.forward()
            stage.loss()
            stage.backward(is_last, reshards=is_last)
            self.heap.enter("schedule")

    def run(self) -> None:
        """All micro batches."""
        if self.layout.pipeline_parallel == 1:
            self.accumulate()
            return
        layout = self.layout
        names = Names(self.heap)
        stages = {
            index: PipelineStage(stage, index, names)
            for stage, index in zip(self.stages, layout.stages_of(self.rank), strict=True)
        }
        count = enough_micro_batches(layout, self.rank)
        if layout.schedule == "1f1b":
            (stage,) = stages.values()
            one_forward_one_backward(stage, layout.pipeline_parallel - self.rank, count)
            return
        every = np.array([layout.stages_of(rank) for rank in range(layout.pipeline_parallel)])
        timed = message_times(layout.schedule, every, count, awaits_reductions=False)[self.rank]
        run_actions(stages, actions_of(timed, list(stages), count), names)

    def update(self) -> None:
        """What follows the last micro batch (`runtime.train.trainer.Trainer.train_step`)."""
        heap = self.heap
        _free(heap, self.batch)
        heap.enter("reduce")
        sums = [
            heap.allocate(Storage(COMMUNICATION, gradient.size))
            for stage in self.stages
            if not stage.wraps
            for group in stage.groups
            for part, gradient in zip(group.parts, group.fresh, strict=True)
            if gradient is not None and part.parameter.partial
        ]
        step(heap, self.layout, self.parameters)
        _free(heap, sums)
        for group in self.groups:
            _free(heap, (one for one in (*group.fresh, group.gradient) if one is not None))


def _free(heap: Heap, storages: Iterable[Storage]) -> None:
    for storage in storages:
        heap.free(storage)
