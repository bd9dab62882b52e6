"""Output of a run for people and programs, which must never stop the run."""
