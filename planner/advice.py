"""What to change when nothing is legal or nothing fits: the same search with one input changed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from costmodels.catalogue import device_names, load_device
from costmodels.errors import InputError, NoLayoutFits
from costmodels.spec.record import GIB
from planner.inputs.batch import Batch
from planner.inputs.engine import DEFAULT_ENGINE
from planner.inputs.pin_notation import pins_text, pins_without_one
from planner.inputs.pins import Pins
from planner.problem import Problem
from planner.ranking.ranking import rank
from planner.ranking.result import SearchResult

REACH = 64
"""Neighbouring world sizes and batches that are tried, to either side."""

MOST_TIMES = 64
"""How many times the devices are tried before advice gives up on more of them."""


def no_legal_layout(problem: Problem) -> InputError:
    """The error of a problem whose every layout breaks a rule, with the nearest inputs that work."""
    world = problem.cluster.world_size
    why = problem.obstacle()
    line = f"no layout of {problem.model.name} is legal on {world} devices with {problem.batch}"
    if problem.pins:
        line += f" and {pins_text(problem.pins)}"
    hints = [
        f"{name} that work: {', '.join(map(str, sizes))}"
        for name, sizes in (("world sizes", _world_sizes(problem)), ("batch sizes", _batch_sizes(problem)))
        if sizes
    ]
    return InputError("; ".join([f"{line}: {why}", *hints]))


def no_layout_fits(result: SearchResult) -> NoLayoutFits:
    """The error of a problem whose every legal layout is too big, with the cheapest change that helps."""
    problem, closest = result.problem, result.closest()[0]
    cluster = problem.cluster
    need, limit = closest.estimate.peak_memory_bytes / GIB, cluster.memory_bytes / GIB
    line = (
        f"no layout of {problem.model.name} fits {cluster.world_size} x {cluster.device.name} with "
        f"{limit:.1f} GiB: the closest, {closest.layout.describe()}, needs {need:.1f} GiB and lacks "
        f"{need - limit:.1f} GiB"
    )
    changes = [
        *_without_a_pin(problem),
        *_base_in_4_bits(problem),
        *_more_devices(problem),
        *_bigger_device(problem, need),
    ]
    return NoLayoutFits(f"{line}; it fits {', or '.join(changes)}" if changes else f"{line} on each device")


def _is_legal(problem: Problem) -> bool:
    # Whatever is legal with experts spread over devices is so without.
    alone: Pins = {"expert_parallel": 1, "expert_tensor_parallel": 1}
    try:
        return len(replace(problem, pins=alone | problem.pins).space().table) > 0
    except InputError:
        return False


def _fits(problem: Problem, offload: bool = False) -> bool:
    try:
        space = problem.space()
    except InputError:
        return False
    return len(space.table) > 0 and rank(problem, space, 0.0, offload).feasible > 0


def with_world_size(problem: Problem, world_size: int) -> Problem:
    """The problem on `world_size` devices, joined as those that it has."""
    cluster = problem.cluster
    # One node that is not full gains devices before a second one is needed.
    local = cluster.devices_per_node
    if cluster.world_size == local:
        full = min(world_size, max(local, cluster.device.devices_per_node))
        local = full if world_size % full == 0 else local
    return replace(
        problem,
        # What joins the devices stays as it is.
        cluster=cluster.model_copy(update={"world_size": world_size, "devices_per_node": local}),
    )


def _world_sizes(problem: Problem) -> list[int]:
    """The nearest smaller and larger world sizes, of whole nodes, that have a legal layout."""
    world, local = problem.cluster.world_size, problem.cluster.devices_per_node
    if world <= local:
        local = max(local, problem.cluster.device.devices_per_node)
    below = [size for size in range(world - 1, 0, -1) if size < local or size % local == 0]
    above = [size for size in range(world + 1, world + local * REACH) if size < local or size % local == 0]
    found = []
    for side in (below, above):
        for size in side[:REACH]:
            # Legality does not depend on nodes.
            cluster = problem.cluster.model_copy(update={"world_size": size})
            if _is_legal(replace(problem, cluster=cluster)):
                found.append(size)
                break
    return found


def _batch_sizes(problem: Problem) -> list[int]:
    """The nearest batches (for a maximum: the smallest above it) that have a legal layout."""
    size, maximum = problem.batch.size, problem.batch.maximum
    sides = [range(size + 1, size + REACH + 1)]
    if not maximum:
        sides.insert(0, range(size - 1, max(0, size - REACH - 1), -1))
    found = []
    for side in sides:
        for near in side:
            if _is_legal(replace(problem, batch=Batch(near, maximum))):
                found.append(near)
                break
    return found


def _without_a_pin(problem: Problem) -> list[str]:
    """Pins of which one alone is in the way; where none is, all of them if they are together."""
    found = [
        without
        for without, others in pins_without_one(problem.pins)
        if _fits(replace(problem, pins=others), offload=True)
    ]
    if not found and len(problem.pins) > 1 and _fits(replace(problem, pins={}), offload=True):
        found.append("without the pins")
    return found


def _base_in_4_bits(problem: Problem) -> Iterator[str]:
    lora = problem.model.lora
    if lora is None or lora.quantize_base is not None or problem.engine.name != DEFAULT_ENGINE:
        return
    packed = lora.model_copy(update={"quantize_base": "nf4"})
    if _fits(replace(problem, model=problem.model.model_copy(update={"lora": packed}))):
        yield "with a base in 4 bits (--quantize-base nf4)"


def _more_devices(problem: Problem) -> Iterator[str]:
    if problem.cluster.device.kind == "cpu":
        return  # More ranks share the same memory.
    times = 2
    while times <= MOST_TIMES:
        world = times * problem.cluster.world_size
        if _fits(with_world_size(problem, world)):
            yield f"on {world} of them"
            return
        times *= 2


def _bigger_device(problem: Problem, need_gib: float) -> Iterator[str]:
    kind = problem.cluster.device.kind
    devices = [load_device(name) for name in device_names() if name != "cpu"]
    bigger = [
        device
        for device in devices
        if device.kind == kind
        and device.memory_bytes > problem.cluster.memory_bytes
        and problem.precision in device.peak_flops
    ]
    for device in sorted(bigger, key=lambda device: (device.memory_bytes, device.name)):
        cluster = problem.cluster.model_copy(update={"device": device, "memory_bytes": device.memory_bytes})
        if _fits(replace(problem, cluster=cluster)):
            yield f"on {problem.cluster.world_size} x {device.name} ({device.memory_bytes / GIB:.0f} GiB)"
            return
    yield f"on devices of at least {math.ceil(10 * need_gib) / 10:g} GiB"
