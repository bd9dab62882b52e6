"""The compiler as it is after its first function, for processes to be forked from this one.

Each rank that compiles would else read tables and hash libraries for a second. Nothing here computes
gradients: those start threads, which do not survive a fork.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from importlib import import_module

import torch

with suppress(ImportError):
    # A thread that looks after progress bars would be lost in forks.
    import_module("tqdm").tqdm.monitor_interval = 0


def _first(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(values @ values, (2,)).sin()


with torch.no_grad():
    for backend in ("aot_eager", "inductor") if shutil.which("g++") else ("aot_eager",):
        torch.compile(_first, backend=backend)(torch.ones(2, 2))
        torch._dynamo.reset()
