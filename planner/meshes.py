"""How the devices of a job are shared out: tensor, pipeline, context, data and expert parallelism."""

from __future__ import annotations

import math

import numpy as np

from costmodels.errors import InputError
from costmodels.model_spec import ModelSpec
from costmodels.table import CONTEXT_FORMS, Ints
from planner.choice import Choice, chosen
from planner.pins import Pins, WherePossible
from planner.rule import divisors


def meshes(world_size: int, pins: Pins) -> list[tuple[int, int, int, int]]:
    """All (tp, pp, cp, dp) whose product is the world size and that agree with the pins.

    Raises `InputError` when the pins leave none.
    """
    names = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel")
    choices = {name: value for name, value in pins.items() if isinstance(value, Choice)}
    pinned = {name: int(str(pins[name])) for name in names if name in pins and name not in choices}
    for name, value in pinned.items():
        if world_size % value:
            right = ", ".join(map(str, divisors(world_size)))
            raise InputError(f"{name} {value} does not divide world size {world_size}; use {right}")
    every = [
        (tp, pp, cp, world_size // (tp * pp * cp))
        for tp in divisors(world_size)
        for pp in divisors(world_size // tp)
        for cp in divisors(world_size // (tp * pp))
    ]
    wanted = tuple(pinned.get(name) for name in names)
    found = [mesh for mesh in every if all(w in (None, v) for w, v in zip(wanted, mesh, strict=True))]
    if not found:
        product = " x ".join(f"{name} {value}" for name, value in pinned.items())
        relation = "must equal" if len(pinned) == len(names) else "must divide"
        raise InputError(f"{product} is {math.prod(pinned.values())}; it {relation} world size {world_size}")
    for place, name in enumerate(names):
        if name in choices:
            left = choices[name].of(name, sorted({mesh[place] for mesh in found}))
            found = [mesh for mesh in found if mesh[place] in left]
    return found


def meshes_with_forms(world_size: int, pins: Pins) -> Ints:
    """Rows (tp, pp, cp, dp, code of the context-parallel form); only one form has a group of one."""
    pin = pins.get("context_parallel_form")
    value = pin.value if isinstance(pin, WherePossible) else pin
    # A choice is between the forms of groups: one rank has no other form than the first.
    words = pin.of("context_parallel_form", CONTEXT_FORMS) if isinstance(pin, Choice) else [str(value)]
    forms = [CONTEXT_FORMS.index(word) for word in (CONTEXT_FORMS if pin is None else words)]
    alone = [0] if pin is None or isinstance(pin, (WherePossible, Choice)) else []
    rows = [(*mesh, form) for mesh in meshes(world_size, pins) for form in (forms if mesh[2] > 1 else alone)]
    if not rows:
        raise InputError(
            f"context_parallel_form {pin} needs context_parallel of at least 2, which the other pins and "
            f"world size {world_size} do not leave"
        )
    return np.asarray(rows, dtype=np.int64)


def with_experts(model: ModelSpec, meshes: Ints, pins: Pins) -> Ints:
    """Rows of meshes with ep and etp: all divisors of the experts, and one device or tp of them an expert."""
    spread = chosen(pins, "expert_parallel", divisors(model.experts) if model.experts else [1])
    tp = meshes[:, 0] if model.experts else np.ones_like(meshes[:, 0])
    every = set(chosen(pins, "expert_tensor_parallel", sorted({1, *tp.tolist()})))
    pinned = isinstance(pins.get("expert_tensor_parallel"), int)
    shared = [sorted(every if pinned else every & {1, int(size)}) for size in tp]
    rows = [
        (*mesh, ep, etp) for mesh, sizes in zip(meshes, shared, strict=True) for ep in spread for etp in sizes
    ]
    if not rows:
        raise InputError(
            f"pin expert_tensor_parallel={pins['expert_tensor_parallel']}: an expert is on 1 device or on "
            "tensor_parallel of them, and the other pins leave no such degree"
        )
    return np.asarray(rows, dtype=np.int64)
