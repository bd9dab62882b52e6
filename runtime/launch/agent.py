"""A torchrun that leaves signals to its ranks, with torchrun's command line.

A scheduler signals every process of a job at once (Slurm at a time limit, scancel and requeue; systemd). The
original torchrun would kill ranks that still save 30 s later, and end as after a failure.
"""

from __future__ import annotations

import os
import signal

LEFT_TO_RANKS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
"""Signals that ranks handle or that end them, so their agent ignores these."""

END = getattr(signal, "SIGUSR2", signal.SIGTERM)
"""The signal with which the launcher makes an agent end its ranks."""


def leave_to_ranks() -> None:
    """Ignore signals in this process from now on, but not in its child processes."""
    for number in LEFT_TO_RANKS:
        # Signals that are ignored stay so: nohup ignores SIGHUP, for the ranks too.
        if number != END and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def main() -> None:
    """Run torchrun in this process."""
    leave_to_ranks()
    # torchrun's --signals-to-handle; the default of its flag, so that one without it has nothing to refuse.
    os.environ["PET_SIGNALS_TO_HANDLE"] = signal.Signals(END).name
    from torch.distributed.run import main as torchrun

    torchrun()


if __name__ == "__main__":
    main()
