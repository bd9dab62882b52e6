"""How often a job was started."""

RESTARTS_VARIABLE = "PLANNER_RESTART_COUNT"
"""Environment variable with how often a job was started before, after failures."""
