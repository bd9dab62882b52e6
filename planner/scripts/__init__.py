"""Files that start a plan on a cluster: files for schedulers and launchers, and rank tables."""
