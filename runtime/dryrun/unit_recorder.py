"""Runs one unit of a model on fake tensors, and lists what it allocates and frees.

Before the unit stands a node of autograd that makes its input, after it one that makes the gradient of its
output, as the units around it would. A second forward and backward show that the unit does the same with
gradients that are there already.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor, Shard

from costmodels import Layout, ModelSpec
from costmodels.tapes.structure import Unit
from costmodels.tapes.tape import (
    AGAIN,
    ENDS,
    FORGETS,
    INPUT,
    LAYER,
    OUTPUT,
    OUTPUT_GRADIENT,
)
from runtime.dryrun import run
from runtime.dryrun.notes import Notes, watch_addends, watched_groups, watched_offloading
from runtime.dryrun.recording import (
    BORDERS,
    Change,
    Names,
    RecordedParameter,
    Recording,
    UnitRecordings,
    UnlikeError,
    changes_alike,
    owner,
    settled,
)
from runtime.dryrun.tracker import Tracker
from runtime.dryrun.unit_build import built_unit
from runtime.parallel import offload, recomputation
from runtime.parallel.local_tensors import local_part


def record_unit(
    model: ModelSpec,
    layout: Layout,
    unit: Unit,
    compiled: bool,
    splits: bool = False,
    sends_activations: bool = False,
) -> UnitRecordings:
    """What `unit` of a model allocates and frees on the first rank of a layout.

    Args:
        model: of one layer.
        layout: without pipeline and data parallelism.
        compiled: layers are compiled.
        splits: record split backward passes too.
        sends_activations: also the last layer offloads what attention keeps.

    Raises:
        UnlikeError: the unit does not do the same each time.
    """
    with ExitStack() as stack:
        tracker = Tracker(on_gpu=True)
        if sends_activations:
            # What is too small to be worth a copy is nothing here, and in samples of some sizes only.
            stack.enter_context(patch.object(offload, "SMALLEST", 0))
            sends = partial(offload._offload, first=False)
            stack.enter_context(patch.object(offload, "_fetch_before", sends))
        module, run_unit, source = built_unit(stack, tracker, model, layout, unit, compiled)
        # What a collector ends, it ends at any time.
        stack.enter_context(run.collector_pause())
        recorder = _Recorder(tracker, module, run_unit, source)
        stack.callback(recorder.unhook)
        stack.enter_context(watched_offloading(recorder.notes))
        whole = recorder.warm(compiled)
        if not splits:
            return UnitRecordings(whole[0], None, None)
        first, later = recorder.twice(splits=True)
        end_first, end = (
            _with_end(*each) for each in zip((first, later), recorder.twice(True, True), strict=True)
        )
        if end.backward == later.backward:
            return UnitRecordings(whole[0], first, later)
        return UnitRecordings(whole[0], first, later, end_first, end)


class _Input(torch.autograd.Function):
    """Stands for the unit before: makes its result, and takes the gradient."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, recorder: _Recorder) -> Tensor:
        ctx.recorder = recorder
        return recorder.source()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.recorder.backward_ends(grad)
        # Stages of PyTorch before 2.13 want one of every input.
        return torch.empty(0), None


class _Output(torch.autograd.Function):
    """Stands for the unit after: reads the result, and makes the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, recorder: _Recorder) -> Tensor:
        ctx.recorder, ctx.shape, ctx.dtype = recorder, x.shape, x.dtype
        return torch.empty((), device=x.device)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        gradient = torch.empty(ctx.shape, dtype=ctx.dtype, device=grad.device)
        ctx.recorder.backward_begins(gradient)
        return gradient, None


class _Recorder:
    """Turns the log of a tracker into the changes of a unit."""

    def __init__(
        self,
        tracker: Tracker,
        module: nn.Module,
        run_unit: Callable[[Tensor], Tensor],
        source: Callable[[], Tensor],
    ) -> None:
        self.tracker, self.run_unit, self.source = tracker, run_unit, source
        self.named = list(module.named_parameters())
        self.notes = Notes(tracker)
        self.places: dict[str, int] = {}
        self.borders: dict[int, int] = {}
        self.result: int | None = None
        self.groups = watched_groups(module, self.notes)
        """Of parameters that FSDP2 wraps apart from the others of the unit."""
        self.hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._gradient_comes, number))  # type: ignore[no-untyped-call]
            for number, (_, parameter) in enumerate(self.named)
        ]

    def unhook(self) -> None:
        """Leave the parameters: no collector sees what their hooks hold, the recorder and so themselves."""
        for hook in self.hooks:
            hook.remove()

    def _gradient_comes(self, number: int, parameter: Tensor) -> None:
        self.tracker.tag(parameter.grad, "gradients")
        assert parameter.grad is not None
        self.notes.gradient(number, parameter.grad)

    def _reach(self, name: str) -> None:
        self.places[name] = len(self.tracker.numbers)

    def backward_begins(self, gradient: Tensor) -> None:
        self.borders[self.notes.block(gradient)] = OUTPUT_GRADIENT
        self._reach("backward")

    def backward_ends(self, gradient: Tensor) -> None:
        self.result = self.notes.block(gradient)
        self._reach("end")

    def forget_gradients(self) -> None:
        for _, parameter in self.named:
            parameter.grad = None

    def warm(self, compiled: bool) -> tuple[Recording, Recording]:
        """The first two micro batches that do the same: what is compiled or kept for all of them may come
        with a first one.

        Raises:
            UnlikeError: they do different things.
        """
        if compiled:
            self.turn()
            return self.twice()
        try:
            return self.twice()
        except UnlikeError:
            return self.twice()

    def twice(self, splits: bool = False, is_end: bool = False) -> tuple[Recording, Recording]:
        """A micro batch without gradients before it, and one that adds to its gradients.

        Raises:
            UnlikeError: they do different things.
        """
        self.forget_gradients()
        first, later = self.turn(splits, is_end), self.turn(splits, is_end)
        self.forget_gradients()
        if changes_alike(first) != changes_alike(later, first):
            raise UnlikeError("the second micro batch does other things than the first")
        return first, later

    def turn(self, splits: bool = False, is_end: bool = False) -> Recording:
        """One forward and backward pass.

        Args:
            is_end: the unit is the last of its stage.
        """
        tracker = self.tracker
        self.notes.found.clear()
        self.places.clear()
        self.borders, self.result = {}, None
        x, anchor = self._input()
        self.borders[self.notes.block(x)] = INPUT
        self._reach("forward")
        with tracker.scope(phase="forward"):
            y = self.run_unit(x)
        self.borders.setdefault(self.notes.block(y), OUTPUT)
        watch_addends(y, self.named, self.notes)
        self._reach("returned")
        end = _Output.apply(y, self)  # type: ignore[no-untyped-call]
        # What nobody else holds ends here: input, then output.
        self._reach("drops")
        del x
        del y
        self._reach("dropped")
        if splits:
            assert anchor is not None
            self._split(end, anchor, is_end)
        else:
            end.backward()
        if anchor is None:
            self._reach("end")
        del end
        self._reach("over")
        return self._recording()

    def _split(self, end: Tensor, anchor: Tensor, is_end: bool) -> None:
        """Backward as PyTorch's stages split it; units above hold the graph of this one to the end."""
        # A node that is none of Python's: those do not hold what is under them.
        above = end.view_as(end).grad_fn if self.named and not is_end else None
        had = [parameter.grad is not None for _, parameter in self.named]
        parameters = [parameter for _, parameter in self.named]
        gradient = torch.empty((), device=end.device)
        _, groups = stage_backward_input([end], [gradient], [anchor], iter(parameters))
        del gradient
        self._reach("inputs")
        call = recomputation._Call
        with (
            patch.object(recomputation, "_forget_last", self._forgetting(recomputation._forget_last)),
            patch.object(call, "_run_again", self._running_again(call._run_again)),
            patch.object(self.notes, "sees", True),
        ):
            stage_backward_weight(iter(parameters), groups)
        for number, parameter in enumerate(parameters):
            self.tracker.tag(parameter.grad, "gradients")
            if not had[number]:
                self._gradient_comes(number, parameter)
        self._reach("weights")
        _clear_last_call()
        self._reach("forgotten")
        groups.clear()
        del above

    def _forgetting(self, forget: Callable[[Any], None]) -> Callable[[Any], None]:
        def forgetting(call: Any) -> None:
            self.notes.mark(FORGETS)
            forget(call)

        return forgetting

    def _running_again(self, run_again: Callable[..., None]) -> Callable[..., None]:
        def running(call: Any, with_internals: bool) -> None:
            run_again(call, with_internals)
            if not call.served:
                self.notes.mark(AGAIN)

        return running

    def _input(self) -> tuple[Tensor, Tensor | None]:
        plain = self.source()
        if not plain.is_floating_point():
            return plain, None
        del plain
        anchor = torch.empty(0, requires_grad=True)
        x: Tensor = _Input.apply(anchor, self)  # type: ignore[no-untyped-call]
        return x, anchor

    def _recording(self) -> Recording:
        names = Names(self.borders)
        forward = self._changes(names, [("forward", "returned"), ("drops", "dropped")])
        splits = "weights" in self.places
        backward = self._changes(names, [("backward", "inputs" if splits else "end")])
        spans = [("inputs", "weights"), ("weights", "forgotten"), ("forgotten", "over")] if splits else []
        others = [self._changes(names, [span]) for span in spans] or [[], [], []]
        # What stands around the unit ends within it too; the unit before would have the gradient.
        given = None if self.result is None else names.of(self.result)
        backward = [change for change in backward if not splits or change[:2] != ("release", given)]
        every = [forward, backward, *others]
        own = {number for changes in every for kind, number, *_ in changes if kind == "allocation"} | BORDERS
        forward, backward, *others = (
            settled([change for change in changes if change[0] != "release" or change[1] in own])
            for changes in every
        )
        self._check(names, [change for changes in (forward, backward, *others) for change in changes])
        (source,) = (block for block, number in self.borders.items() if number == INPUT)
        category = self.tracker.blocks[source].category
        return Recording(
            parameters=[self._described(*one) for one in self.named],
            forward=forward,
            backward=backward,
            input_gradient=None if self.result is None else names.of(self.result),
            input_category="" if category == "temporaries" else category,
            weights=others[0],
            forgotten=others[1],
            rest=others[2],
        )

    def _changes(self, names: Names, spans: list[tuple[str, str]]) -> list[Change]:
        """The log between places, with notes where they belong."""
        tracker, found = self.tracker, list[Change]()
        for start, end in ((self.places[one], self.places[other]) for one, other in spans):
            notes = iter(
                sorted((note for note in self.notes.found if start <= note[0] <= end), key=itemgetter(0))
            )
            note = next(notes, None)
            for place in range(start, end + 1):
                while note is not None and note[0] == place:
                    _, kind, block, what = note
                    if kind == "gradient":
                        # One that an earlier micro batch has made is nobody's here.
                        found.append((kind, names.known.get(block, -1), what, ""))
                    elif kind == "addend":
                        found.append((kind, names.of(block), what, ""))
                    else:
                        found.append((kind, -1, 0, what))
                    note = next(notes, None)
                if place == end:
                    break
                block, delta = tracker.numbers[place], tracker.deltas[place]
                if delta > 0:
                    found.append(
                        ("allocation", names.of(block), delta, owner(tracker.blocks[block].category))
                    )
                else:
                    found.append(("release", names.of(block), 0, ""))
        return found

    def _check(self, names: Names, changes: list[Change]) -> None:
        """Everything of the unit must be gone after backward, but gradients."""
        made = {number for kind, number, *_ in changes if kind == "allocation"}
        ends = {number for kind, number, *_ in changes if kind in ("release", "gradient")}
        result = None if self.result is None else names.of(self.result)
        left = sorted(made - ends - {result})
        if left:
            raise UnlikeError(f"storages {left} of a unit outlive its backward")

    def _described(self, name: str, parameter: Tensor) -> RecordedParameter:
        partial_sum = False
        if isinstance(parameter, DTensor):
            gradient = parameter.grad
            partial_sum = isinstance(gradient, DTensor) and any(p.is_partial() for p in gradient.placements)
        local = local_part(parameter.detach())
        group = self.groups.get(id(parameter), LAYER)
        split = _split_sides(parameter) if isinstance(parameter, DTensor) else None
        return RecordedParameter(name, tuple(local.shape), group, partial_sum, split is not None, split or ())


def _with_end(inner: Recording, end: Recording) -> Recording:
    """A split backward of the last unit of a stage, which tells from that of another one what ends with the
    output of the stage."""
    more = [change for change in end.backward if change not in inner.backward]
    if [change for change in end.backward if change not in more] != inner.backward:
        raise UnlikeError("the last unit of a stage does other things than those before it")
    ends: list[Change] = [("mark", -1, 0, ENDS), *more] if more else []
    return replace(end, backward=[*inner.backward, *ends])


def _split_sides(parameter: DTensor) -> tuple[int, ...]:
    """The sides along which tensor-parallel ranks have parts of a parameter, or those of routed experts."""
    meshes = parameter.device_mesh.mesh_dim_names or ()
    return tuple(
        one.dim
        for one, mesh in zip(parameter.placements, meshes, strict=True)
        if isinstance(one, Shard) and mesh != "ep"
    )


def _clear_last_call() -> None:
    """Drop what was computed again and not used, as the next call that computes again does."""
    for call in (reference() for reference in recomputation._last):
        if call is not None:
            call.internals.clear()
