"""One training step of a layout: stages, passes, update, balance of experts."""
