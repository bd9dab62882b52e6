"""Process groups of gloo with one worker thread each.

PyTorch gives each group two threads, and both write the name of the last finished collective into one string
without a lock (`ProcessGroupGloo::runLoop`, PyTorch 2.11 to 2.14). A name of more than 15 characters, such as
that of reduce-scatter, has memory of its own, so the second thread may write to freed memory. About one job
in a hundred on a busy machine ended that way. With one thread, a group's collectives run in their order.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache
from typing import Any

import torch.distributed as dist


@cache
def use_one_worker() -> None:
    """Let every later process group of gloo have one worker thread; does nothing without gloo."""
    if not dist.is_gloo_available():
        return
    gloo: Any = dist.ProcessGroupGloo
    construct = gloo.__init__

    def construct_serial(
        self: Any,
        store: Any,
        rank: int,
        size: int,
        *given: Any,
        timeout: timedelta | None = None,
        **kept: Any,
    ) -> None:
        if given or timeout is None:
            construct(self, store, rank, size, *given, **kept)
            return
        options = gloo._Options()
        options._threads, options._timeout, options._devices = 1, timeout, _devices(gloo)
        for name, value in kept.items():
            setattr(options, name, value)
        construct(self, store, rank, size, options)

    gloo.__init__ = construct_serial


def _devices(gloo: Any) -> list[Any]:
    """The network interfaces that PyTorch would choose: those of `GLOO_SOCKET_IFNAME`, or the host's own."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    return [gloo.create_device(interface=name) for name in names] or [gloo.create_default_device()]
