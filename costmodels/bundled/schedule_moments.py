"""Moments of the passes of stages: forward, whole and split backward, gathering and reducing."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from costmodels.bundled.moments import Peak, Term
from costmodels.bundled.pass_states import GATHER, REDUCE
from costmodels.bundled.schedule_pass import Pass, one_of
from costmodels.bundled.schedule_setting import Setting
from costmodels.bundled.stage_reduction import add_reduction
from costmodels.bundled.stage_sums import Kind, Place, Terms, arrivals, arriving, value
from costmodels.spec.schedules import BACKWARD, FORWARD, INPUTS, WEIGHTS
from costmodels.spec.table import Floats, Ints


def passes(setting: Setting) -> Iterator[tuple[Ints, Peak]]:
    """The moments of each kind of pass, [some states, 1], without what is there besides
    (`costmodels.bundled.schedule_background`), and which states these are."""
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
    """Parameters arrive, and are copied to where they are used: embedding and head, then layer by layer."""
    stage, sums, happens = own.stage, own.sums, own.setting.wraps
    state: Terms = [*own.own_gradients(), *own.gathered()]
    for place in sums.places():
        kind = stage.kinds[place.index]
        # What needs no all-gather has no memory before it is copied.
        there = [*state, *((-count, held) for count, held in sums.above(place, "direct"))]
        own_group = arriving(kind.group)
        if kind.experts is not None:
            own_group.append((-1.0, kind.experts.direct))
            own.peak.add("forward", [*there, *arriving(kind.experts)], place.happens & happens)
        own.peak.add("forward", [*there, *own_group], place.happens & happens)
    ends: Terms = [*stage.roots("buffer"), *stage.roots("copying")]
    own.peak.add("forward", [*state, *ends, *((-count, held) for count, held in sums.all("direct"))], happens)


def _forward(own: Pass) -> None:
    stage, sums = own.stage, own.sums
    state: Terms = [*own.own_gradients(), *own.gathered(own.frees), (-own.takes, stage.saved)]
    own.peak.add("forward", [*state, (1.0, stage.first.forward)], own.first > 0)
    state.append((own.first, stage.first.kept))
    for place in sums.places():
        kind = stage.kinds[place.index]
        handed = own.tops(place) * (1 - own.gives)
        running = one_of(handed, kind.unit.handed_forward, kind.unit.forward)
        below: Terms = [*state, *sums.below(place, "kept")]
        whole: Term = (own.frees, value(kind, "gathered"))
        there: Terms = [whole, *sums.above(place, "gathered", own.frees - own.freed)]
        own.peak.add("forward", [*below, *running, *there], place.happens)
        # Layers that have freed theirs gather them one after the other.
        gathers = place.happens & (own.freed > 0)
        own.peak.add("forward", [*below, *running, whole, (1.0, kind.group.buffer)], gathers)
        for part in arrivals(sums, place, after_roots=False):
            own.peak.add("forward", [*below, (1.0, stage.saved), *part], gathers)
    state += sums.all("kept")
    scores: Terms = [(1.0, stage.last.scores), *sums.highest("tail", own.freed)]
    loss: Terms = [(1.0, stage.last.forward)]
    for part in (scores, loss):
        own.peak.add("forward", [*state, *part], own.last > 0)


def _backward(own: Pass) -> None:
    stage, sums = own.stage, own.sums
    grown = own.grown > 0
    state: Terms = [*own.gathered(own.freed), *own.exchanged(), (own.last, stage.logits)]
    state += [(own.first, stage.first.kept), *own.root_gradients()]
    before: Terms = [*state, *own.sums.all("accumulated", own.summed), *own.sums.all("fresh", own.fresh)]
    loss: Terms = [*before, *sums.all("kept"), (1.0, stage.last.kept)]
    scoring: Terms = [(1.0, stage.last.scoring)]
    # Once backward reaches the head, the parameters of the last layer are on their way.
    matrix = one_of(own.grown, stage.last.matrix, stage.last.first_matrix)
    matrix += sums.highest("buffer", own.freed)
    for part in (scoring, matrix):
        own.peak.add("backward", [*loss, *part], own.last > 0)
    head: Terms = [(own.last * own.grown, stage.last.added), (own.last * (1 - own.grown), stage.last.left)]
    state += head
    for place in sums.places():
        kind = stage.kinds[place.index]
        handed = own.tops(place)
        done: Terms = [*state, *sums.above(place, "accumulated"), *sums.above(place, "gathered", own.freed)]
        kept: Terms = [*done, *sums.below(place, "kept", own=1.0)]
        kept += [
            *sums.below(place, "accumulated", own.summed, own=1.0),
            *sums.below(place, "fresh", own.fresh, own=1.0),
        ]
        copied: Terms = [(1.0, kind.group.gathered), (1.0, kind.group.buffer), (1 - handed, stage.residual)]
        own.peak.add("backward", [*kept, *copied], place.happens & (own.freed > 0))
        whole: Term = (own.freed, value(kind, "gathered"))
        arriving: Terms = [whole, *sums.previous(place, "tail", own.freed)]
        kept += arriving
        for phase, more in _phases(own, kind):
            for unit, condition in (("first_backward", ~grown), ("backward", grown)):
                running = own.whole_backward(place, unit, phase)
                own.peak.add("backward", [*kept, *running, *more], place.happens & condition)
        terms: Terms = [*done, *arriving, *sums.below(place, "kept"), (1.0, stage.residual)]
        terms += [
            *sums.below(place, "fresh", own.fresh),
            (1.0, kind.group.accumulated),
            (1.0, kind.group.converted),
        ]
        own.peak.add("reduce", terms, place.happens & own.setting.converts & (own.summed == 0))
    ends: Terms = [*state, *sums.all("accumulated"), *sums.all("gathered", own.freed)]
    for unit, condition in (("first_backward", ~grown), ("backward", grown)):
        own.peak.add("backward", [*ends, (1.0, getattr(stage.first, unit))], (own.first > 0) & condition)
    ends += [(-count, held) for count, held in [*head, *stage.roots("fresh", own.fresh)]]
    ends += [*stage.roots("accumulated"), *stage.roots("converted")]
    own.peak.add("reduce", ends, own.setting.converts & (own.summed == 0))


def _phases(own: Pass, kind: Kind) -> list[tuple[str, Terms]]:
    """Parts of the backward of a layer, and what has become of its experts' gradients then."""
    if kind.experts is None:
        return [("", [])]
    experts = kind.experts
    after: Terms = [(1 - own.summed, experts.accumulated), (-own.fresh, experts.fresh)]
    return [("_before", []), ("_after", after)]


def _inputs(own: Pass) -> None:
    """Gradients of inputs: what was saved stays, and gradients of results for those of weights."""
    stage, sums = own.stage, own.sums
    state: Terms = [*own.gathered(), *own.exchanged(), (own.last, stage.logits)]
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
    state: Terms = [*own.gathered(), *own.exchanged(gradient=0.0), *own.own_gradients()]
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
    """Of the whole stage; what is left of it is there at the end of the step too."""
    stage, sums, wraps = own.stage, own.sums, own.setting.wraps
    add_reduction(own.peak, stage, [], wraps, own.fresh)
    parts: Terms = [*sums.all("gradients"), *stage.roots("gradients")]
    whole: Terms = [*sums.all("accumulated"), *stage.roots("accumulated")]
    for label in ("reduce", "optimizer"):
        own.peak.add(label, parts, wraps)
        own.peak.add(label, whole, ~wraps)
