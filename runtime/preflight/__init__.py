"""A check of a job's ranks before training: their hardware, software and speed."""
