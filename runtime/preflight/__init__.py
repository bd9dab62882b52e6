"""A look at the ranks of a job before its expensive part: what they run on, and how fast that is."""
