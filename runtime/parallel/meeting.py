"""The rendezvous store of ranks that torchrun starts again.

PyTorch's agents keep one store for all starts of their ranks, so a new start finds addresses of ranks that
have ended. An agent's count of starts does not distinguish them, as an agent that joined later has a smaller
count.
"""

from __future__ import annotations

import os
import time
import uuid
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

FORKED = "forked"
"""Name of jobs whose agent has a new store for each start (`runtime.launch.fork_server`)."""

LOOK_PERIOD_S = 0.02


def agent_store(rank: int, world_size: int, timeout: timedelta) -> Store | None:
    """A part of this agent's store that no earlier start used; None where ranks have their own store."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return None
    if os.environ.get("TORCHELASTIC_RUN_ID") == FORKED:
        return None
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    return fresh_store(TCPStore(host, port, world_size, False, timeout), rank, world_size, timeout)


def fresh_store(store: Any, rank: int, world_size: int, timeout: timedelta) -> Store:
    """A part of `store` with a new name, on which all running ranks agree.

    Each other rank publishes a random word. The first rank answers each word with the name. Answers to words
    of ended ranks are never read. Raises `RuntimeError` where the other ranks do not arrive.
    """
    word = uuid.uuid4().hex
    store.set_timeout(timeout)
    if rank:
        store.set(_hello(world_size, rank), word)
        name = store.get(f"welcome/{word}").decode()
        store.add(f"here/{name}", 1)
        return PrefixStore(name, store)
    answered: dict[int, bytes] = {}
    end = time.monotonic() + timeout.total_seconds()
    while store.add(f"here/{word}", 0) < world_size - 1:
        for other in range(1, world_size):
            key = _hello(world_size, other)
            if store.check([key]) and (said := store.get(key)) != answered.get(other):
                store.set(f"welcome/{said.decode()}", word)
                answered[other] = said
        if time.monotonic() > end:
            raise RuntimeError(f"only {store.add(f'here/{word}', 0) + 1} of {world_size} ranks have come")
        time.sleep(LOOK_PERIOD_S)
    return PrefixStore(word, store)


def _hello(world_size: int, rank: int) -> str:
    return f"hello/{world_size}/{rank}"
