"""Measurements of jobs on this user's machines, beside the predictions for them."""
