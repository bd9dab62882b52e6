"""The flags of the batch and of the objective."""

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
        "Figure that the best layout optimises: throughput (tokens per second), step-time (seconds of a "
        "step; with --max-global-batch-size, of the largest batch that each layout can run), cost "
        "(device-hours per token), or memory (lowest peak, then throughput).",
        metavar="NAME",
    )
    prefer: str = flag(
        PREFERENCES[0],
        "Choice among the plans within the estimate's error of the fastest: the simplest one, or the "
        "fastest; or a YAML file with points of complexity.",
        metavar="simple|fastest|FILE",
        values=lambda: PREFERENCES,
    )
    headroom: str | None = flag(
        None,
        f"Memory that a plan should leave free on each device: GiB (4), or a share of its memory (5%); "
        f"{USUAL_GIB:.0f} GiB, but no more than {100 * USUAL_SHARE:.0f}%, unless given.",
        metavar="GIB|SHARE",
    )
