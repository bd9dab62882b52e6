"""Rules for passes in CUDA graphs: nothing may wait for the host, or for ranks in other passes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from costmodels.errors import InputError
from costmodels.layers.shapes import compiles_experts
from costmodels.spec.hardware import Device, Precision
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import RING, Bools, LayoutTable
from planner.inputs.pins import Pins
from planner.space.rule import Rule

Broken = Callable[[ModelSpec, LayoutTable], Bools]


GROUPED = ("bf16", "fp8", "mxfp8")
"""Precisions in which the GEMMs of all experts are one kernel that reads their numbers of rows on the
device."""


def check_graphs(model: ModelSpec, device: Device, precision: Precision, pins: Pins) -> None:
    """Raise `InputError` where pins ask for CUDA graphs that no layout of a job has."""
    if pins.get("cuda_graphs") is not True:
        return
    if device.kind != "gpu":
        raise InputError(f"pin cuda_graphs: {device.name} is no GPU and has none; leave it out")
    if model.experts and precision not in GROUPED:
        raise InputError(
            f"pin cuda_graphs: in {precision} the host asks how many rows experts get; use "
            f"{' or '.join(GROUPED)}"
        )


def _with_graphs(broken: Broken) -> Broken:
    none: Bools = np.zeros((), dtype=np.bool_)
    # Hardly any search asks for them.
    return lambda model, d: d.cuda_graphs & broken(model, d) if d.cuda_graphs.any() else none


GRAPH_RULES: tuple[Rule, ...] = (
    Rule(
        "cuda_graphs_pipeline",
        _with_graphs(lambda model, d: d.pipeline_parallel > 1),
        lambda model, d: (
            f"cuda_graphs: passes of pipeline_parallel {d.pipeline_parallel} wait for other stages; "
            "use pipeline_parallel 1"
        ),
        of_mesh=True,
    ),
    Rule(
        "cuda_graphs_zero",
        _with_graphs(lambda model, d: d.zero_stage > 0),
        lambda model, d: (
            f"cuda_graphs: FSDP2's hooks of zero_stage {d.zero_stage} ask the host in every layer; use "
            "zero_stage 0"
        ),
    ),
    Rule(
        "cuda_graphs_offload",
        _with_graphs(lambda model, d: d.offload_activations | d.offload_optimizer),
        lambda model, d: (
            "cuda_graphs: tensors in host memory are moved by the host; use offload_activations=false and "
            "offload_optimizer=false"
        ),
    ),
    Rule(
        "cuda_graphs_ring",
        _with_graphs(lambda model, d: (d.context_parallel > 1) & (d.context_parallel_form == RING)),
        lambda model, d: (
            "cuda_graphs: a ring sends keys and values by messages that the host waits for; use "
            "context_parallel_form all_gather or all_to_all"
        ),
        of_mesh=True,
    ),
    Rule(
        "cuda_graphs_experts",
        _with_graphs(
            lambda model, d: (model.experts > 0) & ((d.expert_parallel > 1) | (not compiles_experts(model)))
        ),
        lambda model, d: (
            f"cuda_graphs: the host asks how many rows experts get (expert_parallel {d.expert_parallel}); "
            "use expert_parallel 1, and a model whose experts have neither biases nor a limited capacity"
        ),
        of_mesh=True,
    ),
)
