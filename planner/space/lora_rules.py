"""What layouts adapters rule out: they leave little to do for some, and others cannot run them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from costmodels.errors import InputError
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import OPTIMIZERS, SCHEDULES, Bools, LayoutTable
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
)


def check_precision(model: ModelSpec, precision: str) -> None:
    """Raise `InputError` for adapters beside weights in 8 bits."""
    if model.lora is not None and precision == "fp8":
        raise InputError("precision fp8: adapters train beside weights in 16 bits; use bf16")
