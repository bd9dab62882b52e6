"""Moments of the passes of stages: forward, whole and split backward, gathering and reducing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from costmodels.bundled.moments import Peak
from costmodels.bundled.pass_states import GATHER, REDUCE
from costmodels.bundled.schedule_pass import Pass, one_of
from costmodels.bundled.schedule_setting import Setting
from costmodels.bundled.stage_sums import Kind, Place, Terms, value
from costmodels.bundled.states import GroupBytes
from costmodels.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS
from costmodels.table import Floats, Ints


def passes(setting: Setting) -> Iterator[tuple[Ints, Peak]]:
    """The moments of the states of each kind of pass, [some states, 1], and which states these are."""
    makers = {
        FORWARD: _forward,
        BACKWARD: _backward,
        INPUTS: _inputs,
        WEIGHTS: _weights,
        REDUCE: _reduce,
        GATHER: _gather,
    }
    for kind, maker in makers.items():
        some = np.flatnonzero(setting.rows.kind == kind)
        if len(some):
            own = Pass(setting.take(some))
            maker(own)
            yield some, own.peak


def _gather(own: Pass) -> None:
    """Parameters arrive, and are copied to where they are used layer by layer."""
    happens = own.setting.wraps
    state: Terms = [*own.start, *own.own_gradients(), *own.gathered()]
    for place in own.sums.places():
        group = own.stage.kinds[place.index].group
        own.peak.add("forward", [*state, (1.0, group.buffer)], place.happens & happens)
    own.peak.add("forward", [*state, *own.stage.roots("buffer")], happens)


def _forward(own: Pass) -> None:
    stage, sums = own.stage, own.sums
    state: Terms = [*own.start, *own.own_gradients(), *own.gathered(), (-own.takes, stage.saved)]
    own.peak.add("forward", [*state, (1.0, stage.first.forward)], own.first > 0)
    state.append((own.first, stage.first.kept))
    for place in sums.places():
        unit = stage.kinds[place.index].unit
        handed = own.tops(place) * (1 - own.gives)
        running = one_of(handed, unit.handed_forward, unit.forward)
        own.peak.add("forward", [*state, *sums.below(place, "kept"), *running], place.happens)
    state += sums.all("kept")
    for part in (stage.last.scores, stage.last.forward):
        own.peak.add("forward", [*state, (1.0, part)], own.last > 0)


def _backward(own: Pass) -> None:
    stage, sums = own.stage, own.sums
    grown = own.grown > 0
    state: Terms = [*own.start, *own.gathered(), *own.exchanged(), (own.last, stage.logits)]
    state += [(own.first, stage.first.kept), *own.root_gradients()]
    before: Terms = [*state, *own.sums.all("accumulated", own.summed), *own.sums.all("fresh", own.fresh)]
    loss: Terms = [*before, *sums.all("kept"), (1.0, stage.last.kept)]
    for part in ([(1.0, stage.last.scoring)], one_of(own.grown, stage.last.matrix, stage.last.first_matrix)):
        own.peak.add("backward", [*loss, *part], own.last > 0)
    head: Terms = [(own.last * own.grown, stage.last.added), (own.last * (1 - own.grown), stage.last.left)]
    state += head
    for place in sums.places():
        kind = stage.kinds[place.index]
        handed = own.tops(place)
        done: Terms = [*state, *sums.above(place, "accumulated")]
        kept: Terms = [*done, *sums.below(place, "kept", own=1.0)]
        kept += [
            *sums.below(place, "accumulated", own.summed, own=1.0),
            *sums.below(place, "fresh", own.fresh, own=1.0),
        ]
        for phase, more in _phases(own, kind):
            for unit, condition in (("first_backward", ~grown), ("backward", grown)):
                top = {"first_backward": "handed_first", "backward": "handed_backward"}[unit]
                running = one_of(handed, value(kind, top + phase), value(kind, unit + phase))
                own.peak.add("backward", [*kept, *running, *more], place.happens & condition)
        terms: Terms = [*done, *sums.below(place, "kept"), (1.0, stage.residual)]
        terms += [
            *sums.below(place, "fresh", own.fresh),
            (1.0, kind.group.accumulated),
            (1.0, kind.group.converted),
        ]
        own.peak.add("reduce", terms, place.happens & own.setting.converts & (own.summed == 0))
    ends: Terms = [*state, *sums.all("accumulated")]
    for unit, condition in (("first_backward", ~grown), ("backward", grown)):
        own.peak.add("backward", [*ends, (1.0, getattr(stage.first, unit))], (own.first > 0) & condition)


def _phases(own: Pass, kind: Kind) -> list[tuple[str, Terms]]:
    """Parts of the backward of a layer, and what has become of its experts' gradients then."""
    if kind.experts is None:
        return [("", [])]
    experts, converts = kind.experts, own.setting.converts * 1.0
    first = (1 - own.summed) * (1 - own.fresh)
    after: Terms = [(first * converts, experts.accumulated), (first * (1 - converts), experts.fresh)]
    after += [(own.fresh * (1 - own.summed), experts.accumulated), (-own.fresh, experts.fresh)]
    return [("_before", []), ("_after", after)]


def _inputs(own: Pass) -> None:
    """Gradients of inputs: what was saved stays, and gradients of results for those of weights."""
    stage, sums = own.stage, own.sums
    state: Terms = [*own.start, *own.gathered(), *own.exchanged(), (own.last, stage.logits)]
    state += [*own.root_gradients(), *sums.all("kept"), (own.last, stage.last.kept)]
    before: Terms = [*state, *sums.all("accumulated", own.summed), *sums.all("fresh", own.fresh)]
    own.peak.add("backward", [*before, (1.0, stage.last.inputs)], own.last > 0)
    state.append((own.last, stage.last.inputs_net))
    either = np.maximum(own.summed, own.fresh)
    for place in sums.places():
        kind = stage.kinds[place.index]
        handed = own.tops(place)
        done: Terms = [*state, *sums.above(place, "inputs_net"), *sums.above(place, "accumulated", either)]
        done += _top_of_stage(own, place)
        rest: Terms = [*done, *sums.below(place, "accumulated", own.summed, own=1.0)]
        rest += sums.below(place, "fresh", own.fresh, own=1.0)
        for phase, more in _input_phases(own, kind):
            running = own.of_place(place, f"inputs{phase}")
            own.peak.add("backward", [*rest, *running, *more], place.happens)
        terms: Terms = [*done, *one_of(handed, kind.unit.top_inputs_net, kind.unit.inputs_net)]
        terms += [*sums.below(place, "fresh", own.fresh), (1.0, stage.residual)]
        terms += [(1.0, kind.group.accumulated), (1.0, kind.group.converted)]
        own.peak.add("reduce", terms, place.happens & (own.fresh > 0) & (own.summed == 0))


def _input_phases(own: Pass, kind: Kind) -> list[tuple[str, Terms]]:
    if kind.experts is None:
        return [("", [])]
    experts = kind.experts
    after: Terms = [(own.fresh * (1 - own.summed), experts.accumulated), (-own.fresh, experts.fresh)]
    return [("_before", []), ("_after", after)]


def _top_of_stage(own: Pass, place: Place) -> Terms:
    """What the last layer of a stage without head differs in from others, where it is after a layer."""
    terms: Terms = []
    missing: Floats = 1 - own.last
    for index, kind in reversed(list(enumerate(own.stage.kinds))):
        here = missing * (kind.count > 0)
        missing = missing - here
        if index < place.index:
            break
        if index == place.index:
            here = here * (kind.count - place.below > 1)
        terms += [(here, kind.unit.top_inputs_net), (-here, kind.unit.inputs_net)]
    return terms


def _weights(own: Pass) -> None:
    """Gradients of weights, from the first layer to the last one."""
    stage, sums = own.stage, own.sums
    state: Terms = [*own.start, *own.gathered(), *own.exchanged(), *own.own_gradients()]
    state += [((1 - own.first) * (1 - own.takes), stage.message)]
    state += [*sums.all("kept"), (own.last, stage.last.kept), (own.last, stage.last.waits_net)]
    for kind, top in zip(stage.kinds, _tops(own), strict=True):
        state += [(kind.count - top, kind.unit.waits_net), (top, kind.unit.top_waits_net)]
    grown = own.grown > 0
    for first, condition in (("first_", ~grown), ("", grown)):
        name = f"{first}weights"
        for place in sums.places():
            terms: Terms = [*state, *_below_weights(own, place, name), *own.of_place(place, name)]
            own.peak.add("backward", terms, place.happens & condition)
        last = Place(len(stage.kinds) - 1, stage.kinds[-1].count, own.last > 0)
        terms = [*state, *_below_weights(own, last, name), (1.0, stage.last.held[name])]
        own.peak.add("backward", terms, (own.last > 0) & condition)


def _tops(own: Pass) -> list[Floats]:
    """1 for the kind of the last layer of a stage without head."""
    missing: Floats = 1 - own.last
    found = []
    for kind in reversed(own.stage.kinds):
        found.append(missing * (kind.count > 0))
        missing = missing - found[-1]
    return found[::-1]


def _below_weights(own: Pass, place: Place, name: str) -> Terms:
    """What the layers before one have left, of which the stage's first one keeps its input."""
    terms = own.sums.below(place, f"{name}_net")
    missing: Floats = np.ones_like(own.last)
    for index, kind in enumerate(own.stage.kinds[: place.index + 1]):
        here = missing * (kind.count > 0)
        missing = missing - here
        if index == place.index:
            here = here * (np.asarray(place.below) > 0)
        terms += [(here, kind.unit.held[f"bottom_{name}_net"]), (-here, kind.unit.held[f"{name}_net"])]
    return terms


def _reduce(own: Pass) -> None:
    """Embedding and head, then the layers in their order."""
    stage, sums = own.stage, own.sums
    wraps = own.setting.wraps
    accumulated: Terms = sums.all("accumulated")
    layers: Terms = [*own.start, *accumulated, *sums.all("fresh", own.fresh), *sums.all("gathered")]
    reading = stage.roots("reducing")
    own.peak.add("reduce", [*layers, *stage.roots("accumulated"), *reading], wraps)
    written: Terms = [*stage.roots("written"), *stage.roots("quotient")]
    cast: Terms = [*stage.roots("reduced"), *stage.roots("gradients")]
    for result in (written, cast):
        own.peak.add("reduce", [*layers, *reading, *result, *stage.roots("last_accumulated")], wraps)
    done: Terms = [*own.start, *stage.roots("gradients"), *stage.roots("held")]
    for place in sums.places():
        kind = stage.kinds[place.index]
        group, happens = kind.group, place.happens & wraps
        state: Terms = [*done, *sums.below(place, "gradients"), *sums.below(place, "held")]
        rest: Terms = [*sums.above(place, "accumulated"), *sums.above(place, "gathered")]
        rest += sums.above(place, "fresh", own.fresh)
        if kind.experts is not None:
            # They follow the rest of their layer.
            rest += [
                (1.0, kind.experts.accumulated),
                (1.0, kind.experts.gathered),
                (own.fresh, kind.experts.fresh),
            ]
        state += [(1.0, group.reducing), *rest]
        own.peak.add("reduce", [*state, (1.0, group.accumulated)], happens)
        state.append((1.0, group.last_accumulated))
        own.peak.add("reduce", [*state, (1.0, group.written), (1.0, group.quotient)], happens)
        own.peak.add("reduce", [*state, (1.0, group.reduced), (1.0, group.gradients)], happens)
        if kind.experts is not None:
            _reduce_experts(own, place, kind.experts, [*done, *sums.below(place, "gradients"), *rest])
    parts: Terms = [*own.start, *sums.all("gradients"), *stage.roots("gradients")]
    whole: Terms = [*own.start, *accumulated, *stage.roots("accumulated")]
    for label in ("reduce", "optimizer"):
        own.peak.add(label, parts, wraps)
        own.peak.add(label, whole, ~wraps)


def _reduce_experts(own: Pass, place: Place, experts: GroupBytes, state: Terms) -> None:
    group, happens = own.stage.kinds[place.index].group, place.happens & own.setting.wraps
    state = [*state, (-1.0, experts.accumulated), (-1.0, experts.gathered), (-own.fresh, experts.fresh)]
    state += [
        (1.0, group.gradients),
        (1.0, group.held),
        *own.sums.below(place, "held"),
        (1.0, experts.reducing),
    ]
    shuffled: Terms = [(1.0, experts.accumulated), (1.0, experts.shuffled_accumulated)]
    own.peak.add("reduce", [*state, *shuffled], happens)
    state.append((1.0, experts.last_accumulated))
    own.peak.add("reduce", [*state, (1.0, experts.written), (1.0, experts.quotient)], happens)
    own.peak.add("reduce", [*state, (1.0, experts.reduced), (1.0, experts.gradients)], happens)
