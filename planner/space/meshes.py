"""Divisions of the devices of a job: tensor, pipeline, context, data and expert parallelism."""

from __future__ import annotations

import math

import numpy as np

from costmodels.errors import InputError
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import CONTEXT_FORMS, Ints, distinct_numbers
from planner.inputs.choice import Choice, allowed_values
from planner.inputs.pins import Pins, WherePossible
from planner.space.rule import divisors


def meshes(world_size: int, pins: Pins) -> Ints:
    """All rows (tp, pp, cp, dp), ascending, whose product is the world size and that agree with the pins.

    Raises `InputError` when the pins leave none.
    """
    names = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel")
    choices = {name: value for name, value in pins.items() if isinstance(value, Choice)}
    pinned = {name: int(str(pins[name])) for name in names if name in pins and name not in choices}
    for name, value in pinned.items():
        if world_size % value:
            right = ", ".join(map(str, divisors(world_size)))
            raise InputError(f"{name} {value} does not divide world size {world_size}; use {right}")
    found = _factors(world_size)
    for place, name in enumerate(names):
        if name in pinned:
            found = found[found[:, place] == pinned[name]]
    if not len(found):
        product = " x ".join(f"{name} {value}" for name, value in pinned.items())
        relation = "must equal" if len(pinned) == len(names) else "must divide"
        raise InputError(f"{product} is {math.prod(pinned.values())}; it {relation} world size {world_size}")
    for place, name in enumerate(names):
        if name in choices:
            left = choices[name].of(name, distinct_numbers(found[:, place]))
            found = found[np.isin(found[:, place], left)]
    return found


def _factors(world_size: int) -> Ints:
    """All rows of four factors whose product is the world size, ascending."""
    sizes = np.array(divisors(world_size))
    first, second = np.nonzero(world_size % (sizes[:, None] * sizes) == 0)
    both = sizes[first] * sizes[second]
    pair, third = np.nonzero(world_size % (both[:, None] * sizes) == 0)
    columns = sizes[first[pair]], sizes[second[pair]], sizes[third]
    return np.stack([*columns, world_size // math.prod(columns)], axis=1)


def meshes_with_forms(world_size: int, pins: Pins) -> Ints:
    """Rows (tp, pp, cp, dp, code of the context-parallel form); with cp = 1 there is only one form."""
    pin = pins.get("context_parallel_form")
    value = pin.value if isinstance(pin, WherePossible) else pin
    # A choice is between the forms of groups: one rank has no other form than the first.
    words = pin.of("context_parallel_form", CONTEXT_FORMS) if isinstance(pin, Choice) else [str(value)]
    forms = [CONTEXT_FORMS.index(word) for word in (CONTEXT_FORMS if pin is None else words)]
    every = meshes(world_size, pins)
    grouped, code = every[:, 2] > 1, np.arange(len(CONTEXT_FORMS))
    alone = (code == 0) & (pin is None or isinstance(pin, (WherePossible, Choice)))
    row, form = np.nonzero(np.where(grouped[:, None], np.isin(code, forms), alone))
    if not len(row):
        raise InputError(
            f"context_parallel_form {pin} needs context_parallel of at least 2, which the other pins and "
            f"world size {world_size} do not leave"
        )
    return np.column_stack([every[row], form])


def with_experts(model: ModelSpec, meshes: Ints, pins: Pins) -> Ints:
    """Rows of meshes with ep and etp: ep divides the number of experts, and etp is 1 or tp."""
    spread = np.array(
        allowed_values(pins, "expert_parallel", divisors(model.experts) if model.experts else [1]),
        dtype=np.int64,
    )
    tp = meshes[:, 0] if model.experts else np.ones_like(meshes[:, 0])
    every = np.array(
        sorted(allowed_values(pins, "expert_tensor_parallel", sorted({1, *tp.tolist()}))), dtype=np.int64
    )
    possible = np.isin(every, (1,)) | (every == tp[:, None])
    if isinstance(pins.get("expert_tensor_parallel"), int):
        possible = np.ones((len(tp), len(every)), dtype=bool)
    row, ep, etp = np.nonzero(np.broadcast_to(possible[:, None], (len(tp), len(spread), len(every))))
    if not len(row):
        raise InputError(
            f"pin expert_tensor_parallel={pins['expert_tensor_parallel']}: an expert is on 1 device or on "
            "tensor_parallel of them, and the other pins leave no such degree"
        )
    return np.column_stack([meshes[row], spread[ep], every[etp]])
