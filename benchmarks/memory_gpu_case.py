"""A plan's real memory on one GPU: `python -m benchmarks.memory_gpu_case PLAN PIPELINE_RANK compiled|eager`.

Prints one JSON object with the bytes that the allocator handed out and reserved at most.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from planner import Plan
from runtime.dryrun.run import fake_process_group, isolated_pipeline, short_layout
from runtime.settings.options import TrainingOptions
from runtime.train import stages
from runtime.train.trainer import Trainer

STEPS = 3
"""Steps of the real run; the peak is that of the last one."""


def measure(plan: Plan, pipeline_rank: int, compiled: bool) -> dict[str, int]:
    """Bytes that the allocator says it has handed out and reserved at most, in the last of a few steps."""
    layout = short_layout(plan.layout, pipeline_rank)
    rank = pipeline_rank * (layout.world_size // layout.pipeline_parallel)
    options = TrainingOptions(compile=compiled, no_compile=not compiled)
    with ExitStack() as stack:
        stack.enter_context(fake_process_group(layout.world_size, rank))
        stack.enter_context(isolated_pipeline())
        # Drawing weights on the host takes minutes, and their values do not matter.
        stack.enter_context(patch.object(stages, "initialise", _zeros))
        trainer = Trainer(plan.model, layout, options, torch.device("cuda", 0))
        samples = np.zeros((len(trainer.rows), plan.model.seq + 1), dtype=np.int64)
        for _ in range(STEPS):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            trainer.train_step(samples)
        torch.cuda.synchronize()
        return {
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": torch.cuda.max_memory_reserved(),
        }


def _zeros(model: Any, *_: Any) -> None:
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()


def main() -> None:
    """Measure what the command line names."""
    plan, rank, form = sys.argv[1:]
    print(json.dumps(measure(Plan.load(plan), int(rank), form == "compiled")))


if __name__ == "__main__":
    main()
