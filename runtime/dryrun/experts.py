"""Rows that travel to experts and arrive there, when tensors have no content.

Routers are assumed to be as balanced as the planner assumes (`costmodels.layers.shapes`). A rank sends its
rows evenly to the ranks of the experts. The rank that is traced is the fullest one: it receives `peak_load`
times the mean where experts are spread over ranks. A capacity factor below one drops the rows beyond it, and
one below that load bounds it.
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
    """Let the runtime's routers choose evenly, while this lasts."""
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
    """`total` in whole numbers that differ by one at most, the larger ones first."""
    return [total // parts + (part < total % parts) for part in range(parts)]
