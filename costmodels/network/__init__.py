"""Bandwidth and latency: what joins the devices of a cluster, and the seconds of collectives on it."""
