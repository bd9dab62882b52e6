"""A training step of one rank: micro batches through its stages, reduction of gradients, update."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.tapes.player.chain import Unit
from costmodels.tapes.player.heap import (
    ACTIVATIONS,
    BLOCK_BYTES,
    COMMUNICATION,
    PARAMETERS,
    TEMPORARIES,
    Heap,
    Storage,
    block_bytes,
)
from costmodels.tapes.player.optimizer import step
from costmodels.tapes.player.pipeline import (
    Names,
    PipelineStage,
    one_forward_one_backward,
)
from costmodels.tapes.player.stage import Stages
from costmodels.tapes.player.stage_program import play, program_of
from costmodels.tapes.player.steady import enough_micro_batches

ENOUGH_MICRO_BATCHES = 3
"""After those that are ahead: the first makes gradients, others add to them, and the last reduces them."""


class Rank:
    """The stages of one rank and what lasts as long as its step."""

    def __init__(self, stages: Stages, units: Sequence[Sequence[Unit]], rank: int) -> None:
        setting = stages.setting
        self.model, self.layout, self.heap = setting.model, setting.layout, setting.heap
        self.wraps, self.awaits_sends = setting.wraps, setting.ways.awaits_sends
        self.heap.clear()
        self.heap.enter("build")
        numbers = self.layout.stages_of(rank)
        units_of = dict(zip(numbers, units, strict=True))
        self.stages = []
        """Those that are alike are the same object."""
        for number in numbers:
            after = units_of.get(number + 1)
            kept_as = "" if after is None else after[0].tape.input_category
            self.stages.append(stages.of(units_of[number], kept_as))
        self.groups = [group for stage in self.stages for group in stage.groups]
        self.rank = rank
        self.states = [stage.state_number() for stage in self.stages]
        """Of each stage, as it is between passes."""
        self._hold()

    def _hold(self) -> None:
        """What is there from the beginning of the step to its end."""
        heap, model, layout = self.heap, self.model, self.layout
        for group in self.groups:
            heap.allocate(group.bundle.masters)
            heap.allocate(group.bundle.optimizer)
        positions = model.seq // layout.context_parallel
        tables = sum(rotary_tables(model, layout, stage) for stage in layout.stages_of(self.rank))
        if tables:
            latent = model.latent_attention
            own = model.rotary_dim or model.head_dim
            width = own if latent is None else latent.qk_rope_head_dim
            for _ in range(2 * tables):
                heap.allocate(Storage(PARAMETERS, block_bytes(4 * positions * width)))
        tokens = layout.micro_batches * layout.micro_batch_size * positions
        ids, labels = block_bytes(8 * tokens), block_bytes(8 * tokens * (1 + model.mtp_depths))
        is_first = self.stages[0].is_first
        if is_first:
            heap.allocate(Storage(PARAMETERS, block_bytes(8 * positions)))
        saves = is_first and layout.tensor_parallel == 1
        self.batch = [Storage(ACTIVATIONS if saves else TEMPORARIES, ids), Storage(TEMPORARIES, labels)]
        for storage in self.batch:
            heap.allocate(storage)
        heap.enter("schedule")

    def accumulate(self) -> None:
        """Micro batches one after the other (`runtime.train.executor.Accumulation`)."""
        (stage,) = self.stages
        count = min(self.layout.micro_batches, ENOUGH_MICRO_BATCHES)
        for number in range(1, count + 1):
            is_last = number == count or self.layout.zero_stage == 3
            stage.forward()
            stage.backward(is_last)

    def run(self) -> None:
        """All micro batches."""
        for group in self.groups:
            group.fill_copies()
        self.states = [stage.state_number() for stage in self.stages]
        if self.layout.pipeline_parallel == 1:
            self.accumulate()
            self.states = [stage.state_number() for stage in self.stages]
        else:
            self._run_pipeline()
        # Stage by stage and group by group as `runtime.parallel.working_copies.computing` ends.
        for chunk, stage in reversed([*enumerate(self.stages)]):
            stage.enter_state(self.states[chunk])
            for group in stage.groups:
                group.free_copies()
            for group in reversed(stage.groups):
                group.hand_over()
            self.states[chunk] = stage.state_number()

    def _run_pipeline(self) -> None:
        layout, ahead = self.layout, self.layout.pipeline_parallel - self.rank
        if layout.schedule == "1f1b":
            count = min(layout.micro_batches, ahead + ENOUGH_MICRO_BATCHES)
        else:
            count = enough_micro_batches(layout, self.rank)
        with self._losses(count):
            self._pipe(count, ahead)

    def _pipe(self, count: int, ahead: int) -> None:
        layout = self.layout
        if layout.schedule == "1f1b":
            (stage,) = self.stages
            one_forward_one_backward(PipelineStage(stage, self.rank, Names(self.heap)), ahead, count)
            self.states = [stage.state_number()]
            return
        every = tuple(layout.stages_of(rank) for rank in range(layout.pipeline_parallel))
        program = program_of(layout.schedule, every, self.rank, count, self.awaits_sends, adds=not self.wraps)
        self.states = play(program, self.stages, self.states, self.heap)

    @contextmanager
    def _losses(self, count: int) -> Iterator[None]:
        """The losses of micro batches beyond the `count` that are played: a pipeline keeps all to the end."""
        heap, left_out = self.heap, self.layout.micro_batches - count
        last = [stage.output for stage in self.stages if stage.is_last]
        held = [heap.allocate(one._replace(size=one.size * left_out)) for one in last]
        yield
        _free(heap, held)

    def update(self) -> None:
        """What follows the last micro batch (`runtime.train.trainer.Trainer.train_step`)."""
        heap = self.heap
        _free(heap, self.batch)
        heap.enter("reduce")
        sums = []
        if not self.wraps:
            for group in self.groups:
                sums += [
                    heap.allocate(Storage(COMMUNICATION, made.size))
                    for one, made in zip(group.bundle.parts, group.bundle.wide, strict=True)
                    if one.parameter.partial
                ]
        gradients = sum(len(group.bundle.parts) for group in self.groups)
        if not self.layout.offload_optimizer:
            # A norm of each.
            heap.free(heap.allocate(Storage(TEMPORARIES, BLOCK_BYTES * gradients)))
        step(heap, self.layout, [group.bundle.updated for group in self.groups])
        _free(heap, sums)
        for stage, state in zip(self.stages, self.states, strict=True):
            stage.enter_state(state)
            for group in stage.groups:
                group.drop_gradients()


def _free(heap: Heap, storages: Iterable[Storage]) -> None:
    for storage in storages:
        heap.free(storage)


def rotary_tables(model: ModelSpec, layout: Layout, stage: int) -> int:
    """Pairs of cosines and sines that the layers of a stage share."""
    kinds = {model.layer_kind(layer).attention for layer in layout.layer_range(stage)}
    return len({model.turned_by(kind) for kind in kinds} - {None})
