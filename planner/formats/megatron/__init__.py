"""Megatron-LM and MindSpeed: scripts read and judged, and flags written."""
