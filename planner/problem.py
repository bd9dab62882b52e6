"""`Problem`: what is asked of a search, all inputs resolved."""

from __future__ import annotations

from dataclasses import dataclass

from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster, Precision
from costmodels.spec.model import ModelSpec
from planner.inputs.batch import Batch
from planner.inputs.pins import Pins
from planner.objective import Objective
from planner.space.engine_rules import engine_rules
from planner.space.grid import Space, build, obstacle
from planner.space.rule import Rule


@dataclass(frozen=True)
class Problem:
    """What is asked: all inputs, resolved."""

    model: ModelSpec
    cluster: Cluster
    engine: Engine
    batch: Batch
    precision: Precision
    pins: Pins
    objective: Objective = "throughput"
    rules: tuple[Rule, ...] = ()
    """What this job cannot run, besides what no job and what its engine cannot."""

    @property
    def further(self) -> tuple[Rule, ...]:
        """The rules of the engine and the job, besides those of all layouts."""
        return engine_rules(self.engine) + self.rules

    def space(self) -> Space:
        """The legal layouts; raises `InputError` when the pins do not divide the world size."""
        return build(self.model, self.cluster.world_size, self.batch, self.precision, self.pins, self.further)

    def obstacle(self) -> str:
        """Why no layout is legal: the rule that stops those which break fewest, with its numbers."""
        return obstacle(self.model, self.cluster.world_size, self.batch, self.pins, self.further)
