"""A plan's memory on one GPU: `... -m benchmarks.memory_gpu_case PLAN RANK compiled|eager measured|traced`.

Prints one JSON object with the peak bytes that the allocator allocated and reserved, or with the allocated
bytes by a dry run.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from planner import Plan
from runtime.dryrun.real_rank import real_rank
from runtime.dryrun.run import short_layout, trace
from runtime.settings.training_options import TrainingOptions

STEPS = 3
"""Steps of the real run; the peak is that of the last one."""


def measure(plan: Plan, pipeline_rank: int, compiled: bool) -> dict[str, int]:
    """Peak bytes that the allocator allocated and reserved in the last of a few steps."""
    layout = short_layout(plan.layout, pipeline_rank)
    rank = pipeline_rank * (layout.world_size // layout.pipeline_parallel)
    options = TrainingOptions(compile=compiled, no_compile=not compiled)
    with real_rank(plan.model, layout, rank, options, torch.device("cuda", 0)) as trainer:
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


def main() -> None:
    """Measure or trace what the command line names."""
    file, number, form, what = sys.argv[1:]
    plan, rank, compiled = Plan.load(file), int(number), form == "compiled"
    if what == "traced":
        found = {
            "allocated": trace(plan.model, plan.layout, pipeline_rank=rank, compiled=compiled).peak.total
        }
    else:
        found = measure(plan, rank, compiled)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
