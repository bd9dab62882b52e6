"""The course of memory over the steps of a dry run, and its extrapolation from few layers to many.

Equal layers allocate and free the same bytes, one after the other. A step with more layers has the same
changes of memory as a step with fewer, in the same order, and further changes between them. The held bytes
after a change are linear in the number of layers. So two steps, with few layers and with a few more, give the
held bytes after each matched change for any number of layers. The changes of further layers lie between those
of a first and a last layer, which are matched, so the highest moment is among the matched ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from costmodels.spec.table import Ints
from runtime.dryrun.memory_trace import CATEGORIES, Moment

BUILD = "build"
"""The label of all changes before the first step."""

SEEN = (48, 12, 4, 1)
"""Number of following changes that must be equal for two places of courses to match."""

Kind = tuple[str, str]
"""Category of bytes, and for activations the layer that saved them."""


class UnlikeError(Exception):
    """Error: the courses do not belong to the same step with more and with fewer layers."""


class Course(NamedTuple):
    """Held bytes after each change of memory, in the build and in the last step."""

    labels: npt.NDArray[np.str_]
    """The phase of each change; none for the single change that represents all before the last step."""
    changes: Ints
    """Bytes that are allocated, or freed if negative, without rounding."""
    places: Ints
    """Index in `kinds` of each change."""
    kinds: tuple[Kind, ...]
    allocated: Ints
    """Held bytes with the allocator's rounding, [kinds, changes]."""
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
    """The course of a step with more layers: `few`, plus each other course's difference from it, times the
    given number.

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
    """The matching change of `other` for each change of `few`.

    Raises:
        UnlikeError: some changes have no match.
    """
    (own, own_roles), (others, other_roles) = _tokens(few, other)
    result = np.empty(len(own), dtype=np.int64)
    is_build, are_build = few.labels == BUILD, other.labels == BUILD
    for mine, theirs in ((is_build, are_build), (~is_build, ~are_build)):
        here, there = np.flatnonzero(mine), np.flatnonzero(theirs)
        result[here] = there[_aligned(own[here], others[there], own_roles[here], other_roles[there])]
    return result


def _tokens(*courses: Course) -> list[tuple[Ints, Ints]]:
    """Numbers of the changes of each course, with and without their sizes; equal changes have the same
    number.

    A size that does not occur in all courses belongs to a tensor over all layers, and is ignored.
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

    The first and the last rounds are matched, and the surplus rounds in the middle are skipped. Changes
    without a further round may differ in size, as they are of tensors over all layers.
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
    """The number of equal entries from the start."""
    count = min(len(one), len(other))
    differs = np.flatnonzero(one[:count] != other[:count])
    return int(differs[0]) if len(differs) else count


def _gap(own: Ints, others: Ints, at: int, shift: int) -> int:
    """Number of entries of `others` that repeat the entries of `own` before `at`; 0 without a repetition."""
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
