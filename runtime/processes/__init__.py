"""Processes that belong together: how they start, what ties them, and who else started them."""
