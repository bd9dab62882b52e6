"""Ranks that start again agree on a part of their store that no earlier start has written to."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore

from runtime.parallel.meeting import fresh_store
from tests.support.jobs import TIMEOUT_S

PATIENCE = timedelta(seconds=TIMEOUT_S)


def names(store: HashStore, ranks: list[int], world_size: int) -> dict[int, str]:
    """The text that each rank finds under `who` after the first rank has written it there."""
    found: dict[int, str] = {}

    def meet(rank: int) -> None:
        part = fresh_store(store, rank, world_size, PATIENCE)
        if rank == 0:
            part.set("who", f"start {len(starts)}")
        found[rank] = part.get("who").decode()

    starts.append(world_size)
    threads = [threading.Thread(target=meet, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


starts: list[int] = []


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0]])
def test_each_start_has_a_part_of_its_own(order: list[int]) -> None:
    starts.clear()
    store = HashStore()
    for world_size in (3, 3, 2, 3):
        ranks = [rank for rank in order if rank < world_size]
        told = names(store, ranks, world_size)
        assert told == dict.fromkeys(range(world_size), f"start {len(starts)}")


def test_a_rank_that_never_comes_is_no_reason_to_wait_forever() -> None:
    with pytest.raises(RuntimeError, match="only 1 of 2 ranks have come"):
        fresh_store(HashStore(), 0, 2, timedelta(seconds=0))
