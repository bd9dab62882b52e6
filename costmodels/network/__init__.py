"""Bandwidth and latency: links between the devices of a cluster, and the seconds of collectives on these
links."""
