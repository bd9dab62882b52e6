"""Members of a job: what launchers and schedulers say of the processes that were started for it."""
