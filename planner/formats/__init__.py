"""Configurations of other software: read, judged, and written."""
