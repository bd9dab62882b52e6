"""Passes of microbatches with the same effect on memory, of which only the first few are run.

A pipeline stage has the same effect on memory in each microbatch, except in the first ones, which allocate
gradients, and in the last one, which reduces them. So two microbatches in the middle are run and compared.
For the following ones, the recorded changes of memory are repeated, and only the results of a pass are made.
This does not work for schedules that split backward, as the state at a pass depends on earlier passes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from runtime.dryrun.quiet import logs_from
from runtime.dryrun.tracker import Block, Tracker
from runtime.parallel.pipeline import Pipeline

COMPARED = 2, 3
"""Microbatches of a step that are compared; from then on compiled layers run in their final form."""


class UnlikePassesError(Exception):
    """Error: repeated passes have effects that cannot be repeated."""


class Made(NamedTuple):
    """A tensor that a pass returns, in memory allocated by the pass."""

    block: int
    """The number of the tensor's memory block among the blocks of the pass."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


class Change(NamedTuple):
    """A change of memory."""

    forward: bool
    """True if the forward pass of the microbatch made the block; otherwise its backward pass did."""
    block: int
    """The number of the block among the blocks of that pass."""
    delta: int
    """Bytes that are allocated, or freed if negative."""
    phase: str


class Pass(NamedTuple):
    """The effect of one pass on memory."""

    first: int
    """The number of the first block that the pass allocates."""
    blocks: int
    """The number of blocks that the pass allocates."""
    changes: list[Change] | None
    """Changes in order; None if blocks of other passes change."""
    returned: tuple[Made | None, ...] | None
    """Tensors that the pass returns in its own memory, if any; None if it returns other objects."""
    given: tuple[int, ...]
    """Numbers of the blocks of the pass's inputs."""

    @property
    def blocks_kept(self) -> set[int]:
        """Number of blocks that are still allocated after the pass."""
        returned = {one.block for one in self.returned or () if one is not None}
        return {*range(self.blocks)} - returned

    def is_like(self, other: Pass) -> bool:
        """Return whether two passes have the same, repeatable effect."""
        own, others = (
            (self.blocks, self.changes, self.returned),
            (other.blocks, other.changes, other.returned),
        )
        return None not in own and own == others


@dataclass
class Passes:
    """The passes of a stage in one direction."""

    count: int = 0
    known: dict[int, Pass] = field(default_factory=dict)
    """Compared passes, by microbatch."""

    @property
    def pattern(self) -> Pass | None:
        """The pass that represents the others; None while unknown, or if passes differ."""
        one, other = (self.known.get(micro_batch) for micro_batch in COMPARED)
        return other if one is not None and other is not None and other.is_like(one) else None


@dataclass
class Stage:
    """The passes of a stage in one step."""

    forward: Passes = field(default_factory=Passes)
    backward: Passes = field(default_factory=Passes)
    first_blocks: dict[int, dict[int, int]] = field(default_factory=dict)
    """Numbers of the blocks of repeated forward passes by microbatch, until backward."""


class AlikePasses:
    """Passes of one rank's stages.

    Args:
        tracker: tracker of the memory.
    """

    def __init__(self, tracker: Tracker) -> None:
        self.tracker = tracker
        self.stages: dict[int, Stage] = {}
        self.micro_batches = 0

    @contextmanager
    def step(self, micro_batches: int) -> Iterator[None]:
        """Begin the first step with this number of microbatches, in which all passes are run."""
        self.stages, self.micro_batches = {}, micro_batches
        yield
        for stage in self.stages.values():
            if stage.first_blocks:
                raise UnlikePassesError("a forward pass has no backward pass")
            self._check(stage)

    def _check(self, stage: Stage) -> None:
        """Check that a repeated microbatch left no memory, except for the results of its passes."""
        forward, backward = stage.forward.pattern, stage.backward.pattern
        if forward is None or backward is None:
            return
        left: dict[tuple[bool, int], int] = {}
        for change in (*(forward.changes or ()), *(backward.changes or ())):
            key = change.forward, change.block
            left[key] = left.get(key, 0) + change.delta
        returned = {(True, made.block) for made in forward.returned or () if made}
        returned |= {(False, made.block) for made in backward.returned or () if made}
        if any(size for key, size in left.items() if key not in returned):
            raise UnlikePassesError("memory outlives its microbatch")

    def forward(self, of_stage: Any, given: Any, run: Any) -> Any:
        """The output of a forward pass, run by `run` with the arguments `given`."""
        stage = self.stages.setdefault(of_stage.stage_index, Stage())
        number = stage.forward.count
        stage.forward.count += 1
        if of_stage.is_last:
            return run()
        pattern = stage.forward.pattern
        if pattern is None or not COMPARED[-1] < number < self.micro_batches - 1:
            return self._run(stage, stage.forward, number, given, run)
        numbers: dict[int, int] = {}
        (output,) = self._repeat(pattern, given, numbers, {})
        stage.first_blocks[number] = numbers
        return output

    def backward(self, of_stage: Any, given: Any, run: Any) -> Any:
        """The gradients of a backward pass, run by `run` with the gradients `given`."""
        stage = self.stages.setdefault(of_stage.stage_index, Stage())
        number = stage.backward.count
        stage.backward.count += 1
        if number not in stage.first_blocks:
            return run() if of_stage.is_last else self._run(stage, stage.backward, number, given, run)
        pattern = stage.backward.pattern
        if pattern is None:
            raise UnlikePassesError("backward passes are unlike")
        return self._repeat(pattern, given, {}, stage.first_blocks.pop(number)), None

    def _run(self, stage: Stage, passes: Passes, number: int, given: Any, run: Any) -> Any:
        """Run a pass, and record its effect if it is compared."""
        if number not in COMPARED:
            return run()
        tracker = self.tracker
        first, start = len(tracker.blocks), len(tracker.numbers)
        result = run()
        blocks = len(tracker.blocks) - first
        changes = self._changes(first, start, passes is stage.forward, stage.forward.known.get(number))
        made = (result,) if passes is stage.forward else result[0]
        own = [change.block for change in changes or () if change.forward == (passes is stage.forward)]
        returned = self._returned(made, first, own)
        passes.known[number] = Pass(first, blocks, changes, returned, self._blocks_of(given))
        return result

    def _changes(self, first: int, start: int, is_forward: bool, forward: Pass | None) -> list[Change] | None:
        """The changes of a pass, if they only concern its own blocks or those of its `forward` pass.

        Args:
            first, start: the numbers of its first block and of its first change.
            is_forward: True for a forward pass.
        """
        tracker, changes = self.tracker, list[Change]()
        for block, delta, phase in zip(
            tracker.numbers[start:], tracker.deltas[start:], tracker.labels[start:], strict=True
        ):
            if block >= first:
                changes.append(Change(is_forward, block - first, delta, phase))
            elif forward is not None and block - forward.first in forward.blocks_kept:
                changes.append(Change(True, block - forward.first, delta, phase))
            else:
                return None
        return changes

    def _blocks_of(self, tensors: Any) -> tuple[int, ...]:
        """Numbers of the blocks of tensors; -1 for a tensor without a block."""
        numbers = []
        for tensor in tensors if isinstance(tensors, (tuple, list)) else (tensors,):
            key = tensor.untyped_storage()._cdata if isinstance(tensor, Tensor) else 0
            numbers.append(self.tracker.alive.get(key, (-1, None))[0])
        return tuple(numbers)

    def _returned(self, given: Any, first: int, changed: list[int]) -> tuple[Made | None, ...] | None:
        """Memory that a pass returns; None if the pass did not allocate it, or has freed it."""
        made: list[Made | None] = []
        for part in given if isinstance(given, (tuple, list)) else (given,):
            if part is None:
                made.append(None)
                continue
            if not isinstance(part, Tensor):
                return None
            storage, (number,) = part.untyped_storage(), self._blocks_of(part)
            if number < first or storage.nbytes() != part.numel() * part.element_size():
                return None
            if changed.count(number - first) != 1:
                return None
            made.append(
                Made(
                    number - first,
                    tuple(part.shape),
                    part.stride(),
                    part.dtype,
                    part.device,
                    part.requires_grad,
                )
            )
        return tuple(made)

    def _repeat(
        self, pattern: Pass, given: Any, own: dict[int, int], of_forward: dict[int, int]
    ) -> tuple[Tensor | None, ...]:
        """Repeat the changes of a pass; returns the results of the pass.

        Args:
            given: input tensors of the pass, which it may keep.
            own: filled with the numbers of the pass's new blocks.
            of_forward: for a backward pass, numbers of the blocks of its forward pass.
        """
        tracker = self.tracker
        assert pattern.changes is not None and pattern.returned is not None
        is_forward = not of_forward
        for kept, known in zip(self._blocks_of(given), pattern.given, strict=True):
            if kept >= 0 <= known:
                _name_alike(tracker.blocks[kept], tracker.blocks[known])
        made = {one.block: one for one in pattern.returned if one is not None}
        tensors: dict[int, Tensor] = {}
        for change in pattern.changes:
            numbers = own if change.forward == is_forward else of_forward
            number = numbers.get(change.block)
            if number is None:
                like = tracker.blocks[pattern.first + change.block]
                number = numbers[change.block] = len(tracker.blocks)
                if change.block in made and numbers is own:
                    with tracker.scope(phase=change.phase):
                        tensors[change.block] = self._tensor(made[change.block])
                    _name_alike(tracker.blocks[number], like)
                    continue
                # The block's category may become known later.
                tracker.blocks.append(like)
            tracker.numbers.append(number)
            tracker.deltas.append(change.delta)
            tracker.labels.append(change.phase)
        return tuple(None if one is None else tensors[one.block] for one in pattern.returned)

    def _tensor(self, made: Made) -> Tensor:
        tensor = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device=made.device)
        return tensor.requires_grad_(made.requires_grad)


def _name_alike(block: Block, like: Block) -> None:
    block.category, block.layer = like.category, like.layer


@contextmanager
def alike_passes(tracker: Tracker) -> Iterator[None]:
    """Within this context equal passes are repeated instead of run.

    Raises:
        UnlikePassesError: passes differ, so all of them must be run.
    """
    passes = AlikePasses(tracker)
    forward: Any = PipelineStage.forward_maybe_with_nosync
    backward: Any = PipelineStage.backward_maybe_with_nosync
    run_step = Pipeline._run

    def forwarding(self: Any, *args: Any, **kwargs: Any) -> Any:
        return passes.forward(self, args, lambda: forward(self, *args, **kwargs))

    def going_back(self: Any, kind: str, bwd_kwargs: Any, *args: Any, **kwargs: Any) -> Any:
        if kind != "full":
            raise UnlikePassesError("backward is split")
        given = bwd_kwargs["output_grads"]
        return passes.backward(self, given, lambda: backward(self, kind, bwd_kwargs, *args, **kwargs))

    def stepping(self: Pipeline, *args: Any) -> Tensor:
        with passes.step(self.micro_batches):
            return run_step(self, *args)

    with (
        # PyTorch prints the whole schedule when a pass fails.
        logs_from("torch.distributed.pipelining.schedules", logging.CRITICAL),
        patch.object(PipelineStage, "forward_maybe_with_nosync", forwarding),
        patch.object(PipelineStage, "backward_maybe_with_nosync", going_back),
        patch.object(Pipeline, "_run", stepping),
    ):
        yield
