"""The errors of questions without a legal layout, or without one that fits, and the changes that help."""

from __future__ import annotations

import math
from dataclasses import replace

from costmodels.errors import InputError, NoLayoutFits
from costmodels.spec.record import GIB
from planner.inputs.batch import Batch
from planner.inputs.pin_notation import pins_text
from planner.inputs.pins import Pins
from planner.problem import Problem
from planner.proposals.search import proposals
from planner.ranking.result import SearchResult

NEAREST = 5
"""Most plans in the error of a question where no plan fits."""

REACH = 64
"""Neighbouring world sizes and batches that are tried in each direction."""


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
    """The error of a problem whose every legal layout is too big, with the changes that help."""
    problem, closest = result.problem, result.closest()[0]
    cluster = problem.cluster
    need, limit = closest.estimate.peak_memory_bytes / GIB, cluster.memory_bytes / GIB
    line = (
        f"no layout of {problem.model.name} fits {cluster.world_size} x {cluster.device.name} with "
        f"{limit:.1f} GiB: the closest, {closest.layout.describe()}, needs {need:.1f} GiB and lacks "
        f"{need - limit:.1f} GiB"
    )
    found = proposals(result)
    changes = [str(one) for one in found]
    if all(one.kind != "device" for one in found):
        changes.append(f"on devices of at least {math.ceil(10 * need) / 10:g} GiB")
    return NoLayoutFits(f"{line}; it fits {', or '.join(changes)}", closest, found, result.closest(NEAREST))


def _is_legal(problem: Problem) -> bool:
    # Whatever is legal with experts spread over devices is so without.
    alone: Pins = {"expert_parallel": 1, "expert_tensor_parallel": 1}
    try:
        return len(replace(problem, pins=alone | problem.pins).space().table) > 0
    except InputError:
        return False


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
