"""Ranks that agree, refuse and take turns."""

from __future__ import annotations

from pathlib import Path

import torch.distributed as dist

from costmodels.errors import InputError
from runtime.parallel import ranks


def agreement(folder: str) -> dict[str, object]:
    """Results of rank 0 and the other ranks when one of them refuses, and the order of turns."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    found: dict[str, object] = {"own": ranks.run_together(lambda: rank)}
    found["first"] = ranks.run_on_first_rank(lambda: f"from {rank}")
    for refusing in (0, 1):
        try:
            ranks.run_together(lambda refusing=refusing: _refuse_on(refusing))  # type: ignore[misc]
        except InputError as error:
            found[f"refused by {refusing}"] = str(error)
    try:
        ranks.run_on_first_rank(lambda: _refuse_on(0))
    except InputError as error:
        found["refused by first"] = str(error)
    place = ranks.Ranks(rank, rank % 2, size, 2)
    found["turn"] = ranks.run_in_turns(place, lambda: _join_queue(folder, rank))
    return found


def _refuse_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise InputError(f"rank {rank} refuses")


def _join_queue(folder: str, rank: int) -> int:
    """Leave a file, and count those that were there before."""
    before = len(list(Path(folder).iterdir()))
    (Path(folder) / str(rank)).touch()
    return before
