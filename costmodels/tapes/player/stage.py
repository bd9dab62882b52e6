"""A stage of the pipeline: a chain of units, the groups of their parameters, forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.tapes.player.heap import COMMUNICATION, GRADIENTS, Heap, Storage
from costmodels.tapes.player.sharding import Group, Policy, Traffic, policy_of, wraps_parameters
from costmodels.tapes.player.units import (
    Border,
    Parameter,
    Played,
    Sizes,
    Step,
    category_of,
    output_of,
    parameters_of,
    played,
    releases_in_forward,
)
from costmodels.tapes.structure import LAYERS, Structure
from costmodels.tapes.tape import (
    EXPERTS_BACKWARD,
    EXPERTS_BACKWARD_END,
    EXPERTS_FORWARD,
    EXPERTS_FORWARD_END,
    OUTPUT,
    OUTPUT_GRADIENT,
    Tape,
)

Unit = tuple[Structure, Tape]

Slots = list[tuple[Group, int]]
"""Where the gradients of a unit's parameters go: groups, and numbers within these."""


@dataclass
class Place:
    """One unit of a stage."""

    kind: str
    played: Played
    parameters: list[Parameter]
    group: Group | None = None
    """Of a layer; embedding and head belong to the root."""
    experts: Group | None = None
    slots: Slots = field(default_factory=list)


class Stage:
    """The units of one stage and what FSDP2 does around them."""

    def __init__(
        self,
        heap: Heap,
        model: ModelSpec,
        layout: Layout,
        units: Sequence[Unit],
        sizes: Sizes,
    ) -> None:
        self.heap, self.layout = heap, layout
        self.wraps = wraps_parameters(layout, model.experts > 0)
        self.traffic = Traffic()
        ends = {structure.unit for structure, _ in units}
        self.is_first, self.is_last = "embedding" in ends, "loss" in ends
        chain = Chain(
            units, sizes, model.tied and {"embedding", "head"} <= ends, layout.pipeline_parallel > 1
        )
        self.input, self.output = chain.input, chain.output
        self.input_gradient, self.output_gradient = chain.input_gradient, chain.output_gradient
        """Messages: None where the stage has none."""
        self.tapes = [tape for _, tape in units]
        self.is_tied = model.tied and {"embedding", "head"} <= ends
        self.places = [
            Place(structure.unit, one, parameters_of(tape, sizes))
            for (structure, tape), one in zip(units, chain.played, strict=True)
        ]
        self.tied_gradient: Storage | None = None
        """Of the output matrix, until that of the embedding is there."""
        self._group(model, layout)

    def _group(self, model: ModelSpec, layout: Layout) -> None:
        """Wrap parameters together: those of each layer, of its experts, and all others with the root."""
        policy = policy_of(layout, experts=False)
        outer = [place for place in self.places if place.kind not in LAYERS]
        rest = [
            one
            for place in outer
            for one in place.parameters
            if not (self.is_tied and self._is_twin(place, one))
        ]
        self.root = self._of(rest, policy, is_root=True)
        at = 0
        for place in outer:
            for one in place.parameters:
                is_twin = self.is_tied and self._is_twin(place, one)
                place.slots.append((self.root, 0 if is_twin else at))
                at += not is_twin
        self.groups = [self.root]
        for place in self.places:
            if place.kind not in LAYERS:
                continue
            plain = [one for one in place.parameters if not one.is_expert]
            routed = [one for one in place.parameters if one.is_expert]
            place.group = self._of(plain, policy, is_root=False)
            self.groups.append(place.group)
            if routed:
                place.experts = self._of(routed, policy_of(layout, experts=True), is_root=False)
                self.groups.append(place.experts)
            numbers = {True: 0, False: 0}
            for one in place.parameters:
                owner = place.experts if one.is_expert else place.group
                assert owner is not None
                place.slots.append((owner, numbers[one.is_expert]))
                numbers[one.is_expert] += 1

    def whole_sides(self, sizes: Sizes) -> dict[int, list[tuple[int, ...]]]:
        """By the identity of groups: sides of their parameters under other dimensions."""
        found: dict[int, list[tuple[int, ...]]] = {id(group): [] for group in self.groups}
        for place, tape in zip(self.places, self.tapes, strict=True):
            for one, parameter in zip(place.parameters, parameters_of(tape, sizes), strict=True):
                if self.is_tied and self._is_twin(place, one):
                    continue
                owner = (place.experts if one.is_expert else place.group) or self.root
                found[id(owner)].append(parameter.sides)
        return found

    @staticmethod
    def _is_twin(place: Place, parameter: Parameter) -> bool:
        """Whether a parameter is the output matrix, which may be the embedding."""
        return place.kind == "head" and parameter is place.parameters[-1]

    def _of(self, parameters: list[Parameter], policy: Policy, is_root: bool) -> Group:
        return Group(self.heap, self.traffic, parameters, policy, is_root, self.wraps)

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

    def forward(self) -> None:
        """Forward of the module: all units but the loss."""
        self.heap.enter("forward")
        self.root.pre_forward()
        for place in self.places:
            if place.kind == "loss":
                continue
            if place.group is not None:
                place.group.pre_forward()
                if place.experts is not None:
                    place.experts.unshard()
            self._play(place, place.played.forward)
            if place.group is not None:
                place.group.post_forward()
        self.root.post_forward()
        if self.traffic.gathered_last is not None:
            self.heap.free(self.traffic.gathered_last)
            self.traffic.gathered_last = None

    def loss(self) -> None:
        """Forward of the loss."""
        self.heap.enter("forward")
        self._play(self.places[-1], self.places[-1].played.forward)
        self.heap.enter("schedule")

    def backward(self, is_last: bool, reshards: bool) -> None:
        """Backward of all units, and the end of it that the root calls.

        Args:
            is_last: gradients are reduced.
            reshards: parameters are freed.
        """
        self.heap.enter("backward")
        self.is_last_backward, self.reshards = is_last, reshards
        for group in self.groups:
            group.is_last, group.is_done = is_last, False
        places = list(reversed(self.places))
        if places[0].kind == "loss":
            self._back(places.pop(0))
        self.root.pre_backward()
        for place in places:
            if place.group is not None:
                place.group.pre_backward()
            self._back(place)
            if place.group is not None:
                place.group.post_backward(reshards)
        self.finish()

    def reduce(self) -> None:
        """`perform_reduce_grad` of a pipeline's stage: of the root, and of the layers from the first on."""
        self.is_last_backward = self.reshards = True
        for group in self.groups:
            group.is_last = True
            group.post_backward(reshards=True)
        self.finish()

    def finish(self) -> None:
        """`FSDPState._root_post_backward_final_callback`."""
        for group in self.groups:
            if not group.is_done:
                group.post_backward(self.reshards)
            if self.is_last_backward:
                group.finalize()
        if self.is_last_backward:
            self.traffic.order.clear()
            while self.traffic.reduced_last:
                self.heap.free(self.traffic.reduced_last.pop())

    def _back(self, place: Place) -> None:
        adds = any(group.fresh[number] is not None for group, number in place.slots)
        self._play(place, place.played.adding if adds else place.played.backward)
        if not adds:
            self._keep(place, [not one.is_expert for one in place.parameters])
        if self.is_tied:
            self._tie(place)

    def _tie(self, place: Place) -> None:
        """Add the gradients of output matrix and embedding up once both are there."""
        if place.kind == "head":
            self.tied_gradient = place.played.gradients[-1]
        elif place.kind == "embedding":
            assert self.tied_gradient is not None
            gradient = place.played.gradients[0]
            total = self.heap.allocate(Storage(GRADIENTS, gradient.size))
            for one in (gradient, self.tied_gradient):
                self.heap.free(one)
            if self.root.fresh[0] is None:
                self.root.fresh[0] = total
            else:
                self.heap.free(total)

    def _keep(self, place: Place, which: list[bool]) -> None:
        """Hand new gradients to their groups."""
        for (group, number), gradient, here in zip(place.slots, place.played.gradients, which, strict=True):
            if here and gradient.size and gradient.category == GRADIENTS:
                group.fresh[number] = gradient

    def _play(self, place: Place, steps: tuple[Step, ...]) -> None:
        heap, experts = self.heap, place.experts
        for step in steps:
            if not isinstance(step, str):
                heap.play(step)
            elif experts is None:
                continue
            elif step == EXPERTS_FORWARD:
                experts.pre_forward()
            elif step == EXPERTS_FORWARD_END:
                experts.post_forward()
            elif step == EXPERTS_BACKWARD:
                experts.pre_backward()
            elif step == EXPERTS_BACKWARD_END:
                if all(one is None for one in experts.fresh):
                    self._keep(place, [one.is_expert for one in place.parameters])
                experts.post_backward(self.reshards)


class Chain:
    """The units of a stage between each other, and what goes in and out of it."""

    def __init__(self, units: Sequence[Unit], sizes: Sizes, is_tied: bool, is_piped: bool) -> None:
        """`is_piped`: stages hold their inputs, outputs and the gradients of these to the end of backward."""
        self.units, self.sizes, self.is_tied, self.is_piped = units, sizes, is_tied, is_piped
        self.tapes = [tape for _, tape in units]
        kinds = [structure.unit for structure, _ in units]
        self.is_first, self.is_last = kinds[0] == "embedding", kinds[-1] == "loss"
        self.outputs = [
            output_of(tape, sizes, self._border(number)) for number, tape in enumerate(self.tapes)
        ]
        self.output = self.outputs[-2] if self.is_last else self.outputs[-1]
        message = Storage(COMMUNICATION, self._message())
        self.input: Storage | None = None
        if not self.is_first:
            saved = self.tapes[0].input_category
            self.input = message._replace(category=category_of(saved) if saved else COMMUNICATION)
        self.output_gradient = message
        self.played: list[Played] = []
        self.input_gradient: Storage | None = None
        self._play()
        if self.is_first:
            self.input_gradient = None

    def _message(self) -> int:
        """Bytes of what goes from stage to stage: what a layer returns."""
        for place, (structure, _) in enumerate(self.units):
            if structure.unit in LAYERS:
                return self.outputs[place].size
        return self.outputs[0].size

    def _border(self, number: int) -> Border:
        is_end = number + 1 == len(self.tapes)
        return Border(
            output_category="" if is_end else self.tapes[number + 1].input_category,
            sends_output=is_end and self.is_piped and not self.is_last,
            tied=self._tied(number),
        )

    def _tied(self, number: int) -> int | None:
        if not self.is_tied:
            return None
        last = len(self.tapes[number].parameters) - 1
        return {"embedding": 0, "head": last}.get(self.units[number][0].unit)

    def _play(self) -> None:
        gradient: Storage | None = None
        played_back: list[Played] = []
        for number in range(len(self.tapes) - 1, -1, -1):
            tape = self.tapes[number]
            # Logits, which the stage of a pipeline holds.
            holds_input = self.is_piped and self.units[number][0].unit == "loss"
            holds_output = self.is_piped and self.units[number][0].unit == "head"
            is_free = number > 0 and releases_in_forward(self.tapes[number - 1], OUTPUT) and not holds_input
            is_end = number + 1 == len(self.tapes)
            border = self._border(number)._replace(
                input=self.outputs[number - 1] if is_free else None,
                output_ends=not holds_output and not (is_end and self.is_piped),
                output_gradient=gradient,
                sends_input_gradient=number == 0 and self.is_piped,
            )
            one = played(tape, self.sizes, border)
            played_back.append(one)
            if tape.input_gradient != OUTPUT_GRADIENT:
                gradient = one.input_gradient
        self.played = played_back[::-1]
        self.input_gradient = gradient
