"""The planner's functions: rank the layouts of a job, find the best one, price a given one."""

from __future__ import annotations

import reprlib
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
from planner.inputs.cluster import ClusterKeywords, resolve_cluster
from planner.inputs.engine import resolve_engine, resolve_precision
from planner.inputs.keywords import keywords
from planner.inputs.model import resolve_model
from planner.inputs.written_layout import layout_of_fields, written_fields
from planner.plan import Plan
from planner.problem import Problem, SearchKeywords, resolve_problem
from planner.ranking.answer import answer
from planner.ranking.result import SearchResult
from planner.space.rules import first_violation

if TYPE_CHECKING:
    from typing_extensions import Unpack


@keywords(SearchKeywords)
def search(model: ModelSpec | str | Path, world_size: int, **job: Unpack[SearchKeywords]) -> SearchResult:
    """Rank the legal layouts of `model` on `world_size` devices by their prices.

    `model` is a `ModelSpec`, a catalogue name, or the path of a YAML file or of a Hugging Face config.json;
    `device` a `Device` or a catalogue name (`a100-80g` when not given), or nodes of two kinds
    (`a100-80g:4,v100-32g:4`, of which the better order is found). The batch counts sequences a step: exactly
    `global_batch_size`, or for each layout the most that it can run up to `max_global_batch_size`. `pin`
    fixes degrees of freedom (`["tp=8"]` or `{"tensor_parallel": 8}`) or narrows them (`["tp=2..8",
    "pp=2,4"]`), `forbid` names values that no layout may have. `memory_margin_gib` is set aside on each
    device instead of the estimated driver context, communicators and memory that the allocator cannot use (0
    for tensors alone). `objective` is the figure by which plans are ranked (`planner.objective.Objective`).
    The other arguments describe links between devices that differ from the catalogue
    (`planner.inputs.cluster.NetworkKeywords`), such as `inter_node_gbps=200` or `network_table="nccl.csv"`.

    Raises `InputError` for wrong input and when no layout is legal; a result without feasible layouts
    is returned all the same.

    Examples:
        >>> import planner
        >>> job = dict(device="h100", global_batch_size=64, pin=["tp=2"])
        >>> result = planner.search("llama3-8b", world_size=8, **job)
        >>> {plan.layout.tensor_parallel for plan in result.plans(5)}
        {2}
        >>> result.legal == result.feasible + result.rejected["device_memory"]
        True
    """
    return search_problem(resolve_problem(model, world_size, **job))


def search_problem(problem: Problem) -> SearchResult:
    """`search` for a problem whose inputs are resolved."""
    result = answer(problem)
    if result is None:
        raise advice.no_legal_layout(problem)
    return result


@keywords(SearchKeywords)
def suggest(model: ModelSpec | str | Path, world_size: int, **job: Unpack[SearchKeywords]) -> Plan:
    """The best plan that `search` finds for the same arguments.

    Raises `NoLayoutFits` when every legal layout needs more memory than a device has; its message holds the
    closest plan, the GiB that it lacks, and the cheapest change that makes it fit.

    Examples:
        >>> import planner
        >>> plan = planner.suggest("llama2-70b", world_size=64, device="a100-80g", max_global_batch_size=16)
        >>> plan.fits, plan.layout.world_size, plan.layout.global_batch_size
        (True, 64, 16)
        >>> planner.suggest("llama2-70b", world_size=1, device="a100-80g", max_global_batch_size=1)
        Traceback (most recent call last):
        ...
        costmodels.errors.NoLayoutFits: no layout of llama2-70b fits ...
    """
    result = search(model, world_size=world_size, **job)
    if result.best is None:
        raise advice.no_layout_fits(result)
    return result.best


@keywords(ClusterKeywords)
def evaluate(
    layout: Layout | str,
    *,
    model: ModelSpec | str | Path,
    world_size: int | None = None,
    local_world_size: int | None = None,
    device: Device | str | None = None,
    engine: Engine | str | None = None,
    global_batch_size: int | None = None,
    precision: str | None = None,
    **cluster: Unpack[ClusterKeywords],
) -> Estimate:
    """Seconds of a step and bytes of each pipeline rank of one layout, whether or not it is searched.

    The layout may be a text such as `"tp=4+sp pp=2 mbs=1 x 4"`: `world_size` decides the data parallelism
    that it does not name, `global_batch_size` the number of microbatches, and `precision` is the device's
    usual one unless given. `world_size` is the layout's own when not given; the others are as in `search`.
    Raises `InputError` for a layout that breaks a rule, with the rule's numbers and a legal value. A layout
    that does not fit is priced all the same.

    Examples:
        >>> import planner
        >>> plan = planner.suggest("llama3-8b", world_size=8, device="h100", global_batch_size=64)
        >>> planner.evaluate(plan.layout, model="llama3-8b", device="h100") == plan.estimate
        True
        >>> job = dict(model="llama3-8b", device="h100", world_size=8, global_batch_size=64)
        >>> planner.evaluate(plan.layout.describe(), **job) == plan.estimate
        True
    """
    spec = resolve_model(model)
    if isinstance(layout, str):
        fields = written_fields(layout, spec, world_size, global_batch_size)
        if precision is not None and fields.get("precision", precision) != precision:
            raise InputError(f"layout {layout}: its precision contradicts precision {precision}")
        if "precision" not in fields:
            devices = resolve_cluster(device, 1).device
            fields["precision"] = resolve_precision(precision, devices, resolve_engine(engine, devices))
        layout = layout_of_fields(layout, fields)
    elif not isinstance(layout, Layout):
        raise InputError(f"layout {reprlib.repr(layout)}: expected a Layout, or a text such as tp=4 pp=2")
    elif global_batch_size is not None or precision is not None:
        raise InputError("global_batch_size and precision are for layouts that are written as text")
    if world_size is not None and world_size != layout.world_size:
        raise InputError(
            f"layout {layout.describe()} occupies {layout.world_size} devices, not world_size {world_size}"
        )
    hardware = resolve_cluster(device, layout.world_size, local_world_size, **cluster)
    resolved_engine = resolve_engine(engine, hardware.device)
    resolve_precision(layout.precision, hardware.device, resolved_engine)
    message = first_violation(spec, layout)
    if message is not None:
        raise InputError(message)
    where = spec, hardware, resolved_engine, layout
    return estimate_layout(*where)
