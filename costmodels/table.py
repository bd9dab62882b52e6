"""`LayoutTable`: many layouts as a structure of arrays, one row a layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt

from costmodels.hardware import Precision
from costmodels.layout import Layout, Recompute, Schedule

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

RECOMPUTE_KINDS: tuple[Recompute, ...] = get_args(Recompute)
"""Recompute kinds in the order of their codes: 0 none, 1 selective, 2 full."""


@dataclass(frozen=True)
class LayoutTable:
    """Layouts that share a precision. All arrays have shape [n].

    `split` points into `splits`, the distinct `layers_per_stage` of the rows: thousands of layouts
    share a few of them.
    """

    tensor_parallel: Ints
    sequence_parallel: Bools
    pipeline_parallel: Ints
    virtual_pipeline_parallel: Ints
    context_parallel: Ints
    expert_parallel: Ints
    expert_tensor_parallel: Ints
    data_parallel: Ints
    zero_stage: Ints
    micro_batch_size: Ints
    global_batch_size: Ints
    recompute: Ints
    """Codes: indices of `RECOMPUTE_KINDS`."""
    split: Ints
    splits: tuple[tuple[int, ...], ...]
    precision: Precision

    def __len__(self) -> int:
        return len(self.tensor_parallel)

    @property
    def micro_batches(self) -> Ints:
        """Micro batches of each data-parallel rank in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)

    def take(self, rows: Ints | Bools) -> LayoutTable:
        """The rows that an index or mask array selects."""
        return LayoutTable(
            **{name: getattr(self, name)[rows] for name in ARRAY_FIELDS},
            splits=self.splits,
            precision=self.precision,
        )

    def layout(self, row: int) -> Layout:
        """One row as a `Layout`."""
        scalars = {name: getattr(self, name)[row].item() for name in ARRAY_FIELDS}
        split = self.splits[scalars.pop("split")]
        scalars["recompute"] = RECOMPUTE_KINDS[scalars["recompute"]]
        schedule: Schedule = "interleaved" if scalars["virtual_pipeline_parallel"] > 1 else "1f1b"
        return Layout(**scalars, schedule=schedule, layers_per_stage=split, precision=self.precision)

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> LayoutTable:
        """A table of given layouts, which must share their precision."""
        precisions = {layout.precision for layout in layouts}
        if len(precisions) != 1:
            raise ValueError(f"a table holds one precision, not {sorted(precisions)}")
        splits = tuple(dict.fromkeys(layout.layers_per_stage for layout in layouts))
        codes = {kind: code for code, kind in enumerate(RECOMPUTE_KINDS)}
        columns: dict[str, list[int]] = {
            name: [int(getattr(layout, name)) for layout in layouts]
            for name in ARRAY_FIELDS
            if name not in ("recompute", "split")
        }
        columns["recompute"] = [codes[layout.recompute] for layout in layouts]
        columns["split"] = [splits.index(layout.layers_per_stage) for layout in layouts]
        arrays = {name: np.asarray(column, dtype=np.int64) for name, column in columns.items()}
        return cls(
            **{**arrays, "sequence_parallel": arrays["sequence_parallel"].astype(bool)},
            splits=splits,
            precision=precisions.pop(),
        )


ARRAY_FIELDS = tuple(name for name in LayoutTable.__dataclass_fields__ if name not in ("splits", "precision"))
"""Names of the per-row arrays."""
