"""Numbers of rows dispatched to experts, for tensors without content.

Routers are as balanced as the planner assumes (`costmodels.layers.shapes`). A rank sends its rows evenly to
the ranks of the experts. The traced rank is the fullest one: it receives `peak_load` times the mean if
experts are spread over ranks. A capacity factor below that load bounds it; one below 1 also drops rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from torch import Tensor

from costmodels import ModelSpec
from costmodels.layers.shapes import peak_load
from runtime.model import experts, routing
from runtime.parallel import expert as expert_parallel


@contextmanager
def even_load(spec: ModelSpec) -> Iterator[None]:
    """Within this context the runtime's routers choose experts evenly."""
    limit = spec.router.capacity_factor

    def row_count(chosen: Tensor, counts: Tensor) -> int:
        return int(chosen.numel() * min(1.0, limit))

    def row_counts(rows: Tensor, counts: Tensor) -> list[int]:
        return shares(rows.shape[0], counts.shape[0])

    def rows_to_move(
        chosen: Tensor, leaving: Tensor, arriving: Tensor, own: int
    ) -> tuple[list[int], list[int], list[int]]:
        ranks, pairs = leaving.shape[0], chosen.numel()
        sent = int(pairs * min(1.0, limit or 1.0))
        load = peak_load(spec, ranks)
        received = int(pairs * min(load, limit or load))
        return shares(sent, ranks), shares(received, ranks), [received] * arriving.shape[0]

    with (
        patch.object(routing, "row_count", row_count),
        patch.object(experts, "row_counts", row_counts),
        patch.object(expert_parallel, "rows_to_move", rows_to_move),
    ):
        yield


def shares(total: int, parts: int) -> list[int]:
    """`total` divided into whole numbers that differ by at most one, the larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]
