"""Flags of Megatron-LM for dispatch to experts, and the engine constants that depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from costmodels.spec.engine import Engine
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from planner.formats.facts.flag_catalogue import GivenFlag

DISPATCHER, BACKEND = "--moe-token-dispatcher-type", "--moe-flex-dispatcher-backend"
OVERLAP = "--overlap-moe-expert-parallel-comm"
ROUTER = "--moe-router-dtype"
FORCED = "--moe-router-force-load-balancing"

MANY_CONNECTIONS = "32"
"""`CUDA_DEVICE_MAX_CONNECTIONS` where passes hide dispatch, so that the streams of both passes launch
concurrently (megatron/training/arguments.py warns of fewer)."""


def dispatch_flags(model: ModelSpec, layout: Layout, engine: Engine) -> dict[str, str]:
    """The flags of dispatch that a price assumes; empty without expert parallelism.

    Args:
        engine: engine with its constants for the device.
    """
    if not model.experts or layout.expert_parallel == 1:
        return {}
    flags = {}
    if engine.experts.buffers and not model.router.capacity_factor:
        # Both libraries take the router's probabilities in fp32 alone (transformer_config.py).
        flags = {DISPATCHER: "flex", BACKEND: engine.experts.buffers, ROUTER: "fp32"}
    if engine.overlap.expert_parallel and model.may_hide_dispatch and overlaps(layout):
        flags[OVERLAP] = ""
    return flags


def overlaps(layout: Layout) -> bool:
    """Return whether Megatron-Core allows passes to hide dispatch (transformer_config.py)."""
    chunks = layout.pipeline_parallel == 1 or layout.virtual_pipeline_parallel > 1
    return chunks and layout.recompute != "full" and "mlp" not in layout.recompute_modules


def dispatch_constants(given: Mapping[str, GivenFlag]) -> dict[str, Any]:
    """Constants of the engine for a job without the dispatch flags of its plans, by names such as
    `experts.dispatch_rate`."""
    found: dict[str, Any] = {}
    kind = given[DISPATCHER].text if DISPATCHER in given else ""
    if kind != "flex":
        found = {"experts.dispatches_by_node": False, "experts.dispatch_rate": 1.0, "experts.buffers": ""}
    elif BACKEND in given and given[BACKEND].text in ("deepep", "hybridep"):
        found = {"experts.buffers": given[BACKEND].text}
    if OVERLAP not in given:
        found["overlap.expert_parallel"] = 0.0
    if FORCED in given:
        found["experts.load"] = 1.0
    return found
