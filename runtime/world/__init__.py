"""Who else trains: what launchers and schedulers say of the processes that were started for one job."""
