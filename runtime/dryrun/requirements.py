"""Choices and checks before a dry run loads PyTorch: the traced ranks, and the needed packages."""

from __future__ import annotations

from importlib.util import find_spec

from costmodels import Layout
from costmodels.errors import InputError

NEEDS_TORCHAO = (("precision", "fp8"), ("optimizer", "adam8bit"))
"""Fields of a layout with values for which the runtime needs torchao."""


def first_rank(layout: Layout, pipeline_rank: int) -> int:
    """The rank that represents a pipeline rank: no other rank of it has larger shards."""
    return pipeline_rank * (layout.world_size // layout.pipeline_parallel)


def ranks_to_trace(layout: Layout, stage: int | None, rank: int | None) -> list[int]:
    """Ranks to trace: the named one, the first one of the named stage, or the first one of each stage."""
    stages = layout.pipeline_parallel
    if stage is not None and rank is not None:
        raise InputError("--stage and --rank exclude each other; give one")
    if rank is not None:
        if not 0 <= rank < layout.world_size:
            raise InputError(f"--rank {rank}: the plan has ranks 0 to {layout.world_size - 1}")
        return [rank]
    if stage is not None:
        if not 0 <= stage < stages:
            raise InputError(f"--stage {stage}: the plan has pipeline ranks 0 to {stages - 1}")
        return [first_rank(layout, stage)]
    return [first_rank(layout, number) for number in range(stages)]


def check_installed(layout: Layout) -> None:
    """Raise `InputError` where a package that the step needs is not installed."""
    check_torch("planner dryrun runs the real training step", layout.precision, layout.optimizer)


def check_torch(purpose: str, precision: str, optimizer: str = "adam") -> None:
    """Raise `InputError`, with the purpose, where a package that a command needs is not installed."""
    if find_spec("torch") is None:
        raise InputError(f"{purpose}: install torch, on a laptop its CPU build")
    for field, value in {"precision": precision, "optimizer": optimizer}.items():
        if (field, value) in NEEDS_TORCHAO and find_spec("torchao") is None:
            raise InputError(
                f"{field} {value}: torchao is not installed; `pip install torchao`, or pin another {field}"
            )
