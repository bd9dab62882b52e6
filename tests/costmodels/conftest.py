"""Models, clusters and engines by hand, so that tests know every number that goes in."""

from __future__ import annotations

from tests.support.hand_made import a100, cluster, engine, gpt, layout, llama, mixture

__all__ = ["a100", "cluster", "engine", "gpt", "layout", "llama", "mixture"]
