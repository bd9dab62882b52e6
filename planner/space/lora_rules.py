"""Rules for layouts of adapters: some layouts gain nothing, others cannot run adapters."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from costmodels.errors import InputError
from costmodels.layers.quantised import BLOCK, quantised_layers
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import NARROW
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import OPTIMIZERS, SCHEDULES, Bools, LayoutTable
from planner.inputs.engine import DEFAULT_ENGINE
from planner.space.rule import Rule

ELEMENT_WISE = ("adam", "sgd", "adam8bit")
"""Optimizers that update each weight by itself."""


def _with_lora(broken: Callable[[LayoutTable], Bools]) -> Callable[[ModelSpec, LayoutTable], Bools]:
    none: Bools = np.zeros((), dtype=np.bool_)
    return lambda model, d: none if model.lora is None else broken(d)


LORA_RULES: tuple[Rule, ...] = (
    Rule(
        "lora_split_backward",
        _with_lora(lambda d: d.runs(*SPLIT_BACKWARD)),
        lambda model, d: (
            f"schedule {SCHEDULES[int(d.schedule)]} fills bubbles with gradients of weights, and those of "
            "adapters are next to nothing; use schedule 1f1b or interleaved"
        ),
    ),
    Rule(
        "lora_offload_optimizer",
        _with_lora(lambda d: d.offload_optimizer),
        lambda model, d: (
            "offload_optimizer: the optimizer state of adapters is next to nothing; use "
            "offload_optimizer=false"
        ),
    ),
    Rule(
        "lora_optimizer",
        _with_lora(lambda d: ~np.isin(d.optimizer, [OPTIMIZERS.index(name) for name in ELEMENT_WISE])),
        lambda model, d: (
            f"optimizer {OPTIMIZERS[int(d.optimizer)]} is one of whole matrices, which adapters do not keep; "
            f"use {', '.join(ELEMENT_WISE)}"
        ),
    ),
    Rule(
        "quantize_base_blocks",
        lambda model, d: (d.tensor_parallel > 1) & (_shared_inputs(model) % (BLOCK * d.tensor_parallel) > 0),
        lambda model, d: (
            f"quantize-base {model.lora and model.lora.quantize_base}: tensor_parallel "
            f"{int(d.tensor_parallel)} splits matrices with {_shared_inputs(model)} inputs (their greatest "
            f"common divisor), which would split blocks of {BLOCK} weights that share a scale; use fewer"
        ),
        of_mesh=True,
    ),
)


def _shared_inputs(model: ModelSpec) -> int:
    """Greatest common divisor of the input widths of 4-bit matrices that tensor parallelism splits by inputs;
    0 without such matrices."""
    sizes = [
        layer.inputs
        for leading, layers in ((True, model.leading_layers), (False, model.routed_layers))
        for _, spec, mlp in (model.variants(leading) if layers else ())
        for layer in quantised_layers(spec, mlp)
        if layer.split == "rows"
    ]
    return math.gcd(*sizes)


def check_precision(model: ModelSpec, precision: str) -> None:
    """Raise `InputError` for adapters in a precision of 8 bits or fewer."""
    if model.lora is not None and precision in NARROW:
        raise InputError(f"precision {precision}: adapters train beside weights in 16 bits; use bf16")


def check_engine(model: ModelSpec, engine: Engine) -> None:
    """Raise `InputError` for a 4-bit base under software whose 4-bit storage is not known."""
    if model.lora is not None and model.lora.quantize_base is not None and engine.name != DEFAULT_ENGINE:
        raise InputError(
            f"quantize-base {model.lora.quantize_base}: engine {engine.name} is not priced with frozen "
            f"matrices in 4 bits; leave --quantize-base out, or use engine {DEFAULT_ENGINE}"
        )
