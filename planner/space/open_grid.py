"""The raw product of degrees of freedom, whose arrays broadcast to a grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from costmodels.spec.layout import IN_ROUNDS, V_SCHEDULES
from costmodels.spec.table import Bools, Ints, LayoutTable, code_of


class OpenGrid(LayoutTable):
    """A `LayoutTable` whose rows are not written out: one axis for each degree, arrays of length one on all
    other axes.

    The batch is computed on demand, when few layouts are left.
    """

    columns: Mapping[str, Ints | Bools]
    """Arrays by the fields of `LayoutTable` except batch and split, and by its `entries`, `layers` and
    `deepest`. `batch` has the requested sequences of one step; with `batch_is_maximum` they are a maximum.
    `fewest` is true where a step has only the microbatches that its schedule needs."""

    @classmethod
    def on(cls, columns: Mapping[str, Ints | Bools]) -> OpenGrid:
        """The grid of `columns`."""
        grid = cls.__new__(cls)
        vars(grid).update(columns, columns=columns)
        return grid

    def __getattr__(self, name: str) -> Any:
        if name != "global_batch_size":
            raise AttributeError(name)
        vars(self)[name] = self._most_sequences()
        return vars(self)[name]

    @property
    def shape(self) -> tuple[int, ...]:
        """Lengths of the axes."""
        return np.broadcast_shapes(*(array.shape for array in self.columns.values()))

    def map(self, change: Callable[[Ints | Bools], Any]) -> OpenGrid:
        """The grid whose arrays are the results of `change`."""
        return OpenGrid.on({name: change(array) for name, array in self.columns.items()})

    def _most_sequences(self) -> Ints:
        """Sequences of one step: the given number, or the most under the maximum that the schedule can run.

        Interleaved schedules need multiples of pp microbatches. If the maximum is too small for that, the
        result is a multiple of the smaller unit, or the maximum; a rule then reports it.
        """
        batch, unit = self.columns["batch"], self.micro_batch_size * self.data_parallel
        if not self.columns["batch_is_maximum"].any():
            return np.broadcast_to(batch, unit.shape)
        whole = batch // unit * unit
        free = ~np.isin(self.schedule, [code_of("schedule", kind) for kind in IN_ROUNDS])
        rounds = np.where(free, unit, unit * self.pipeline_parallel)
        fewer = np.where(whole, whole, batch)
        most = np.where(rounds <= batch, batch // rounds * rounds, fewer)
        full = unit * self.pipeline_parallel * np.where(self.runs(*V_SCHEDULES), 2, 1)
        return np.where(self.columns["fewest"] & (full <= batch), full, most)
