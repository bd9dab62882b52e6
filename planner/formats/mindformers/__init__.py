"""MindFormers: configurations read in both of its formats, and written."""
