"""`Problem`: a question for a search with all inputs resolved, and the keywords that state it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster, Device, Precision
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import Lora, MultiTokenPrediction
from planner.inputs.batch import Batch, resolve_batch
from planner.inputs.cluster import ClusterKeywords, resolve_cluster
from planner.inputs.engine import check_runs_on, resolve_engine, resolve_precision
from planner.inputs.model import resolve_model, with_lora, with_mtp
from planner.inputs.pins import PinInput, Pins, parse_pins
from planner.objective import DEFAULT_OBJECTIVE, Objective, parse_objective
from planner.preference import Preference, parse_preference
from planner.space.engine_rules import check_formats, check_pins, engine_rules
from planner.space.graph_rules import check_graphs
from planner.space.grid import Admit, MicroBatches, Space, build, obstacle
from planner.space.lora_rules import check_engine, check_precision
from planner.space.rule import Rule

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass(frozen=True)
class Problem:
    """A question for a search, with all inputs resolved."""

    model: ModelSpec
    cluster: Cluster
    engine: Engine
    batch: Batch
    precision: Precision
    pins: Pins
    objective: Objective = "throughput"
    rules: tuple[Rule, ...] = ()
    """Rules of this job, besides those of all jobs and of its engine."""
    preference: Preference = Preference()
    """The choice among plans within the estimate's error of each other."""

    @cached_property
    def constants(self) -> Engine:
        """The engine with its constants for the device; unchanged on nodes of two kinds."""
        return self.engine if self.cluster.parts else self.engine.for_device(self.cluster.device)

    @property
    def further(self) -> tuple[Rule, ...]:
        """The rules of the engine and the job, besides those of all layouts."""
        return engine_rules(self.engine, self.precision) + self.rules

    @property
    def has_open_batch(self) -> bool:
        """True if a step may have any number of sequences up to the given one."""
        return self.batch.maximum and self.objective in ("throughput", "cost")

    def space(self) -> Space:
        """The legal layouts; raises `InputError` when the pins do not divide the world size."""
        return self._built()

    def further_space(self, micro_batches: MicroBatches, admit: Admit) -> Space:
        """The legal layouts that `admit` accepts among other microbatches and among layouts held in
        reserve."""
        return self._built(micro_batches, admit)

    def _built(self, micro_batches: MicroBatches | None = None, admit: Admit | None = None) -> Space:
        where = self.model, self.cluster.world_size, self.batch, self.precision, self.pins, self.further
        return build(*where, micro_batches, admit, stages_alike=self.engine.runs.stages_alike)

    def obstacle(self) -> str:
        """The reason why no layout is legal: the rule, with its numbers, that layouts with the fewest broken
        rules break."""
        return obstacle(self.model, self.cluster.world_size, self.batch, self.pins, self.further)


class JobKeywords(TypedDict, total=False):
    """Keywords of a job besides its model and its number of devices; None for a keyword that is left out."""

    device: Device | str | None
    """A device, a catalogue name, or nodes of two kinds (`a100-80g:4,v100-32g:4`)."""
    local_world_size: int | None
    """Devices of one node."""
    global_batch_size: int | None
    """Sequences of one step, exactly."""
    max_global_batch_size: int | None
    """Sequences of one step, at most."""
    engine: Engine | str | None
    """The engine that executes the layout, or its catalogue name."""
    precision: str | None
    """The number format of GEMMs."""
    pin: PinInput
    """Degrees that are fixed (`tp=8`) or narrowed (`tp=2..8`)."""
    forbid: PinInput
    """Values of degrees that no layout may have."""
    objective: str | None
    """The objective of the ranking (`planner.objective.Objective`)."""
    prefer: str | None
    """`simple` or `fastest`: the choice among plans within the estimate's error of the fastest; or a YAML
    file of points (`planner.preference`)."""
    headroom: str | float | None
    """Memory that a plan should leave free on a device: GiB (`2`), or a share of it (`3%`)."""
    rules: Sequence[Rule] | None
    """Rules for layouts that this job cannot run."""
    lora: Lora | None
    """Adapters to train instead of the model."""
    mtp: MultiTokenPrediction | None
    """MTP modules to train with the model."""


class SearchKeywords(JobKeywords, ClusterKeywords, total=False):
    """Keywords of every question: `planner.search`, `suggest`, `explain` and `sizes`."""


def resolve_problem(model: ModelSpec | str | Path, world_size: int, **job: Unpack[SearchKeywords]) -> Problem:
    """The problem that the arguments of a search state; raises `InputError` for wrong ones."""
    pins = parse_pins(job.get("pin"), job.get("forbid"))
    precision = _agreed("precision", job.get("precision"), pins.pop("precision", None))
    exact, most = job.get("global_batch_size"), job.get("max_global_batch_size")
    if "global_batch_size" in pins:
        pinned = int(str(pins.pop("global_batch_size")))
        if most is not None and pinned > most:
            raise InputError(f"pin global_batch_size={pinned} exceeds max_global_batch_size {most}")
        exact, most = int(str(_agreed("global_batch_size", exact, pinned))), None
    cluster = cluster_of(world_size, job)
    engine = resolve_engine(job.get("engine"), cluster.device)
    check_runs_on(engine, cluster)
    spec, lora, mtp = resolve_model(model), job.get("lora"), job.get("mtp")
    spec = spec if mtp is None else with_mtp(spec, mtp)
    problem = Problem(
        model=spec if lora is None else with_lora(spec, lora),
        cluster=cluster,
        engine=engine,
        batch=resolve_batch(exact, most),
        precision=resolve_precision(None if precision is None else str(precision), cluster.device, engine),
        pins=pins,
        objective=parse_objective(job.get("objective") or DEFAULT_OBJECTIVE),
        rules=tuple(job.get("rules") or ()),
        preference=parse_preference(job.get("prefer"), job.get("headroom")),
    )
    check_pins(engine, pins)
    check_formats(engine, problem.precision, pins)
    check_graphs(problem.model, cluster.device, problem.precision, pins)
    check_precision(problem.model, problem.precision)
    check_engine(problem.model, engine)
    return problem


def cluster_of(world_size: int, job: SearchKeywords) -> Cluster:
    """The cluster of `world_size` devices that the keywords of a search describe."""
    given = {name: value for name, value in job.items() if name in ClusterKeywords.__annotations__}
    where = job.get("device"), world_size, job.get("local_world_size")
    return resolve_cluster(*where, **cast(ClusterKeywords, given))


def _agreed(name: str, given: object, pinned: object) -> object:
    if given is not None and pinned is not None and given != pinned:
        raise InputError(f"{name} {given} and pin {name}={pinned} contradict each other; give one")
    return pinned if given is None else given
