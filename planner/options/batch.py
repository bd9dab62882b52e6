"""The flags of the batch, and of what the best layout is best at."""

from __future__ import annotations

from typing import ClassVar

from costmodels.dataclass import dataclass
from planner.objective import DEFAULT_OBJECTIVE
from planner.options.flags import flag


@dataclass(frozen=True)
class BatchOptions:
    """How many sequences one optimizer step takes (one of the two), and what makes one layout the best."""

    SECTIONS: ClassVar[dict[str, str]] = {"global_batch_size": "Batch", "objective": "Objective"}

    global_batch_size: int | None = flag(
        None, "Sequences of one step, exactly.", "--global-batch-size", "--gbs"
    )
    max_global_batch_size: int | None = flag(None, "Sequences of one step, at most.")
    objective: str = flag(
        DEFAULT_OBJECTIVE,
        "What the best layout is best at: throughput (tokens per second), step-time (seconds of a step; "
        "under a maximum, of the largest batch that each layout can run), cost (device-hours per token), or "
        "memory (lowest peak, then throughput).",
        metavar="NAME",
    )
