"""MindFormers: configurations of both of its formats read and written."""
