"""Runs one unit of a model on fake tensors, and lists what it allocates and frees.

The unit is built as for a training step, but for FSDP2: parameters are there, in the format that computes.
Before it stands a node of autograd that makes its input, after it one that makes the gradient of its output,
as the units around it would. A second forward and backward show that the unit does the same with gradients
that are there already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.distributed.tensor import DTensor

from costmodels import Layout, ModelSpec
from costmodels.tapes.structure import LAYERS, Unit
from costmodels.tapes.tape import (
    BACKWARD,
    BACKWARD_END,
    EXPERTS,
    FETCHED,
    FETCHES,
    FETCHES_BEFORE,
    FORGETS,
    FORWARD,
    FORWARD_END,
    FURTHER,
    INPUT,
    LAYER,
    OUTPUT,
    OUTPUT_GRADIENT,
)
from runtime.dryrun import run
from runtime.dryrun.compiled_layers import compiled_layers
from runtime.dryrun.experts import even_load
from runtime.dryrun.fake_gpu import fake_gpu
from runtime.dryrun.kernels import gpu_kernels
from runtime.dryrun.roles import label_layers, roles
from runtime.dryrun.tracker import Tracker, inner_tensors
from runtime.model.experts import MixtureOfExperts
from runtime.model.multi_token import FurtherToken
from runtime.model.number_formats import DTYPES
from runtime.model.transformer import Transformer
from runtime.parallel import offload, recomputation
from runtime.parallel.local_tensors import local_part
from runtime.parallel.loss import TokenLoss
from runtime.parallel.mesh import build_grid
from runtime.settings.options import TrainingOptions
from runtime.train import stages
from runtime.train.balance import Balance

Change = tuple[str, int, int, str]
"""What happens: "allocation", "release", "gradient", "addend" or "mark"; the storage; its bytes,
or the number of the parameter; its category, or the name of the mark."""


BORDERS = {INPUT, OUTPUT, OUTPUT_GRADIENT}


class RecordedParameter(NamedTuple):
    """One parameter of a unit, as this rank has it."""

    name: str
    shape: tuple[int, ...]
    group: str
    partial: bool
    distributed: bool


@dataclass
class Recording:
    """What a unit has done with one set of sizes."""

    parameters: list[RecordedParameter] = field(default_factory=list)
    forward: list[Change] = field(default_factory=list)
    backward: list[Change] = field(default_factory=list)
    input_gradient: int | None = None
    input_category: str = ""
    weights: list[Change] = field(default_factory=list)
    """Of a backward that is split: gradients of weights, `backward` being that of inputs."""
    forgotten: list[Change] = field(default_factory=list)
    rest: list[Change] = field(default_factory=list)

    @property
    def changes(self) -> list[Change]:
        """Of all passes."""
        return [*self.forward, *self.backward, *self.weights, *self.forgotten, *self.rest]


class UnlikeError(RuntimeError):
    """A unit does not do the same each time, so that no tape tells what it does."""


class UnitRecordings(NamedTuple):
    """A unit with whole backward passes, and with split ones."""

    whole: Recording
    split_first: Recording | None
    """Where weights have no gradients yet; None where backward is not split."""
    split: Recording | None


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
        sends_activations: the layer offloads what attention keeps, which one layer alone does not.

    Raises:
        UnlikeError: the unit does not do the same each time.
    """
    with ExitStack() as stack:
        tracker = Tracker(on_gpu=True)
        if sends_activations:
            stack.enter_context(patch.object(offload, "_fetch_before", partial(offload._offload, first=True)))
        module, run_unit, source = _built(stack, tracker, model, layout, unit, compiled)
        # What a collector ends, it ends at any time.
        stack.enter_context(run.collector_pause())
        recorder = _Recorder(tracker, module, run_unit, source)
        stack.enter_context(recorder.watched_offloading())
        recorder.turn()
        whole = recorder.twice()
        first, later = recorder.twice(splits=True) if splits else (None, None)
        return UnitRecordings(whole[0], first, later)


def changes_alike(recording: Recording, first: Recording | None = None) -> list[Change]:
    """The changes of a recording but for gradients; those of a later one without the ends of what autograd
    has added to the gradients of the `first`."""
    gradients = {number for kind, number, *_ in (first or recording).changes if kind == "gradient"}
    return [
        (kind, number, size, "" if number in gradients else text)
        for kind, number, size, text in recording.changes
        if kind != "gradient" and not (kind == "release" and number in gradients)
    ]


def _built(
    stack: ExitStack, tracker: Tracker, model: ModelSpec, layout: Layout, unit: Unit, compiled: bool
) -> tuple[nn.Module, Callable[[Tensor], Tensor], Callable[[], Tensor]]:
    """The parameters of a unit, what runs it, and what makes its input; `stack` ends all of it."""
    device = torch.device("cuda")
    stack.enter_context(run.frozen_objects())
    stack.enter_context(run.fake_process_group(layout.world_size, 0))
    stack.enter_context(fake_gpu())
    grid = build_grid(model, layout, device)
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    stack.enter_context(run.meta_builds(fake))
    stack.enter_context(fake)
    stack.enter_context(run.isolated_pipeline())
    stack.enter_context(even_load(model))
    stack.enter_context(gpu_kernels(fake))
    stack.enter_context(roles(tracker))
    if compiled:
        stack.enter_context(compiled_layers(tracker))
    stack.enter_context(tracker)
    with (
        patch.object(stages, "needs_data_parallel", lambda *_: False),
        patch.object(stages, "wraps_stages", lambda *_: False),
    ):
        stage = stages.build_stage(model, layout, grid, 0, compiled)
    dtype = DTYPES[layout.precision]
    with unset_fake_temporarily():
        _convert(stage, dtype)
    stage.to_empty(device=device)
    stage.tie()
    for router in stage.routers.values():
        router.to_device(device)
    # Only what belongs to layers: the tracker's executor is not needed for one stage.
    loss = TokenLoss(model, layout, grid, compiled)
    executor: Any = _OneStage([stage], loss)
    if stage.routers:
        Balance(executor, model, grid, TrainingOptions())
    label_layers(tracker, executor, compiled, stages.compiles_in_two(layout))
    rows, positions = layout.micro_batch_size, model.seq // layout.context_parallel
    ids = torch.empty(rows, positions, dtype=torch.int64, device=device)
    residual = rows, positions // (layout.tensor_parallel if layout.sequence_parallel else 1), model.hidden
    if unit == "embedding":
        assert stage.embedding is not None
        return stage.embedding, stage.embedding, lambda: ids
    if unit in LAYERS:
        (block,) = stage.blocks
        return block, block, partial(torch.empty, residual, dtype=dtype, device=device)
    module, run_head = _head(stage, loss, ids)
    return module, run_head, partial(torch.empty, residual, dtype=dtype, device=device)


def _head(stage: Transformer, loss: TokenLoss, ids: Tensor) -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
    """Norm, head and loss, and modules after them that predict further tokens, with their embedding."""
    loss.score(stage)
    loss.labels = torch.stack([ids] * (1 + len(stage.mtp)), dim=1) if stage.mtp else ids
    further = (stage.embedding, stage.mtp) if stage.mtp else ()
    parts = (stage.norm, stage.head, *further)
    return nn.ModuleList([part for part in parts if part is not None]), stage.end


class _OneStage(NamedTuple):
    stages: list[Transformer]
    loss: TokenLoss


def _convert(stage: Transformer, dtype: torch.dtype) -> None:
    """Let parameters have the format that computes, as FSDP2 gathers them."""
    for module in stage.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(parameter.detach().to(dtype)))
    stage.tie()


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


class _Around(torch.autograd.Function):
    """What FSDP2 puts around the inputs of what it wraps: its backward comes when theirs is done."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        return inputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        ctx.then()
        return None, *grads


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
        self.notes: list[tuple[int, str, int, Any]] = []
        """What happens besides allocations: changes in the log before it, what, which storage, and more."""
        self.places: dict[str, int] = {}
        self.borders: dict[int, int] = {}
        self.result: int | None = None
        self.groups: dict[int, str] = {}
        """Of parameters that FSDP2 wraps apart from the others of the unit."""
        for number, (_, parameter) in enumerate(self.named):
            parameter.register_post_accumulate_grad_hook(partial(self._gradient_comes, number))  # type: ignore[no-untyped-call]
        further: list[FurtherToken] = []
        for part in module.modules():
            if isinstance(part, FurtherToken):
                further.append(part)
            elif isinstance(part, MixtureOfExperts) and not further:
                self._watch(part.experts, EXPERTS)
        for depth, part in enumerate(further, start=1):
            group = f"{FURTHER}{depth}"
            self._watch(part, group)
            self._watch(part.block, f"{group}_{LAYER}")
            mlp = part.block.mlp
            if isinstance(mlp, MixtureOfExperts):
                self._watch(mlp.experts, f"{group}_{EXPERTS}")

    def _watch(self, module: nn.Module, group: str) -> None:
        """Note where FSDP2 acts around a module that it wraps."""
        self.groups |= {id(parameter): group for parameter in module.parameters()}

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> Any:
            self._note(group + FORWARD)
            tensors = [x for x in inputs if isinstance(x, Tensor) and x.requires_grad]
            if not tensors:
                return inputs
            wrapped = iter(_Around.apply(partial(self._note, group + BACKWARD_END), *tensors))  # type: ignore[no-untyped-call]
            return tuple(next(wrapped) if any(x is t for t in tensors) else x for x in inputs)

        def after(_: nn.Module, __: Any, result: Tensor) -> None:
            self._note(group + FORWARD_END)
            if result.requires_grad:
                result.register_hook(lambda gradient: self._note(group + BACKWARD))  # type: ignore[no-untyped-call]

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    @contextmanager
    def watched_offloading(self) -> Iterator[None]:
        """Note when a layer starts its copies from host memory, and those of the layer before it."""
        fetch = offload._Layer.fetch

        def fetching(layer: Any) -> None:
            begins = not layer.fetched
            if begins:
                self._note(FETCHES)
            fetch(layer)
            if begins:
                self._note(FETCHED)

        def starting(_: Any) -> None:
            if all(name != FETCHES_BEFORE for *_, name in self.notes):
                self._note(FETCHES_BEFORE)

        with patch.object(offload._Layer, "fetch", fetching), patch.object(offload, "_start", starting):
            yield

    def _watch_addends(self, y: Tensor) -> None:
        """Note the gradients that autograd adds up to that of a parameter, which is used several times."""
        numbers = {id(parameter): number for number, (_, parameter) in enumerate(self.named)}
        uses: dict[int, list[tuple[Any, int]]] = {}
        nodes, seen = [y.grad_fn], {y.grad_fn}
        while nodes:
            node: Any = nodes.pop()
            for place, (after, _) in enumerate(() if node is None else node.next_functions):
                number = numbers.get(id(getattr(after, "variable", None)))
                if number is not None:
                    uses.setdefault(number, []).append((node, place))
                elif after not in seen:
                    seen.add(after)
                    nodes.append(after)
        for number, users in uses.items():
            for node, place in users if len(users) > 1 else ():
                node.register_hook(partial(self._addend_comes, number, place))

    def _addend_comes(self, number: int, place: int, gradients: Sequence[Any], _: Any) -> None:
        self.notes.append((len(self.tracker.numbers), "addend", self._block(gradients[place]), number))

    def _note(self, name: str) -> None:
        self.notes.append((len(self.tracker.numbers), "mark", -1, name))

    def _gradient_comes(self, number: int, parameter: Tensor) -> None:
        self.tracker.tag(parameter.grad, "gradients")
        assert parameter.grad is not None
        self.notes.append((len(self.tracker.numbers), "gradient", self._block(parameter.grad), number))

    def _block(self, tensor: Tensor) -> int:
        (inner,) = inner_tensors(tensor)
        return self.tracker.alive[inner.untyped_storage()._cdata][0]

    def _reach(self, name: str) -> None:
        self.places[name] = len(self.tracker.numbers)

    def backward_begins(self, gradient: Tensor) -> None:
        self.borders[self._block(gradient)] = OUTPUT_GRADIENT
        self._reach("backward")

    def backward_ends(self, gradient: Tensor) -> None:
        self.result = self._block(gradient)
        self._reach("end")

    def forget_gradients(self) -> None:
        for _, parameter in self.named:
            parameter.grad = None

    def twice(self, splits: bool = False) -> tuple[Recording, Recording]:
        """A micro batch without gradients before it, and one that adds to its gradients.

        Raises:
            UnlikeError: they do different things.
        """
        self.forget_gradients()
        first, later = self.turn(splits), self.turn(splits)
        self.forget_gradients()
        if changes_alike(first) != changes_alike(later, first):
            raise UnlikeError("the second micro batch does other things than the first")
        return first, later

    def turn(self, splits: bool = False) -> Recording:
        """One forward and backward pass."""
        tracker = self.tracker
        self.notes.clear()
        self.places.clear()
        self.borders, self.result = {}, None
        x, anchor = self._input()
        self.borders[self._block(x)] = INPUT
        self._reach("forward")
        with tracker.scope(phase="forward"):
            y = self.run_unit(x)
        self.borders.setdefault(self._block(y), OUTPUT)
        self._watch_addends(y)
        self._reach("returned")
        end = _Output.apply(y, self)  # type: ignore[no-untyped-call]
        # What nobody else holds ends here: input, then output.
        self._reach("drops")
        del x
        del y
        self._reach("dropped")
        if splits:
            assert anchor is not None
            self._split(end, anchor)
        else:
            end.backward()
        if anchor is None:
            self._reach("end")
        del end
        self._reach("over")
        return self._recording()

    def _split(self, end: Tensor, anchor: Tensor) -> None:
        """Backward as PyTorch's stages split it; units above hold the graph of this one to the end."""
        above = end.grad_fn if self.named else None
        had = [parameter.grad is not None for _, parameter in self.named]
        parameters = [parameter for _, parameter in self.named]
        gradient = torch.empty((), device=end.device)
        _, groups = stage_backward_input([end], [gradient], [anchor], iter(parameters))
        del gradient
        self._reach("inputs")
        with patch.object(recomputation, "_forget_last", self._forgetting(recomputation._forget_last)):
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
            self._note(FORGETS)
            forget(call)

        return forgetting

    def _input(self) -> tuple[Tensor, Tensor | None]:
        plain = self.source()
        if not plain.is_floating_point():
            return plain, None
        del plain
        anchor = torch.empty(0, requires_grad=True)
        x: Tensor = _Input.apply(anchor, self)  # type: ignore[no-untyped-call]
        return x, anchor

    def _recording(self) -> Recording:
        names = _Names(self.borders)
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
            _settled([change for change in changes if change[0] != "release" or change[1] in own])
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

    def _changes(self, names: _Names, spans: list[tuple[str, str]]) -> list[Change]:
        """The log between places, with notes where they belong."""
        tracker, found = self.tracker, list[Change]()
        for start, end in ((self.places[one], self.places[other]) for one, other in spans):
            notes = iter(sorted((note for note in self.notes if start <= note[0] <= end), key=itemgetter(0)))
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

    def _check(self, names: _Names, changes: list[Change]) -> None:
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
        return RecordedParameter(name, tuple(local.shape), group, partial_sum, isinstance(parameter, DTensor))


def _settled(changes: list[Change]) -> list[Change]:
    """The same with ends that come one after the other in the order of their storages: a compiler's sets have
    none."""
    found = list[Change]()
    for is_end, some in groupby(changes, lambda change: change[0] == "release"):
        alike = list(some)
        found += sorted(alike) if is_end else alike
    return found


def owner(category: str) -> str:
    """Who owns a byte, in the words of moments."""
    return "communication" if category == "message" else category


def _clear_last_call() -> None:
    """Drop what was computed again and not used, as the next call that computes again does."""
    for call in (reference() for reference in recomputation._last):
        if call is not None:
            call.internals.clear()


class _Names:
    """Numbers of storages in the order of their appearance, the borders first."""

    def __init__(self, borders: dict[int, int]) -> None:
        self.known = dict(borders)
        self.next = OUTPUT_GRADIENT + 1

    def of(self, block: int) -> int:
        if block not in self.known:
            self.known[block] = self.next
            self.next += 1
        return self.known[block]
