"""Joint actions of a job's ranks outside of training steps: start, agreement, end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

import runtime
from costmodels.errors import InputError
from runtime.parallel.accelerator import collective_backend, device_module, is_accelerator
from runtime.parallel.gloo import use_one_worker
from runtime.parallel.meeting import agent_store

Result = TypeVar("Result")

AGENT_CHECK_S = 0.2
"""Seconds between checks that torchrun is still running."""


@dataclass(frozen=True)
class Ranks:
    """This process's place in the job, as torchrun's environment states it."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> Ranks:
        """Read `RANK`, `LOCAL_RANK`, `WORLD_SIZE` and `LOCAL_WORLD_SIZE`; a lone process without them."""
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
        values = []
        for name, default in zip(names, ("0", "0", "1", ""), strict=True):
            text = os.environ.get(name, default) or os.environ.get("WORLD_SIZE", "1")
            if not text.isdigit():
                raise InputError(f"{name}={text}: must be a whole number, as torchrun sets it")
            values.append(int(text))
        ranks = cls(*values)
        for name, number, size, of in (
            ("RANK", ranks.rank, "WORLD_SIZE", ranks.world_size),
            ("LOCAL_RANK", ranks.local_rank, "LOCAL_WORLD_SIZE", ranks.local_world_size),
        ):
            # The others would wait for one that never comes.
            if number >= of:
                raise InputError(f"{name}={number} with {size}={of}: must be below it, as torchrun sets it")
        return ranks


def is_alone() -> bool:
    """Return whether no launcher declared this process to be one of several ranks."""
    return "RANK" not in os.environ and "WORLD_SIZE" not in os.environ


def end_with_agent() -> None:
    """End this rank when its torchrun ends for any reason. torchrun puts each rank into a separate session,
    and does not end ranks when it is killed.

    They would then continue to write into the folders of the next job.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    # Noted before the imports: an agent that was killed during these must not leave its ranks either.
    agent = runtime.PARENT

    def watch() -> None:
        while os.getppid() == agent:
            time.sleep(AGENT_CHECK_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def start_process_group(ranks: Ranks, device: torch.device, timeout_minutes: float) -> None:
    """Initialise the default process group with the backend of the device: NCCL on GPUs, gloo on CPUs."""
    timeout = timedelta(minutes=timeout_minutes)
    use_one_worker()
    if is_accelerator(device):
        device_module(device).set_device(device)
    backend = collective_backend(device)
    if "MASTER_ADDR" in os.environ:
        place = {"rank": ranks.rank, "world_size": ranks.world_size}
        store = agent_store(**place, timeout=timeout)
        kept: dict[str, Any] = {} if store is None else {"store": store, **place}
        dist.init_process_group(backend, timeout=timeout, **kept)
        return
    if ranks.world_size != 1:
        raise InputError(f"WORLD_SIZE={ranks.world_size} without MASTER_ADDR: start the ranks with torchrun")
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timeout)


def wait_for_ranks(device: torch.device) -> None:
    """Wait until all ranks are here.

    PyTorch needs the GPU as an argument. Binding a GPU to the process group instead would open the
    communicators of all groups at the start, not only of those in use.
    """
    dist.barrier(device_ids=[device.index] if is_accelerator(device) else None)


def leave_process_group(device: torch.device) -> None:
    """Wait for the other ranks before this process ends.

    NCCL requires that its communicators are destroyed. gloo's are left to the end of the process, as
    destroying them has aborted ranks that had finished.
    """
    wait_for_ranks(device)
    if is_accelerator(device):
        dist.destroy_process_group()


def is_lost_connection(error: RuntimeError) -> bool:
    """True if a collective failed because another rank went away; gloo's errors have no type of their own."""
    texts = ("closed by peer", "reset by peer", "Broken pipe", "Timed out waiting", "Connection closed")
    return isinstance(error, dist.DistError) or any(text in str(error) for text in texts)


def run_together(work: Callable[[], Result]) -> Result:
    """Call `work` on every rank; if it raises `InputError` on one rank, all raise that error."""
    result, error = _attempt(work)
    errors: list[InputError | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for found in errors:
        if found is not None:
            raise found
    return result  # type: ignore[return-value]


def run_on_first_rank(work: Callable[[], Result]) -> Result:
    """Call `work` on rank 0 and give its result, or its `InputError`, to all ranks."""
    answer: list[Any] = [_attempt(work) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(answer)
    result, error = answer[0]
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def run_in_turns(ranks: Ranks, work: Callable[[], Result]) -> Result:
    """Call `work` on rank 0, then on the first rank of each node, then on the others.

    So later ranks find the earlier ranks' cache files, on a shared file system or on their node.
    """
    turn = 0 if ranks.rank == 0 else 1 if ranks.local_rank == 0 else 2
    results = []
    for now in range(3):
        results.append(run_together(lambda mine=turn == now: work() if mine else None))  # type: ignore[misc]
    return results[turn]  # type: ignore[return-value]


def _attempt(work: Callable[[], Result]) -> tuple[Result | None, InputError | None]:
    try:
        return work(), None
    except InputError as error:
        return None, error
