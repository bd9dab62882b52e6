"""The planner's questions: which layouts, which is best, and what does this one cost."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from costmodels.errors import InputError
from costmodels.pricing import estimate as estimate_layout
from costmodels.spec.engine import Engine
from costmodels.spec.estimate import Estimate
from costmodels.spec.hardware import Device
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from planner import advice
from planner.inputs.batch import resolve_batch
from planner.inputs.cluster import NetworkKeywords, resolve_cluster
from planner.inputs.engine import check_runs_on, resolve_engine, resolve_precision
from planner.inputs.keywords import names_unknown
from planner.inputs.model import resolve_model
from planner.inputs.pins import PinInput, parse_pins
from planner.objective import DEFAULT_OBJECTIVE, parse_objective
from planner.plan import Plan
from planner.problem import Problem
from planner.ranking.exact_memory import known_bytes
from planner.ranking.ranking import rank
from planner.ranking.result import SearchResult
from planner.space.engine_rules import check_pins
from planner.space.rule import Rule
from planner.space.rules import first_violation

if TYPE_CHECKING:
    from typing_extensions import Unpack


@names_unknown(NetworkKeywords.__annotations__)
def search(
    model: ModelSpec | str | Path,
    *,
    world_size: int,
    local_world_size: int | None = None,
    device: Device | str | None = None,
    global_batch_size: int | None = None,
    max_global_batch_size: int | None = None,
    engine: Engine | str | None = None,
    precision: str | None = None,
    pin: PinInput = None,
    forbid: PinInput = None,
    device_memory_gib: float | None = None,
    memory_margin_gib: float | None = None,
    objective: str = DEFAULT_OBJECTIVE,
    rules: Sequence[Rule] = (),
    **network: Unpack[NetworkKeywords],
) -> SearchResult:
    """Price every legal layout of `model` on `world_size` devices and rank them.

    `model` is a `ModelSpec`, a catalogue name, or the path of a YAML file or of a Hugging Face
    config.json; `device` a `Device` or a catalogue name (`a100-80g` when not given), or nodes of two kinds
    (`a100-80g:4,v100-32g:4`, of which the better order is found). The batch counts
    sequences a step: exactly `global_batch_size`, or for each layout the most that it can run up to
    `max_global_batch_size`. `pin` fixes degrees of freedom (`["tp=8"]` or `{"tensor_parallel": 8}`) or
    narrows them (`["tp=2..8", "pp=2,4"]`), `forbid` names values that no layout may have.
    `memory_margin_gib` is what to set aside on each device instead of the estimated driver context,
    communicators and memory that the allocator cannot use (0 for tensors alone). `objective` is what the
    first plan is best at (`planner.objective.Objective`). `network` says what joins the devices where it
    differs from the catalogue (`NetworkKeywords`), such as `inter_node_gbps=200` or
    `network_table="nccl.csv"`.

    Raises `InputError` for wrong input and when no layout is legal; a result without feasible layouts
    is returned all the same.
    """
    pins = parse_pins(pin, forbid)
    wanted = _agreed("precision", precision, pins.pop("precision", None))
    if "global_batch_size" in pins:
        pinned = int(str(pins.pop("global_batch_size")))
        if max_global_batch_size is not None and pinned > max_global_batch_size:
            raise InputError(
                f"pin global_batch_size={pinned} exceeds max_global_batch_size {max_global_batch_size}"
            )
        global_batch_size = int(str(_agreed("global_batch_size", global_batch_size, pinned)))
        max_global_batch_size = None
    cluster = resolve_cluster(
        device, world_size, local_world_size, device_memory_gib, memory_margin_gib, **network
    )
    resolved_engine = resolve_engine(engine, cluster.device)
    check_runs_on(resolved_engine, cluster)
    problem = Problem(
        model=resolve_model(model),
        cluster=cluster,
        engine=resolved_engine,
        batch=resolve_batch(global_batch_size, max_global_batch_size),
        precision=resolve_precision(None if wanted is None else str(wanted), cluster.device, resolved_engine),
        pins=pins,
        objective=parse_objective(objective),
        rules=tuple(rules),
    )
    check_pins(resolved_engine, pins)
    started = time.perf_counter()
    space = problem.space()
    if not len(space.table):
        raise advice.no_legal_layout(problem)
    if cluster.parts:
        from planner.ranking.mixed_nodes import rank_orders  # Few clusters have nodes of two kinds.

        return rank_orders(problem, space, started)
    return rank(problem, space, started, offload=True)


@names_unknown(NetworkKeywords.__annotations__)
def suggest(
    model: ModelSpec | str | Path,
    *,
    world_size: int,
    local_world_size: int | None = None,
    device: Device | str | None = None,
    global_batch_size: int | None = None,
    max_global_batch_size: int | None = None,
    engine: Engine | str | None = None,
    precision: str | None = None,
    pin: PinInput = None,
    forbid: PinInput = None,
    device_memory_gib: float | None = None,
    memory_margin_gib: float | None = None,
    objective: str = DEFAULT_OBJECTIVE,
    rules: Sequence[Rule] = (),
    **network: Unpack[NetworkKeywords],
) -> Plan:
    """The best plan of `search`, which takes the same arguments.

    Raises `NoLayoutFits` when every legal layout needs more memory than a device has; its line holds
    the closest plan, what that lacks in GiB, and the cheapest change that would make it fit.
    """
    result = search(
        model,
        world_size=world_size,
        local_world_size=local_world_size,
        device=device,
        global_batch_size=global_batch_size,
        max_global_batch_size=max_global_batch_size,
        engine=engine,
        precision=precision,
        pin=pin,
        forbid=forbid,
        device_memory_gib=device_memory_gib,
        memory_margin_gib=memory_margin_gib,
        objective=objective,
        rules=rules,
        **network,
    )
    if result.best is None:
        raise advice.no_layout_fits(result)
    return result.best


@names_unknown(NetworkKeywords.__annotations__)
def evaluate(
    layout: Layout,
    *,
    model: ModelSpec | str | Path,
    world_size: int | None = None,
    local_world_size: int | None = None,
    device: Device | str | None = None,
    engine: Engine | str | None = None,
    device_memory_gib: float | None = None,
    memory_margin_gib: float | None = None,
    **network: Unpack[NetworkKeywords],
) -> Estimate:
    """What one layout costs, whether or not the search would emit it.

    `world_size` is the layout's own when not given; `memory_margin_gib` and `network` as in `search`. Raises
    `InputError` for a layout that breaks a rule, with the rule's numbers and what would be right. Whether it
    fits is for the caller to ask.
    """
    spec = resolve_model(model)
    if world_size is not None and world_size != layout.world_size:
        raise InputError(
            f"layout {layout.describe()} occupies {layout.world_size} devices, not world_size {world_size}"
        )
    cluster = resolve_cluster(
        device, layout.world_size, local_world_size, device_memory_gib, memory_margin_gib, **network
    )
    resolved_engine = resolve_engine(engine, cluster.device)
    resolve_precision(layout.precision, cluster.device, resolved_engine)
    message = first_violation(spec, layout)
    if message is not None:
        raise InputError(message)
    where = spec, cluster, resolved_engine, layout
    return estimate_layout(*where, known_bytes(*where))


def _agreed(name: str, given: object, pinned: object) -> object:
    if given is not None and pinned is not None and given != pinned:
        raise InputError(f"{name} {given} and pin {name}={pinned} contradict each other; give one")
    return pinned if given is None else given
