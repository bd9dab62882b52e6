"""Four ranks on what they take for two nodes, looked at before a job."""

from __future__ import annotations

import torch
import torch.distributed as dist

from costmodels.errors import InputError
from runtime.parallel.ranks import Ranks
from runtime.preflight.preflight_options import PreflightOptions
from runtime.preflight.run import preflight

CPU = torch.device("cpu")


def place() -> Ranks:
    """This rank's place: two on each node."""
    rank = dist.get_rank()
    return Ranks(rank, rank % 2, dist.get_world_size(), 2)


def measure(log_dir: str) -> str | None:
    """The network table that the ranks have measured."""
    return preflight(PreflightOptions("measure"), place(), CPU, ["--seed", "1"], log_dir)


def differ() -> str:
    """The error of ranks of which the last has other flags."""
    flags = ["--seed", "3" if dist.get_rank() == 3 else "1", "--log-dir", f"of-{dist.get_rank()}"]
    try:
        preflight(PreflightOptions(), place(), CPU, flags, None)
    except InputError as error:
        return str(error)
    return "nothing"
