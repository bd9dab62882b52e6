"""Environment variables with which a job's launcher describes the start to the ranks."""

import os

RESTARTS_VARIABLE = "PLANNER_RESTART_COUNT"
"""Environment variable with the number of earlier restarts of a job after failures."""

ELASTIC_VARIABLE = "PLANNER_ELASTIC"
"""Environment variable that is set if the number of ranks may change between starts."""

RESTARTS_VARIABLES = (
    *("TORCHELASTIC_RESTART_COUNT", RESTARTS_VARIABLE),
    *("SLURM_RESTART_COUNT", "JOBSET_RESTART_ATTEMPT"),
)
"""Variables that count the restarts by torchrun, `planner launch`, Slurm (`--requeue`) or a JobSet."""

SUMMARY_VARIABLE = "PLANNER_SUMMARY"
"""Environment variable that is set if the launcher, and not the ranks, compares the run with its plan."""


def is_restarted() -> bool:
    """Return whether this job was started again after a failure."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in RESTARTS_VARIABLES)


def is_elastic() -> bool:
    """Return whether the number of this job's ranks may change from start to start."""
    return bool(os.environ.get(ELASTIC_VARIABLE))
