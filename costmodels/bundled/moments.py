"""Moments of a step that can be its highest, as sums of what is alive then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from costmodels.bundled.replay import KINDS
from costmodels.spec.table import Bools, Floats, Ints


@dataclass(frozen=True, eq=False)
class Bytes:
    """Something that can be alive, for the rows of a table."""

    composition: Floats
    """[kinds, shapes]."""
    totals: Floats
    """[shapes]."""
    shapes: Ints
    """Which of the shapes each row of a table has."""
    rows: Ints | None = None
    """Those of these that are meant, all unless given: much is taken of many rows and never looked at."""

    @cached_property
    def shape(self) -> Ints:
        """Which of the shapes each row has, [n]."""
        return self.shapes if self.rows is None else self.shapes[self.rows]

    @cached_property
    def total(self) -> Floats:
        """[n]."""
        return self.totals[self.shape]

    @cached_property
    def is_empty(self) -> bool:
        """No row has any of it."""
        return not self.totals.any() or not self.total.any()

    @classmethod
    def of_shapes(cls, composition: Floats, shape: Ints) -> Bytes:
        """From compositions of a few shapes."""
        return cls(composition, composition.sum(axis=0), shape)

    @classmethod
    def of_kind(cls, kind: int, size: Floats) -> Bytes:
        """Bytes [n] of one kind."""
        composition = np.zeros((len(KINDS), len(size)))
        composition[kind] = size
        return cls(composition, size, np.arange(len(size)))

    def take(self, rows: Ints) -> Bytes:
        """Of some rows."""
        return Bytes(
            self.composition, self.totals, self.shapes, rows if self.rows is None else self.rows[rows]
        )

    def plus(self, other: Bytes) -> Bytes:
        """Both."""
        return Bytes(
            self.composition[:, self.shape] + other.composition[:, other.shape],
            self.total + other.total,
            np.arange(len(self.shape)),
        )


Count = npt.NDArray[Any] | float
"""How many times something is alive, of a shape that broadcasts to [n, k]."""

Term = tuple[Count, Bytes]
"""How many times something is alive, and what it is."""


@dataclass
class Moment:
    """What is alive at one moment."""

    label: str
    """forward, backward, reduce or optimizer."""
    terms: list[Term]
    happens: Bools | None = None
    """[n, k]: where the moment exists; everywhere when not given."""

    @property
    def can_happen(self) -> bool:
        """Some row and rank has it."""
        return self.happens is None or bool(self.happens.any())

    def total(self, shape: tuple[int, int]) -> Floats:
        """Bytes, [n, k]; nothing where it does not happen."""
        # What is alike on all ranks of a row is added up before the rest.
        alike, result = np.zeros((shape[0], 1)), None
        for count, held in self.terms:
            if held.is_empty:
                continue
            size = held.total[:, None]
            if not isinstance(count, np.ndarray) or count.ndim == 0 or count.shape[1] == 1:
                alike += count * size
            elif result is None:
                result = count * size
            else:
                result += count * size
        whole: Floats = np.broadcast_to(alike, shape) if result is None else result + alike
        return whole if self.happens is None else np.where(self.happens, whole, 0.0)

    def composition(self, rows: Ints, places: Ints) -> Floats:
        """Bytes by kind of some entries of [n, k]: [kinds, entries]."""
        result = np.zeros((len(KINDS), len(rows)))
        for count, held in self.terms:
            if isinstance(count, np.ndarray) and count.ndim:
                one_row, one_place = len(count) == 1, count.shape[1] == 1
                count = count[rows * (not one_row), places * (not one_place)]
            result += count * held.composition[:, held.shape[rows]]
        return result


@dataclass
class Peak:
    """The highest of many moments."""

    shape: tuple[int, int]
    moments: list[Moment] = field(default_factory=list)

    def add(self, label: str, terms: Iterable[Term], happens: Bools | None = None) -> None:
        """One more moment."""
        self.moments.append(Moment(label, [*terms], happens))

    def peak(self) -> Floats:
        """The highest total of all moments, [n, k]."""
        best = np.zeros(self.shape)
        for moment in self.moments:
            if moment.can_happen:
                np.maximum(best, moment.total(self.shape), out=best)
        return best

    def highest(self, label: str | None = None) -> tuple[Floats, Floats]:
        """The highest total [n, k] of a label's moments, or of all, and its composition [kinds, n, k]."""
        chosen = [moment for moment in self.moments if label in (None, moment.label) and moment.can_happen]
        best, which = np.zeros(self.shape), np.full(self.shape, -1)
        for number, moment in enumerate(chosen):
            total = moment.total(self.shape)
            which[total > best] = number
            np.maximum(best, total, out=best)
        composition = np.zeros((len(KINDS), *self.shape))
        for number, moment in enumerate(chosen):
            rows, places = np.nonzero(which == number)
            if len(rows):
                composition[:, rows, places] = moment.composition(rows, places)
        return best, composition
