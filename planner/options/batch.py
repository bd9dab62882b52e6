"""The flags of the batch, and of what the best layout is best at."""

from __future__ import annotations

from typing import ClassVar

from costmodels.dataclass import dataclass
from planner.objective import DEFAULT_OBJECTIVE
from planner.options.flags import flag
from planner.preference import PREFERENCES, USUAL_GIB, USUAL_SHARE


@dataclass(frozen=True)
class BatchOptions:
    """The sequences of one optimizer step, exactly or at most, and the objective of the ranking."""

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
    prefer: str = flag(
        PREFERENCES[0],
        "Which plan is first of those within the estimate's error of the fastest: the simplest, or the "
        "fastest all the same; or a YAML file of points that says what is simple.",
        metavar="simple|fastest|FILE",
        values=lambda: PREFERENCES,
    )
    headroom: str | None = flag(
        None,
        f"Memory that a plan should leave free on each device: GiB (4), or a share of it (5%); unless given "
        f"{USUAL_GIB:.0f} GiB, and no more than {100 * USUAL_SHARE:.0f}%.",
        metavar="GIB|SHARE",
    )
