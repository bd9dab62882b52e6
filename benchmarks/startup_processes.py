"""The least work of a job's start: a process that imports PyTorch and starts ranks with PyTorch.

`python -m benchmarks.startup_processes spawn 2`: each imports PyTorch for itself; with `fork` they share it.
"""

from __future__ import annotations

import multiprocessing
import sys

import torch.distributed


def rank() -> None:
    """Start like a rank: import PyTorch's package of collectives."""
    if not torch.distributed.is_available():
        raise SystemExit("this PyTorch has no torch.distributed")


def main() -> None:
    """Start the ranks and wait for them."""
    multiprocessing.set_start_method(sys.argv[1])
    ranks = [multiprocessing.Process(target=rank) for _ in range(int(sys.argv[2]))]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
        if process.exitcode:
            sys.exit(process.exitcode)


if __name__ == "__main__":
    main()
