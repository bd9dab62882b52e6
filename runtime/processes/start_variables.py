"""What the launcher of a job tells its ranks of how they are started."""

RESTARTS_VARIABLE = "PLANNER_RESTART_COUNT"
"""Environment variable with how often a job was started before, after failures."""

ELASTIC_VARIABLE = "PLANNER_ELASTIC"
"""Environment variable of ranks whose number may change from start to start."""

SUMMARY_VARIABLE = "PLANNER_SUMMARY"
"""Environment variable that is set where not the ranks but their launcher compares the run with its plan."""
