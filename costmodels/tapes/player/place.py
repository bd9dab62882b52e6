"""The units of a stage with the groups of their parameters, and who fetches what from host memory."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import field

from costmodels.dataclass import dataclass
from costmodels.tapes.player.heap import Span
from costmodels.tapes.player.sharding import Group
from costmodels.tapes.player.units import Played
from costmodels.tapes.tape import EXPERTS, FETCHES, LAYER


@dataclass
class Place:
    """One unit of a stage."""

    kind: str
    played: Played
    again: Played | None = None
    """Of a layer that is computed again together with the one after it: what it does then, and backward."""
    group: Group | None = None
    """Of a layer; embedding and head belong to the root."""
    inner: dict[str, Group] = field(default_factory=dict)
    """Other groups of its parameters, by name, those first whose forward ends first."""
    copies: Span | None = None
    """What comes back from host memory for backward, of a layer that sends its activations there."""
    sent_before: Place | None = None
    """The layer before it that does."""
    numbers: dict[str, list[int]] = field(default_factory=dict)
    """Parameters of each group, in its order."""
    is_fetched: bool = False
    """Another layer has begun its copies."""

    def places_of(self, group: Group, parameters: Collection[int]) -> list[int] | None:
        """Where parameters of this unit are in a group, in its order; None where it is another unit's."""
        name = LAYER if group is self.group else EXPERTS if group is self.experts else ""
        if not name:
            return None
        return [place for place, number in enumerate(self.numbers[name]) if number in parameters]

    def late(self) -> set[int]:
        """Parameters that have new gradients where the others of their groups have none."""
        groups = {LAYER: self.group, **self.inner}
        return {
            self.numbers[name][place]
            for name, group in groups.items()
            if group is not None
            for place in group.late
        }

    @property
    def experts(self) -> Group | None:
        """The routed experts of a layer."""
        return self.inner.get(EXPERTS)


def link_offloading(places: Sequence[Place]) -> None:
    """Let layers know those before them whose copies from host memory they begin."""
    last: Place | None = None
    for place in places:
        place.sent_before = last
        split = place.played.split
        backward = place.played.backward("makes") if split is None else split.inputs
        if FETCHES in backward:
            copies = backward[backward.index(FETCHES) + 1]
            assert not isinstance(copies, str)
            place.copies = copies
            last = place
