"""A stage of the pipeline: a chain of units, the groups of their parameters, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from costmodels.spec.layout import SPLIT_BACKWARD, Layout
from costmodels.spec.model import ModelSpec
from costmodels.tapes.dimensions import dimensions
from costmodels.tapes.player.chain import Chain, Unit
from costmodels.tapes.player.heap import GRADIENTS, OPTIMIZER, Effects, Heap, Storage
from costmodels.tapes.player.optimizer import Updated, state_of
from costmodels.tapes.player.sharding import (
    Bundle,
    Group,
    State,
    Traffic,
    policy_of,
    wraps_parameters,
)
from costmodels.tapes.player.units import (
    Parameter,
    Played,
    Sizes,
    Step,
    parameters_of,
)
from costmodels.tapes.structure import LAYERS
from costmodels.tapes.tape import (
    EXPERTS,
    EXPERTS_BACKWARD,
    EXPERTS_BACKWARD_END,
    EXPERTS_FORWARD,
    EXPERTS_FORWARD_END,
    FORGETS,
    Tape,
)

Part = tuple[Parameter, tuple[int, ...], Storage]
"""A parameter, its sides where nobody splits it, and its gradient as autograd makes it."""


class Setting:
    """What the ranks of one layout share while they are played."""

    def __init__(self, model: ModelSpec, layout: Layout) -> None:
        self.model, self.layout, self.heap = model, layout, Heap()
        self.wraps = wraps_parameters(layout, model.experts > 0)
        self.policies = {experts: policy_of(layout, experts) for experts in (False, True)}
        alone = {"tensor_parallel": 1, "sequence_parallel": False, "expert_tensor_parallel": 1}
        self.sizes = Sizes(dimensions(model, layout))
        self.whole = Sizes(dimensions(model, layout.model_copy(update=alone)))
        """Sizes of a layout that splits no matrices."""
        self.bundles: dict[tuple[int, bool], Bundle] = {}
        """Of layers, by the identity of their tapes: those of routed experts, and of all else."""
        self.stages: dict[Hashable, Stage] = {}

    def bundle(self, tape: Tape, one: Played, experts: bool) -> Bundle:
        """The parameters of a layer."""
        key = id(tape), experts
        if key not in self.bundles:
            parts = [part for part in self.parts(tape, one) if part[0].is_expert == experts]
            self.bundles[key] = self.bundle_of(parts, experts, is_layer=True)
        return self.bundles[key]

    def parts(self, tape: Tape, one: Played) -> list[Part]:
        """The parameters of a unit."""
        own, whole = (parameters_of(tape, sizes) for sizes in (self.sizes, self.whole))
        return list(zip(own, (other.sides for other in whole), one.gradients, strict=True))

    def bundle_of(self, parts: Sequence[Part], experts: bool, is_layer: bool) -> Bundle:
        """Parameters that are wrapped together."""
        policy = self.policies[experts]
        bundle = Bundle([own for own, _, _ in parts], [made for _, _, made in parts], policy)
        seen = [
            Updated(one.parameter.name, one.sides, whole, is_layer)
            for one, (_, whole, _) in zip(bundle.parts, parts, strict=True)
        ]
        bundle.updated = seen
        bundle.optimizer = Storage(OPTIMIZER, sum(one.size for one in state_of(self.layout, seen)))
        return bundle

    def stage(self, units: Sequence[Unit], chunk: int, kept_as: str) -> Stage:
        """A stage of these units; `chunk` tells those of one rank apart, `kept_as` is what `Chain` takes."""
        key = (chunk, kept_as, *((id(unit.tape), unit.plain is None) for unit in units))
        if key not in self.stages:
            self.stages[key] = Stage(self, units, kept_as)
        return self.stages[key]


@dataclass
class Place:
    """One unit of a stage."""

    kind: str
    played: Played
    again: Played | None = None
    """Of a layer that is computed again together with the one after it: what it does then, and backward."""
    group: Group | None = None
    """Of a layer; embedding and head belong to the root."""
    experts: Group | None = None


class Stage:
    """The units of one stage and what FSDP2 does around them."""

    def __init__(self, setting: Setting, units: Sequence[Unit], kept_as: str) -> None:
        self.heap, self.setting = setting.heap, setting
        self.traffic = Traffic()
        kinds = [unit.kind for unit in units]
        self.is_first, self.is_last = kinds[0] == "embedding", kinds[-1] == "loss"
        self.is_tied = setting.model.tied and self.is_first and self.is_last
        is_piped = setting.layout.pipeline_parallel > 1
        splits = setting.layout.schedule in SPLIT_BACKWARD
        chain = Chain(units, setting.sizes, self.is_tied, is_piped, splits, kept_as)
        self.input, self.output = chain.input, chain.output
        self.input_gradient, self.output_gradient = chain.input_gradient, chain.output_gradient
        """Messages: None where the stage has none."""
        self.outputs = chain.outputs
        self.result = chain.outputs[-1]
        """Of the last unit: the loss, in the last stage."""
        self.places = [
            Place(kind, one, again) for kind, one, again in zip(kinds, chain.played, chain.again, strict=True)
        ]
        self.makes_gradients = True
        """Backward makes gradients of weights."""
        self.effects: Effects = {}
        self.ends: dict[Hashable, list[State]] = {}
        """States of groups after passes."""
        tapes = [unit.tape for unit in units]
        self.root = self._root(tapes)
        self.groups = [self.root]
        for place, tape in zip(self.places, tapes, strict=True):
            if place.kind not in LAYERS:
                continue
            place.group = self._layer(tape, place.played, experts=False)
            self.groups.append(place.group)
            if any(one.group == EXPERTS for one in tape.parameters):
                place.experts = self._layer(tape, place.played, experts=True)
                self.groups.append(place.experts)
        before: Group | None = None
        for place in self.places:
            for group in (place.experts, place.group):
                if group is not None:
                    group.before, before = before, group
        self.root.before = before

    def _root(self, tapes: Sequence[Tape]) -> Group:
        """All parameters that no layer has."""
        parts: list[Part] = []
        for place, tape in zip(self.places, tapes, strict=True):
            if place.kind in LAYERS:
                continue
            own = self.setting.parts(tape, place.played)
            if self.is_tied and place.kind == "embedding":
                # The sum of its gradient and that of the output matrix, which is the same parameter.
                parameter, whole, made = own[0]
                own[0] = parameter, whole, made._replace(category=GRADIENTS)
            if self.is_tied and place.kind == "head":
                own.pop()
            parts += own
        bundle = self.setting.bundle_of(parts, experts=False, is_layer=False)
        return Group(self.heap, self.traffic, bundle, True, self.setting.wraps)

    def _layer(self, tape: Tape, one: Played, experts: bool) -> Group:
        bundle = self.setting.bundle(tape, one, experts)
        return Group(self.heap, self.traffic, bundle, False, self.setting.wraps)

    # What a schedule does with parameters.

    def unshard(self) -> None:
        """Begin to gather all parameters."""
        for group in self.groups:
            group.unshard()

    def wait(self) -> None:
        """Copy them to where they are used."""
        for group in self.groups:
            group.wait(in_forward=False)

    def reshard(self) -> None:
        """Free what was gathered."""
        for group in self.groups:
            group.reshard()

    # Passes.

    def _once(self, name: Hashable, play: Callable[[], None]) -> None:
        """Play a pass, or do again what it has done when it found parameters and gradients alike."""
        key = name, tuple(group.state for group in self.groups)
        self.heap.repeat(self.effects, key, play)
        if key in self.ends:
            for group, state in zip(self.groups, self.ends[key], strict=True):
                group.state = state
        else:
            self.ends[key] = [group.state for group in self.groups]

    def forward(self) -> None:
        """Forward of the module: all units but the loss."""
        self._once("forward", self._forward)

    def _forward(self) -> None:
        heap, label = self.heap, self.heap.label
        heap.enter("forward")
        self.root.pre_forward()
        unkept: Storage | None = None
        for place, output in zip(self.places, self.outputs, strict=True):
            if place.kind == "loss":
                continue
            self._enter_layer(place)
            self._play(place, place.played.forward)
            if place.group is not None:
                place.group.post_forward()
            if unkept is not None:
                heap.free(unkept)
            unkept = None if place.again is None else output
        self._end_of_root()
        heap.enter(label)

    def _enter_layer(self, place: Place) -> None:
        """What comes before forward of a layer."""
        if place.group is not None:
            place.group.pre_forward()
            if place.experts is not None:
                place.experts.unshard()

    def _end_of_root(self) -> None:
        """The end of forward of the module that began it."""
        if self.traffic.gathered_last is not None:
            self.heap.free(self.traffic.gathered_last)
            self.traffic.gathered_last = None

    def loss(self) -> None:
        """Forward of the loss."""
        heap, label = self.heap, self.heap.label
        heap.enter("forward")
        self._play(self.places[-1], self.places[-1].played.forward)
        heap.enter(label)

    def backward(self, is_last: bool) -> None:
        """Backward of all units, and the end of it that the root calls.

        Args:
            is_last: gradients are reduced and parameters freed.
        """
        self._once(("backward", is_last), lambda: self._backward(is_last))

    def _backward(self, is_last: bool) -> None:
        heap, label = self.heap, self.heap.label
        heap.enter("backward")
        self.is_last_backward = is_last
        for each in self.groups:
            each.is_done = False
        adds = self.root.has_fresh
        places = list(reversed(self.places))
        if places[0].kind == "loss":
            self._play(places[0], places[0].played.backward)
            places.pop(0)
        self.root.pre_backward()
        for place in places:
            layer = place.group
            if layer is None:
                self._play(place, place.played.adding if adds else place.played.backward)
                self._tie(place, adds)
                continue
            layer.pre_backward()
            if place.again is None:
                self._compute_again(place)
            own = place.again or place.played
            self._play(place, own.adding if layer.has_fresh else own.backward)
            layer.has_fresh = True
            layer.post_backward(is_last, reshards=is_last)
        self.root.has_fresh = True
        self._finish()
        heap.enter(label)

    def _compute_again(self, last: Place) -> None:
        """Forward of the layers that are computed again together with one, before that."""
        number = self.places.index(last)
        first = number
        while first > 0 and self.places[first - 1].again is not None:
            first -= 1
        for place in self.places[first:number]:
            assert place.again is not None
            self._enter_layer(place)
            self._play(place, place.again.forward)
            # Each is a root of its own.
            self._end_of_root()

    def _tie(self, place: Place, adds: bool) -> None:
        """Add the gradients of output matrix and embedding up once both are there."""
        if self.is_tied and place.kind == "embedding":
            total = self.heap.allocate(self.root.bundle.made[0])
            for one in (place, self.places[-2]):
                gradient = one.played.gradients[0 if one is place else -1]
                self.heap.free(gradient)
            if adds:
                self.heap.free(total)

    def inputs(self) -> None:
        """Backward of all units for gradients of their inputs."""
        self._once("inputs", self._inputs)

    def _inputs(self) -> None:
        heap, label = self.heap, self.heap.label
        heap.enter("backward")
        self.is_last_backward = self.makes_gradients = False
        for group in self.groups:
            group.is_done = False
        for place in reversed(self.places):
            if place.kind == "head":
                self.root.pre_backward()
            if place.group is not None:
                place.group.pre_backward()
            assert place.played.split is not None
            self._play(place, place.played.split.inputs)
            if place.group is not None:
                place.group.post_backward(is_last=False, reshards=False)
        self._finish()
        for place in self.places:
            assert place.played.split is not None
            self._play(place, place.played.split.after_inputs)
        self.makes_gradients = True
        heap.enter(label)

    def weights(self) -> None:
        """The gradients of weights that `inputs` has left, from the first unit to the last one."""
        self._once("weights", self._weights)

    def _weights(self) -> None:
        heap, label = self.heap, self.heap.label
        heap.enter("backward")
        forgotten: tuple[Step, ...] = ()
        adds = [(place.group or self.root).has_fresh for place in self.places]
        for place, is_adding in zip(self.places, adds, strict=True):
            split = place.played.split
            assert split is not None
            for step in split.weights if is_adding else split.first_weights:
                if step == FORGETS:
                    self._play(place, forgotten)
                    forgotten = ()
                elif not isinstance(step, str):
                    heap.play(step)
            self._play(place, forgotten)
            forgotten = split.forgotten
        self._play(self.places[-1], forgotten)
        for place in self.places:
            assert place.played.split is not None
            self._play(place, place.played.split.rest)
        for group in self.groups:
            group.has_fresh = True
        heap.enter(label)

    def reduce(self) -> None:
        """`perform_reduce_grad` of a pipeline's stage: of the root, and of the layers from the first on."""
        self._once("reduce", self._reduce)

    def _reduce(self) -> None:
        self.is_last_backward = True
        for group in self.groups:
            group.post_backward(is_last=True, reshards=True)
        self._finish()

    def _finish(self) -> None:
        """`FSDPState._root_post_backward_final_callback`."""
        is_last = self.is_last_backward
        for group in self.groups:
            if not group.is_done:
                group.post_backward(is_last, reshards=is_last)
            if is_last:
                group.finalize()
        if is_last:
            for storage in self.traffic.reduced_last:
                self.heap.free(storage)
            self.traffic.reduced_last.clear()

    def _play(self, place: Place, steps: tuple[Step, ...]) -> None:
        heap, experts = self.heap, place.experts
        for step in steps:
            if not isinstance(step, str):
                heap.play(step)
            elif experts is None:
                continue
            elif step == EXPERTS_FORWARD:
                experts.pre_forward()
            elif step == EXPERTS_FORWARD_END and self.heap.label == "forward":
                experts.post_forward()
            elif step == EXPERTS_FORWARD_END:
                # Computed again, parameters stay, and the experts are a root of their own.
                self._end_of_root()
            elif step == EXPERTS_BACKWARD:
                experts.pre_backward()
            elif step == EXPERTS_BACKWARD_END:
                experts.has_fresh = experts.has_fresh or self.makes_gradients
                experts.post_backward(self.is_last_backward, reshards=self.is_last_backward)
