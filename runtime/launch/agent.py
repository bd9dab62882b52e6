"""torchrun, which leaves signals to its ranks; its command line is torchrun's.

A scheduler signals every process of a job at once (Slurm at a time limit, scancel and requeue; systemd).
torchrun would then kill ranks that are still saving 30 s later, and end as after a failure.
"""

from __future__ import annotations

import os
import signal

LEFT_TO_RANKS = [getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name)]
"""Signals that ranks heed or end of, so that their agent need not."""

END = getattr(signal, "SIGUSR2", signal.SIGTERM)
"""The signal on which an agent ends its ranks, of which only the launcher knows."""


def leave_to_ranks() -> None:
    """Take no notice of signals, as of now; processes that this one starts do."""
    for number in LEFT_TO_RANKS:
        # Signals that are ignored stay so: nohup ignores SIGHUP, for the ranks too.
        if number != END and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)


def main() -> None:
    """Be torchrun."""
    leave_to_ranks()
    # torchrun's --signals-to-handle; the default of its flag, so that one without it has nothing to refuse.
    os.environ["PET_SIGNALS_TO_HANDLE"] = signal.Signals(END).name
    from torch.distributed.run import main as torchrun

    torchrun()


if __name__ == "__main__":
    main()
