"""Files that start a plan on a cluster: of schedulers, of launchers, and tables of ranks."""
