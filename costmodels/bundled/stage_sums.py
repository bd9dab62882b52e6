"""Sums over the layers of a pipeline stage."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from costmodels.bundled.moments import Bytes, Count, Term
from costmodels.bundled.pytorch import is_before
from costmodels.bundled.states import GroupBytes
from costmodels.bundled.units import UnitBytes
from costmodels.spec.table import Bools, Floats

Terms = list[Term]


@dataclass(frozen=True)
class Kind:
    """Layers of one kind, in a row."""

    count: Floats
    """How many, [n, k]."""
    unit: UnitBytes
    group: GroupBytes
    """Parameters that are wrapped together with the layer."""
    experts: GroupBytes | None = None
    """Routed experts, which are wrapped apart."""


@dataclass(frozen=True)
class Stage:
    """What one pipeline stage is made of."""

    kinds: list[Kind]
    """In the order of the model."""
    first: UnitBytes
    last: UnitBytes
    ends: list[tuple[Count, GroupBytes]]
    """Parameters of embedding and head, and where they are."""
    residual: Bytes
    """An activation between layers, or its gradient."""
    message: Bytes
    """The same as pipeline stages exchange it."""
    saved: Bytes
    """The same as a layer saves it."""
    logits: Bytes
    """Of one micro batch."""

    def roots(self, what: str, factor: Count = 1.0) -> Terms:
        """Something of the parameters of embedding and head."""
        return [(count * factor, getattr(group, what)) for count, group in self.ends]


@dataclass(frozen=True)
class Place:
    """One layer of a stage: the kind at `index`, of which `below` layers come before."""

    index: int
    below: Count
    happens: Bools


def _less(count: Floats, number: int) -> Floats:
    result: Floats = np.maximum(count - number, 0.0)
    return result


class Sums:
    """Sums over the layers of a stage."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def places(self) -> Iterator[Place]:
        """The layers that can be at work at a peak: of each kind the last and the first one, and as the first
        layer of all has none before it and the last one none after it, those beside them."""
        for index, kind in enumerate(self.stage.kinds):
            yield Place(index, _less(kind.count, 1), kind.count > 0)
            yield Place(index, 0.0, kind.count > 1)
            yield Place(index, _less(kind.count, 2), kind.count > 2)
            yield Place(index, 1.0, kind.count > 3)

    def all(self, what: str, factor: Count = 1.0) -> Terms:
        """Something of all layers."""
        return [(kind.count * factor, value(kind, what)) for kind in self.stage.kinds]

    def below(self, place: Place, what: str, factor: Count = 1.0, own: float = 0.0) -> Terms:
        """Of the layers before one, and `own` times of itself."""
        kinds = self.stage.kinds
        terms: Terms = [(kind.count * factor, value(kind, what)) for kind in kinds[: place.index]]
        return [*terms, ((place.below + own) * factor, value(kinds[place.index], what))]

    def above(self, place: Place, what: str, factor: Count = 1.0) -> Terms:
        """Of the layers after one."""
        kinds = self.stage.kinds
        kind = kinds[place.index]
        terms: Terms = [((kind.count - place.below - 1) * factor, value(kind, what))]
        return terms + [(kind.count * factor, value(kind, what)) for kind in kinds[place.index + 1 :]]

    def next(self, place: Place, what: str, factor: Count = 1.0) -> Terms:
        """Of the layer after one, if there is one."""
        kinds = self.stage.kinds
        kind = kinds[place.index]
        same: Count = (kind.count - place.below > 1) * 1.0
        terms: Terms = [(same * factor, value(kind, what))]
        missing: Count = 1.0 - same
        for later in kinds[place.index + 1 :]:
            is_next = missing * (later.count > 0)
            terms.append((is_next * factor, value(later, what)))
            missing = missing - is_next
        return terms

    def previous(self, place: Place, what: str, factor: Count = 1.0) -> Terms:
        """Of the layer before one, if there is one."""
        kinds = self.stage.kinds
        same: Count = (np.asarray(place.below) > 0) * 1.0
        terms: Terms = [(same * factor, value(kinds[place.index], what))]
        missing: Count = 1.0 - same
        for earlier in reversed(kinds[: place.index]):
            is_previous = missing * (earlier.count > 0)
            terms.append((is_previous * factor, value(earlier, what)))
            missing = missing - is_previous
        return terms

    def is_lowest(self, place: Place) -> Count:
        """1 where no layer comes before one, else 0."""
        before = sum((kind.count for kind in self.stage.kinds[: place.index]), np.asarray(place.below))
        result: Floats = (before == 0) * 1.0
        return result

    def highest(self, what: str, factor: Count = 1.0) -> Terms:
        """Of the last layer."""
        missing: Count = 1.0
        terms: Terms = []
        for kind in reversed(self.stage.kinds):
            is_last = missing * (kind.count > 0)
            terms.append((is_last * factor, value(kind, what)))
            missing = missing - is_last
        return terms

    def lowest(self, what: str) -> Terms:
        """Of the first layer."""
        missing: Count = 1.0
        terms: Terms = []
        for kind in self.stage.kinds:
            is_first = missing * (kind.count > 0)
            terms.append((is_first, value(kind, what)))
            missing = missing - is_first
        return terms


PERSISTENT = (
    *("kept", "state", "gathered", "direct", "fresh", "accumulated", "gradients", "held", "stuck", "sums"),
)
"""What experts have besides the rest of their layer at the same time."""


def value(kind: Kind, what: str) -> Bytes:
    """Something of a unit or of its parameters; `tail` is the last buffer that a layer gathers in."""
    if what == "tail":
        return (kind.experts or kind.group).buffer
    if what in kind.unit.held:
        return kind.unit.held[what]
    own: Bytes = getattr(kind.group, what)
    if kind.experts is None:
        return own
    more: Bytes = getattr(kind.experts, what)
    return own.plus(more) if what in PERSISTENT else own


def arriving(group: GroupBytes) -> Terms:
    """What there is besides gathered parameters while they are copied to where they are used."""
    return [(1.0, group.buffer), (1.0, group.moving), (1.0, group.copying)]


def backward_pass(kind: Kind, name: str, count: Count, lowest: Count) -> Terms:
    """A backward pass of a layer; `lowest` is 1 where a stage begins with it and hands on the gradient of its
    input, else 0."""
    plain, of_lowest = value(kind, name), kind.unit.held.get(f"lowest_{name}")
    if of_lowest is None:
        return [(count, plain)]
    return [(count * (1 - lowest), plain), (count * lowest, of_lowest)]


def first_passes(kind: Kind, frees: Count, field: str = "forward") -> list[Terms]:
    """Forward of a layer that gathers, besides all that it gathers: with what it gathered from last.

    Args:
        frees: 1 for rows that free gathered parameters after their use, else 0.
    """
    group, experts = kind.group, kind.experts
    if experts is None:
        return [[(1.0, group.buffer), (1.0, value(kind, field))]]
    # Its experts are on their way while the rest computes.
    early: Terms = [(1.0, group.buffer), (-1.0, experts.gathered), (1.0, experts.buffer)]
    # As in `arrivals`.
    before: Terms = [(1.0, group.buffer)] if is_before(2, 15) else []
    return [
        [*early, (1.0, value(kind, f"{field}_before"))],
        [*before, *arriving(experts), (1.0, value(kind, f"{field}_at"))],
        [(1.0, experts.buffer), (1.0, value(kind, f"{field}_use"))],
        [(1.0, experts.buffer), (-frees, experts.gathered), (1.0, value(kind, f"{field}_freed"))],
    ]


def arrivals(sums: Sums, place: Place, after_roots: bool = True) -> list[Terms]:
    """What forward gathers for a layer, and what the parameters before it were gathered in, which PyTorch
    before 2.15 holds until it has copied these to where they are used.

    Args:
        after_roots: embedding and head are gathered just before the first layer.
    """
    group = sums.stage.kinds[place.index].group
    before = sums.previous(place, "tail")
    before += sums.stage.roots("buffer", sums.is_lowest(place)) if after_roots else []
    gathered: Terms = [(1.0, group.gathered), *arriving(group)]
    if is_before(2, 15):
        return [[*gathered, *before]]
    return [gathered, [(1.0, group.buffer), (1.0, group.cast), *before]]


def asked_for_next(sums: Sums, place: Place) -> Terms:
    """What backward of a layer begins to gather before it computes, and sends for it."""
    experts = sums.stage.kinds[place.index].experts
    if experts is None:
        return sums.previous(place, "buffer") + sums.previous(place, "cast")
    return [(1.0, experts.buffer), (1.0, experts.cast)]


def later_passes(kind: Kind, frees: Count, field: str = "forward") -> list[Terms]:
    """Forward of a layer all of whose parameters are gathered, besides these."""
    if kind.experts is None:
        return [[(1.0, value(kind, field))]]
    freed: Term = (-frees, kind.experts.gathered)
    return [[(1.0, value(kind, f"{field}_until"))], [freed, (1.0, value(kind, f"{field}_freed"))]]


def first_backward_passes(kind: Kind) -> list[Terms]:
    """The first of several backwards of a layer, in which those of its experts are done before it ends."""
    if kind.experts is None:
        return [[(1.0, value(kind, "first_backward"))]]
    after: Term = (1.0, kind.experts.accumulated)
    return [
        [(1.0, value(kind, "first_backward_before"))],
        [(1.0, value(kind, "first_backward_after")), after],
    ]
