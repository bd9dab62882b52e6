"""The flag that gives a layout in the notation of printed plans."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from costmodels.dataclass import dataclass
from planner.inputs.layout_notation import micro_batches_in
from planner.inputs.written_layout import whole_layout_pins, written_batch
from planner.options.batch import BatchOptions
from planner.options.flags import flag
from planner.options.parallel import ParallelOptions


@dataclass(frozen=True)
class GivenLayout:
    """The flag of a layout in the notation of printed plans."""

    SECTIONS: ClassVar[dict[str, str]] = {"layout": "Pins"}

    layout: str | None = flag(
        None,
        'Plan this layout, as plans are printed: "tp=4+sp pp=8 dp=2 mbs=1 x 8". A layout with microbatches '
        "fixes all degrees, except zero and recompute if it does not name them, and the batch unless a flag "
        "gives one. A layout without microbatches leaves the degrees that it does not name to the search.",
        metavar="LAYOUT",
    )

    def pinned(self, parallel: ParallelOptions) -> ParallelOptions:
        """The flags of degrees, with the degrees of the given layout added."""
        if self.layout is None:
            return parallel
        is_whole = micro_batches_in(self.layout) is not None
        left_out = whole_layout_pins(self.layout)
        return replace(parallel, pin=[*parallel.pin, self.layout, *(left_out if is_whole else ())])

    def of_its_batch(self, batch: BatchOptions, world_size: int | str) -> BatchOptions:
        """The flags of the batch, with the global batch of a layout that fully determines it."""
        if self.layout is None or batch.global_batch_size or batch.max_global_batch_size:
            return batch
        size = written_batch(self.layout, world_size if isinstance(world_size, int) else None)
        return batch if size is None else replace(batch, global_batch_size=size)
