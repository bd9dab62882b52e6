"""The legal layouts of a grid as a table that computes columns, or some rows, on demand.

A large space has millions of legal layouts. A search needs few columns and prices only a part, so writing out
all rows would take longer than the pricing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from costmodels.spec.layout import Layout
from costmodels.spec.table import ARRAY_FIELDS, Bools, Ints, LayoutTable

Places = npt.NDArray[np.int32]
"""Places along one axis of the grid, [n]."""


class GridTable(LayoutTable):
    """A `LayoutTable` whose columns come from arrays that broadcast to a grid."""

    @classmethod
    def on(
        cls,
        columns: Mapping[str, npt.NDArray[Any]],
        places: tuple[Places, ...],
        splits: tuple[tuple[int, ...], ...],
        formats: Mapping[str, Any],
    ) -> GridTable:
        """The layouts at given places of a grid.

        Args:
            columns: arrays by field; each has all axes of the grid, with the grid's length or length one.
            places: places of each row, along each axis of the grid.
            formats: values that all rows share (`costmodels.spec.table.FORMATS`).
        """
        table = cls.__new__(cls)
        vars(table).update(
            _columns=columns,
            _places=places,
            splits=splits,
            **formats,
        )
        return table

    def __len__(self) -> int:
        return super().__len__() if self._is_written else len(self._places[0])

    @property
    def _is_written(self) -> bool:
        """True if all columns are computed, as in a table made by `dataclasses.replace`."""
        return "_places" not in vars(self)

    def __getattr__(self, name: str) -> Any:
        # Columns alone are missing until they are asked for.
        if name not in ARRAY_FIELDS or self._is_written:
            raise AttributeError(name)
        column = _written(vars(self)["_columns"][name], vars(self)["_places"], {})
        vars(self)[name] = column
        return column

    def layout(self, row: int) -> Layout:
        """One row as a `Layout`."""
        return super().layout(row) if self._is_written else self.take(np.array([row])).layout(0)

    def take(self, rows: Ints | Bools | slice) -> LayoutTable:
        """The rows that an index or mask array selects, or those of a slice."""
        if self._is_written:
            return super().take(rows)
        some = tuple(place[rows] for place in self._places)
        known: dict[tuple[int, ...], Any] = {}
        columns: dict[str, Any] = {
            name: vars(self)[name][rows] if name in vars(self) else _written(self._columns[name], some, known)
            for name in ARRAY_FIELDS
        }
        return LayoutTable(
            **columns,
            splits=self.splits,
            **self.formats,
        )

    def ends(self, name: str) -> tuple[Any, Any]:
        """The least and the largest value of one column of the grid."""
        if name in vars(self):
            return super().ends(name)
        array = self._columns[name]
        return array.min(), array.max()

    def column(self, name: str, rows: Ints) -> Any:
        """One column of the rows that an index selects; other columns are not computed."""
        if name in vars(self):
            return vars(self)[name][rows]
        array = self._columns[name]
        if array.size == 1:
            return np.broadcast_to(array.ravel(), rows.shape)
        axes = zip(self._places, array.shape, strict=True)
        return _written(array, tuple(place[rows] if size > 1 else place for place, size in axes), {})


def places_of(legal: Bools) -> tuple[Places, ...]:
    """The places at which a mask holds: along each axis, in the order of its elements."""
    rest: Any = np.flatnonzero(legal)
    if legal.size <= np.iinfo(np.int32).max:
        rest = rest.astype(np.int32)
    found: list[Any] = []
    for size in reversed(legal.shape[1:]):
        if size == 1:
            found.append(np.zeros(len(rest), dtype=np.int32))
            continue
        whole = rest // size
        # NumPy takes ten times as long for remainders as for quotients.
        rest -= whole * size
        found.append(rest.astype(np.int32, copy=False))
        rest = whole
    return (rest.astype(np.int32, copy=False), *reversed(found))


def _written(
    array: npt.NDArray[Any], places: tuple[Places, ...], known: dict[tuple[int, ...], Any]
) -> npt.NDArray[Any]:
    """The values of a grid array at each place; `known` caches the flat places by shape."""
    if array.size == 1:
        # An axis of length one holds the same value wherever a row lies on it.
        return np.broadcast_to(array.ravel(), places[0].shape)
    if array.shape not in known:
        known[array.shape] = flat_places(array.shape, places)
    found: npt.NDArray[Any] = array.ravel().take(known[array.shape])
    return found


def flat_places(shape: tuple[int, ...], places: tuple[Places, ...]) -> Places:
    """Flat indices into a grid array whose axes have the grid's length or length one."""
    wide = math.prod(shape) > np.iinfo(np.int32).max
    several = [(axis, size) for axis, size in zip(places, shape, strict=True) if size != 1]
    if not several:
        return np.broadcast_to(np.zeros(1, dtype=np.int32), places[0].shape)
    flat: Places = several[0][0].astype(np.int64 if wide else np.int32)
    for axis, size in several[1:]:
        flat *= size
        flat += axis
    return flat
