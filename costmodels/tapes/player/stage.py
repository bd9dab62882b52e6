"""A stage of the pipeline: a chain of units, the groups of their parameters, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from functools import cached_property, partial

from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.tapes.player.casts import Manner
from costmodels.tapes.player.chain import Chain, Unit
from costmodels.tapes.player.heap import (
    GRADIENTS,
    TEMPORARIES,
    Effect,
    Effects,
    Storage,
)
from costmodels.tapes.player.held_gradients import HOLDS, TAKEN
from costmodels.tapes.player.place import Place, link_offloading
from costmodels.tapes.player.setting import Part, Setting
from costmodels.tapes.player.sharding import Group, State, Traffic
from costmodels.tapes.player.units import (
    Played,
    PlayedSplit,
    Step,
)
from costmodels.tapes.structure import LAYERS
from costmodels.tapes.tape import (
    AGAIN,
    ENDS,
    EXPERTS,
    FETCHED,
    FETCHES,
    FETCHES_BEFORE,
    FORGETS,
    FORWARD_END,
    LAYER,
    SEEN,
    Tape,
    shared_parameter,
)


class Stage:
    """The units of one stage and what FSDP2 does around them."""

    def __init__(self, setting: Setting, units: Sequence[Unit], kept_as: str) -> None:
        self.heap, self.setting = setting.heap, setting
        self.traffic = Traffic()
        kinds = [unit.kind for unit in units]
        self.is_first, self.is_last = kinds[0] == "embedding", kinds[-1] == "head"
        model = setting.model
        self.is_tied = (model.tied or model.mtp is not None) and self.is_first and self.is_last
        """Embedding and head share a parameter, or head and modules that predict further tokens."""
        is_piped = setting.layout.pipeline_parallel > 1
        splits = setting.layout.schedule in SPLIT_BACKWARD
        chain = Chain(units, setting.sizes, self.is_tied, is_piped, splits, kept_as)
        self.input, self.output = chain.input, chain.output
        self.input_gradient, self.output_gradient = chain.input_gradient, chain.output_gradient
        """Messages: None where the stage has none."""
        self.outputs = chain.outputs
        self.places = [
            Place(kind, one, again) for kind, one, again in zip(kinds, chain.played, chain.again, strict=True)
        ]
        self.makes_gradients = True
        """Backward makes gradients of weights."""
        self.held: list[Step] = []
        """The end of gradients that a pass of those of weights has made last."""
        self.inner_manners: dict[str, Manner] = {}
        """How it gives them to the parameters of the layer that it has come to."""
        self.effects: Effects = {}
        self.ends: dict[Hashable, list[State]] = {}
        """States of groups after passes."""
        self.states: list[tuple[State, ...]] = []
        """Of all groups, as far as they have been met."""
        self.changes: dict[tuple[str, int], tuple[Effect, int]] = {}
        """What passes do in each of these states, and the state that they leave."""
        tapes = [unit.tape for unit in units]
        self.shared = shared_parameter(tapes[-1]) if self.is_tied else 0
        """The number of the head's parameter that the embedding is."""
        self.root = self._root(tapes)
        self.groups = [self.root]
        for place, tape in zip(self.places, tapes, strict=True):
            if place.kind in LAYERS:
                place.group = self._group(tape, place.played, LAYER)
                self.groups.append(place.group)
            for number, parameter in enumerate(tape.parameters):
                place.numbers.setdefault(parameter.group, []).append(number)
            names = [name for name in _inner_groups(tape) if not self._is_of_root(name)]
            inner = {name: self._group(tape, place.played, name) for name in names}
            self.groups += inner.values()
            ends = [step for step in place.played.forward if isinstance(step, str)]
            place.inner = dict(sorted(inner.items(), key=lambda item: ends.index(item[0] + FORWARD_END)))
        if setting.layout.offload_activations:
            link_offloading(self.places)
        before: Group | None = None
        for place in self.places:
            for group in (*place.inner.values(), place.group):
                if group is not None:
                    group.before, before = before, group
        self.root.before = before

    def _root(self, tapes: Sequence[Tape]) -> Group:
        """All parameters that no layer has."""
        parts: list[Part] = []
        for place, tape in zip(self.places, tapes, strict=True):
            if place.kind in LAYERS:
                continue
            own = self.setting.parts(tape, place.played, LAYER, is_layer=False)
            if self.is_tied and place.kind == "embedding":
                # The sum of its gradient and that of the output matrix, which is the same parameter.
                own[0] = own[0]._replace(made=own[0].made._replace(category=GRADIENTS))
            if self.is_tied and place.kind == "head":
                own.pop()
            parts += own
            for name in filter(self._is_of_root, _inner_groups(tape)):
                parts += self.setting.parts(tape, place.played, name, is_layer=True)
        bundle = self.setting.bundle_of(parts, experts=False)
        return Group(self.heap, self.traffic, bundle, True, self.setting.wraps)

    def _is_of_root(self, name: str) -> bool:
        """Whether the root has the parameters of a group within a unit: without FSDP2 all but those of
        layers and their experts (`runtime.parallel.working_copies`)."""
        return not (self.setting.wraps or name.endswith((LAYER, EXPERTS)))

    def _group(self, tape: Tape, one: Played, name: str) -> Group:
        bundle = self.setting.bundle(tape, one, name)
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

    def state_number(self) -> int:
        """The number of the state that all groups are in."""
        state = tuple(group.state for group in self.groups)
        if state not in self.states:
            self.states.append(state)
        return self.states.index(state)

    def enter_state(self, number: int) -> None:
        """Let all groups be in the state of a number."""
        for group, state in zip(self.groups, self.states[number], strict=True):
            group.state = state

    def effect_of(self, name: str, state: int) -> tuple[Effect, int]:
        """What `unshard`, `wait`, `reshard`, `forward`, `backward` of a micro batch, `inputs`, `weights`,
        `add_up` or `reduce` does in the state of a number, and the number of the state that it leaves."""
        if (name, state) not in self.changes:
            self.enter_state(state)
            arguments = (False,) if name == "backward" else ()
            effect = self.heap.effect_of(partial(getattr(self, name), *arguments))
            self.changes[name, state] = effect, self.state_number()
        return self.changes[name, state]

    def forward(self) -> None:
        """Forward of all units."""
        self._once("forward", self._forward)

    def _forward(self) -> None:
        heap, label = self.heap, self.heap.label
        heap.enter("forward")
        self.root.pre_forward()
        unkept: Storage | None = None
        for place, output in zip(self.places, self.outputs, strict=True):
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
        self.traffic.let_go(self.heap)

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
        manner = self.root.manner(is_last)
        self.root.pre_backward()
        for place in reversed(self.places):
            layer = place.group
            self.inner_manners = {name: group.manner(is_last) for name, group in place.inner.items()}
            if layer is None:
                self._play(place, place.played.backward(manner, self.inner_manners))
                self._tie(place, manner)
                self.root.come(manner)
                if not self.is_first:
                    # No other gradient of the root's is to come.
                    self.root.add_up()
                continue
            layer.pre_backward()
            if place.again is None:
                self._compute_again(place)
            own = place.again or place.played
            given = layer.manner(is_last)
            self._play(place, own.backward(given, self.inner_manners, place.late()))
            layer.come(given)
            layer.post_backward(is_last, reshards=is_last)
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

    def _tie(self, place: Place, manner: Manner) -> None:
        """Add the gradients of output matrix and embedding up once both are there."""
        if self.is_tied and place.kind == "embedding":
            bundle = self.root.bundle
            casts = self.root.casts and (manner == "casts" or not bundle.policy.widens)
            total = bundle.sums[0] if casts else bundle.made[0]
            if manner == "adds":
                # Only what is kept counts as a gradient.
                total = total._replace(category=TEMPORARIES)
            self.heap.allocate(total)
            for one in (place, self.places[-1]):
                gradient = one.played.gradients[0 if one is place else self.shared]
                self.heap.free(Storage(TEMPORARIES, total.size) if casts else gradient)
            if manner == "adds":
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
            if place.again is None:
                self._compute_again(place)
            steps = _split(place).inputs
            self._play(place, steps[: _end(steps)])
            if place.group is not None:
                place.group.post_backward(is_last=False, reshards=False)
        self._finish()
        last = self.places[-1]
        steps = _split(last).inputs
        self._play(last, steps[_end(steps) :])
        self.makes_gradients = True
        heap.enter(label)

    def weights(self) -> None:
        """The gradients of weights that `inputs` has left, from the first unit to the last one."""
        self._once("weights", self._weights)

    def _weights(self) -> None:
        heap, label = self.heap, self.heap.label
        heap.enter("backward")
        forgotten: list[tuple[Step, ...]] = []
        left: list[tuple[Step, ...]] = []
        come: set[int] = set()
        for together in self._together():
            parts: list[tuple[Step, ...]] = []
            for place in together:
                steps = self._apart(place)
                marks = (FORGETS, AGAIN) if len(together) > 1 else (FORGETS,)
                start = next((steps.index(mark) for mark in marks if mark in steps), 0)
                if place.again is not None:
                    self._enter_layer(place)
                self._play_spans(steps[:start])
                if place.again is not None:
                    self._end_of_root()
                parts.append(steps[start:])
            if all(FORGETS in steps for steps in parts):
                self._play_spans(*forgotten)
                forgotten.clear()
            for place, steps in zip(together, parts, strict=True):
                group = place.group or self.root
                seen = self._play_weights(place, steps, come)
                if self._ends_root(place):
                    for each in self.groups:
                        self._come_to(each, come)
                for one in (group, place.experts):
                    if one is not None and id(one) not in seen:
                        one.come("casts" if one.casts else "makes")
                    come.add(id(one))
            # Where a part of several layers is left, all of theirs stays.
            kept = left if any(AGAIN in steps for steps in parts) else forgotten
            kept += [_split(place).forgotten for place in together]
        self._end_held()
        self._play_spans(*forgotten, *left)
        for place in self.places:
            self._play(place, _split(place).rest)
        self.traffic.end_list(heap)
        heap.enter(label)

    def _come_to(self, group: Group, come: Collection[int]) -> None:
        """FSDP2 comes to a group amid a pass of gradients of weights.

        Args:
            come: the groups that have theirs from this pass, by their identities.
        """
        group.post_backward(False, reshards=False, since="begun" if id(group) in come else "earlier")

    def _play_weights(
        self, place: Place, steps: Sequence[Step], come: Collection[int]
    ) -> Mapping[int, Collection[int]]:
        """Gradients of the weights of a unit.

        Args:
            come: groups that have had theirs before, by their identities.

        Returns:
            The parameters to whose gradients FSDP2 comes meanwhile, of groups by their identities.
        """
        times, found = iter(_split(place).seen), dict[int, Collection[int]]()
        holds = steps.index(HOLDS) if HOLDS in steps else len(steps)
        for step in steps[:holds]:
            if not isinstance(step, str):
                self.heap.play(step)
            elif step == TAKEN:
                self._end_held()
            elif step == SEEN and self.setting.wraps:
                parameters = next(times)
                for group in self.groups:
                    own, last = (place.places_of(group, some) for some in (parameters, parameters[-1:]))
                    before = found.get(id(group), ())
                    if own is None:
                        self._come_to(group, come)
                    elif group.see([n for n in own if n not in before], not before, last or ()):
                        found[id(group)] = own
        self.held += steps[holds:]
        return found

    def _end_held(self) -> None:
        """End the gradients that the last operation has made."""
        self._play_spans(tuple(self.held))
        self.held.clear()

    def _together(self) -> Iterator[list[Place]]:
        """Layers that are computed again together, and the other units one by one."""
        found: list[Place] = []
        for place in self.places:
            found.append(place)
            if place.again is None:
                yield found
                found = []

    def _play_spans(self, *passes: tuple[Step, ...]) -> None:
        """Play what happens between marks."""
        for steps in passes:
            for step in steps:
                if not isinstance(step, str):
                    self.heap.play(step)

    def add_up(self) -> None:
        """Add up the gradients that `weights` has made, as backward would come to them
        (`WorkingCopies.add_gradients`)."""
        for group in reversed(self.groups):
            group.add_up()

    def _ends_root(self, place: Place) -> bool:
        """Whether the root has a hook where the gradients of a unit's weights are done: their graph begins at
        the output of its module. What was there of gradients is converted before these are added."""
        return place.kind == "head" and self.root.wraps

    def _apart(self, place: Place) -> tuple[Step, ...]:
        """The gradients of weights of a unit."""
        group, split, ends_root = place.group or self.root, _split(place), self._ends_root(place)
        brief = self._brief(place)
        if split.seen and group.sees:
            return split.first_weights(brief)
        if group.casts and group.has_sums:
            # No hook of a layer's comes before, only that of the root.
            return split.weights if ends_root else split.cast_weights
        adds = group.has_fresh and not (ends_root and group.bundle.policy.converts)
        experts = place.experts
        if experts is not None and experts.has_fresh != adds:
            # Ranks may have summed either's.
            return split.weights_of(frozenset(place.numbers[EXPERTS if adds else LAYER]))
        return split.weights if adds else split.first_weights(brief)

    def _brief(self, place: Place) -> set[int]:
        """The parameters of a unit whose new gradients FSDP2 converts before a pass of the weights ends."""
        seen = set().union(*_split(place).seen)
        found = set[int]()
        for name, group in ((LAYER, place.group), (EXPERTS, place.experts)):
            if group is not None and group.sees:
                own = place.numbers[name]
                found |= {*own} if self.places.index(place) < self.comes_last else seen & {*own}
        return found

    @cached_property
    def comes_last(self) -> int:
        """The last unit amid whose gradients of weights FSDP2 comes to all groups; -1 where there is none."""
        every = [n for n, one in enumerate(self.places) if self._ends_root(one) or _split(one).seen]
        return max(every, default=-1) if self.setting.wraps else -1

    def reduce(self) -> None:
        """`perform_reduce_grad` of a pipeline's stage."""
        self._once("reduce", self._reduce)

    def _reduce(self) -> None:
        self.is_last_backward = True
        last_first = self.setting.ways.reduces_last_first
        # From the root and the first layer on, or the other way.
        for group in reversed(self.groups) if last_first else self.groups:
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
        heap = self.heap
        for number, step in enumerate(steps):
            if not isinstance(step, str):
                # What comes back from host memory may be there already.
                if not (place.is_fetched and number and steps[number - 1] == FETCHES):
                    heap.play(step)
            elif step == FETCHED:
                place.is_fetched = False
            elif step == FETCHES_BEFORE:
                before = place.sent_before
                if before is not None and before.copies is not None:
                    heap.play(before.copies)
                    before.is_fetched = True
            else:
                self._act(place, step)

    def _act(self, place: Place, mark: str) -> None:
        """What FSDP2 does at a mark around what a group computes."""
        for name, group in place.inner.items():
            match mark.removeprefix(name):
                case "_forward":
                    group.pre_forward()
                    experts = place.inner.get(name.replace(LAYER, EXPERTS))
                    if experts is not None:
                        experts.unshard()
                case "_forward_end" if self.heap.label == "forward":
                    group.post_forward()
                case "_forward_end":
                    # Computed again, parameters stay, and the experts are a root of their own.
                    self._end_of_root()
                case "_backward":
                    group.pre_backward()
                case "_backward_end":
                    if self.makes_gradients:
                        group.come(self.inner_manners.get(name, "makes"))
                    group.post_backward(self.is_last_backward, reshards=self.is_last_backward)


def _end(steps: Sequence[Step]) -> int:
    """Where what ends with a stage's output does."""
    return steps.index(ENDS) if ENDS in steps else len(steps)


def _split(place: Place) -> PlayedSplit:
    """Backward of a unit in two passes."""
    found = (place.again or place.played).split
    assert found is not None
    return found


def _inner_groups(tape: Tape) -> list[str]:
    """Groups of the parameters of a unit besides its own."""
    return list(dict.fromkeys(one.group for one in tape.parameters if one.group != LAYER))


class Stages:
    """The stages of a setting, those that are alike once."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self._known: dict[Hashable, Stage] = {}

    def of(self, units: Sequence[Unit], kept_as: str) -> Stage:
        """The stage of these units; `kept_as` is what `Chain` takes."""
        key = (kept_as, *((id(unit.tape), unit.plain is None) for unit in units))
        if key not in self._known:
            self._known[key] = Stage(self.setting, units, kept_as)
        return self._known[key]
