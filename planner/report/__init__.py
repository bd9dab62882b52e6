"""A plan, and a run of it, as one page to look at."""
