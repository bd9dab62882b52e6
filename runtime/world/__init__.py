"""Members of a job, from the variables of launchers and schedulers."""
