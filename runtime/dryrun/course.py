"""The course of memory over the steps of a dry run, and that of many layers told from two of few.

Layers that are alike allocate and free the same, one after the other. A step of more layers passes through
the changes of memory of a step of fewer, in the same order, and through those of further layers between them.
What is held after a change is linear in the number of layers. So two steps, of few layers and of a few more,
whose changes are matched, tell what is held after each matched change in a step of any number of layers. The
changes of further layers lie between those of a first and of a last layer, which are matched: the highest
moment is among these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from costmodels.spec.table import Ints
from runtime.dryrun.memory_trace import CATEGORIES, Moment

BUILD = "build"
"""The label of all that comes before the first step."""

SEEN = (48, 12, 4, 1)
"""Changes that must be alike for two places of courses to be taken for the same, as many as there are."""

Kind = tuple[str, str]
"""Category of a byte, and the layer that saved it where it is an activation."""


class UnlikeError(Exception):
    """Courses do not belong to one step with more and with fewer layers."""


class Course(NamedTuple):
    """Bytes that are held after each change of memory: of the build, and of the last step."""

    labels: npt.NDArray[np.str_]
    """The phase of each change; none for the one that stands for all before the last step."""
    changes: Ints
    """Bytes that come, or go where negative, without rounding."""
    places: Ints
    """The number of the kind of each change."""
    kinds: tuple[Kind, ...]
    allocated: Ints
    """Held bytes as the allocator rounds them, [kinds, changes]."""
    live: Ints
    """Held bytes without rounding, [kinds, changes]."""
    host_bytes: int
    """Most bytes that were in host memory at once."""
    operations: int

    def moments(self) -> dict[str, Moment]:
        """The highest moment of each phase."""
        totals = self.allocated.sum(axis=0)
        found = {}
        for label in dict.fromkeys(self.labels.tolist()):
            if not label:
                continue
            places = np.flatnonzero(self.labels == label)
            # A phase begins with what the one before it has left.
            places = np.union1d(places, np.maximum(places - 1, 0))
            found[label] = self._moment(label, int(places[totals[places].argmax()]))
        return found

    def _moment(self, label: str, at: int) -> Moment:
        sizes, bytes_live = dict.fromkeys(CATEGORIES, 0), dict.fromkeys(CATEGORIES, 0)
        layers: dict[str, int] = {}
        for (category, layer), held, exact in zip(
            self.kinds, self.allocated[:, at].tolist(), self.live[:, at].tolist(), strict=True
        ):
            sizes[category] += held
            bytes_live[category] += exact
            if category == "activations" and held:
                layers[layer] = layers.get(layer, 0) + held
        return Moment(label, sizes, bytes_live, layers)


def of_more_layers(few: Course, others: Sequence[tuple[Course, int]]) -> Course:
    """The course of a step that has as often as each number says what another course has beyond `few`.

    Raises:
        UnlikeError: the changes of two courses cannot be matched.
    """
    kinds = tuple(
        dict.fromkeys(kind for course in (few, *(one for one, _ in others)) for kind in course.kinds)
    )
    allocated, live = _held(few, kinds)
    more = [allocated.copy(), live.copy()]
    host = few.host_bytes
    for other, times in others:
        at = matched(few, other)
        for held, base, found in zip(more, (allocated, live), _held(other, kinds), strict=True):
            held += times * (found[:, at] - base)
        host += times * (other.host_bytes - few.host_bytes)
    return few._replace(
        kinds=kinds,
        places=_renumbered(few, kinds),
        allocated=more[0],
        live=more[1],
        host_bytes=host,
        operations=few.operations + sum(other.operations for other, _ in others),
    )


def _held(course: Course, kinds: Sequence[Kind]) -> tuple[Ints, Ints]:
    """The held bytes of a course, [kinds, changes]."""
    rows = [kinds.index(kind) for kind in course.kinds]
    held = []
    for own in (course.allocated, course.live):
        wide = np.zeros((len(kinds), own.shape[1]), dtype=np.int64)
        wide[rows] = own
        held.append(wide)
    return held[0], held[1]


def _renumbered(course: Course, kinds: Sequence[Kind]) -> Ints:
    return np.array([kinds.index(kind) for kind in course.kinds], dtype=np.int64)[course.places]


def matched(few: Course, other: Course) -> Ints:
    """The change of `other` that is the same as each one of `few`.

    Raises:
        UnlikeError: there is none for some of them.
    """
    (own, own_roles), (others, other_roles) = _tokens(few, other)
    result = np.empty(len(own), dtype=np.int64)
    is_build, are_build = few.labels == BUILD, other.labels == BUILD
    for mine, theirs in ((is_build, are_build), (~is_build, ~are_build)):
        here, there = np.flatnonzero(mine), np.flatnonzero(theirs)
        result[here] = there[_aligned(own[here], others[there], own_roles[here], other_roles[there])]
    return result


def _tokens(*courses: Course) -> list[tuple[Ints, Ints]]:
    """Numbers of the changes of each course, with sizes and without; alike changes have the same number.

    A size that not all courses have belongs to a tensor over all layers, and is left out of the number.
    """
    numbers: dict[tuple[object, ...], int] = {}
    roles: dict[tuple[object, ...], int] = {}
    every = [_roles_and_sizes(course) for course in courses]
    common = set.intersection(*map(set, every))
    found = []
    for keys in every:
        own = [numbers.setdefault(key if key in common else key[:1], len(numbers)) for key in keys]
        whatever = [roles.setdefault(key[:1], len(roles)) for key in keys]
        found.append((np.array(own, dtype=np.int64), np.array(whatever, dtype=np.int64)))
    return found


def _roles_and_sizes(course: Course) -> list[tuple[object, ...]]:
    sizes = course.changes.tolist()
    kinds = (course.kinds[place] for place in course.places.tolist())
    return [
        ((label, kind, size > 0), abs(size))
        for label, kind, size in zip(course.labels.tolist(), kinds, sizes, strict=True)
    ]


def _aligned(own: Ints, others: Ints, own_roles: Ints, other_roles: Ints) -> Ints:
    """Places of the numbers `own` among `others`, which have more rounds of the repeated part.

    Rounds are left out in the middle of those that both have: the first and the last ones are matched.
    Changes may have unlike sizes where there is no further round: they are of tensors over all layers.
    """
    result = np.arange(len(own), dtype=np.int64)
    at = shift = start = 0
    while True:
        at += _common(own[at:], others[at + shift :])
        if at == len(own) and at + shift == len(others):
            result[start:] += shift
            return result
        gap = _gap(own, others, at, shift)
        if gap:
            overlap = _common(own[start:at][::-1], others[: at + shift + gap][::-1])
            middle = at - overlap // 2
            result[start:middle] += shift
            start, shift = middle, shift + gap
        elif at < len(own) and at + shift < len(others) and own_roles[at] == other_roles[at + shift]:
            at += 1
        else:
            raise UnlikeError(f"change {at} of {len(own)} is not among {len(others)}")


def _common(one: Ints, other: Ints) -> int:
    """The number of equal entries from the start on."""
    count = min(len(one), len(other))
    differs = np.flatnonzero(one[:count] != other[:count])
    return int(differs[0]) if len(differs) else count


def _gap(own: Ints, others: Ints, at: int, shift: int) -> int:
    """Numbers of `others` that are further rounds of what `own` has before `at`; 0 for no round."""
    here = at + shift
    choices = [len(others) - here]
    if at < len(own):
        choices = np.flatnonzero(others[here:] == own[at]).tolist()
    rounds = [
        gap
        for gap in choices
        if 0 < gap <= at and np.array_equal(others[here : here + gap], own[at - gap : at])
    ]
    # Few where what follows has more rounds as well.
    for seen in SEEN:
        after = own[at : at + seen]
        for gap in rounds:
            if np.array_equal(others[here + gap : here + gap + len(after)], after):
                return gap
    return 0
