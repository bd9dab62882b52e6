"""Measurements of jobs on this user's machines, with the predictions for these jobs."""
