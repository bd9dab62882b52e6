"""`Abilities`: which layouts an engine can run at all. They are data (`catalogue/engines.yaml`)."""

from __future__ import annotations

from typing import Literal, get_args

from costmodels.spec.layout import ContextParallelForm, Recompute, RecomputeModule, Schedule
from costmodels.spec.record import Record

ZeroStage = Literal[0, 1, 2, 3]

OffloadTarget = Literal["activations", "optimizer"]

DeviceKind = Literal["gpu", "npu", "cpu"]

ZERO_STAGES: tuple[ZeroStage, ...] = get_args(ZeroStage)


class Abilities(Record):
    """Degrees of freedom of a layout that an engine runs: all, unless it is said.

    The search proposes nothing else (`planner/space/engine_rules.py`); a layout that is given is priced
    all the same.
    """

    source: str = ""
    devices: tuple[DeviceKind, ...] = get_args(DeviceKind)
    """Kinds of devices that it runs on."""
    tensor_parallel: bool = True
    sequence_parallel: bool = True
    pipeline_parallel: bool = True
    pipelines_of_experts: bool = True
    """Pipelines of models with experts."""
    expert_parallel: bool = True
    expert_tensor_parallel: bool = True
    experts_need_sequence_parallel: bool = False
    """Models with experts are tensor-parallel with sequence parallelism alone."""
    schedules: tuple[Schedule, ...] = get_args(Schedule)
    context_parallel_forms: tuple[ContextParallelForm, ...] = get_args(ContextParallelForm)
    """None of them: no context parallelism."""
    context_parallel_schedules: tuple[Schedule, ...] = get_args(Schedule)
    """Schedules that go with context parallelism."""
    offload_activations_schedules: tuple[Schedule, ...] = get_args(Schedule)
    """Schedules that go with offloaded activations."""
    zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    pipeline_zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    """Stages that go with pipeline parallelism."""
    unpiped_zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    """Stages that go without pipeline parallelism."""
    expert_zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    """Stages that go with expert parallelism."""
    hybrid_zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    """Stages that keep copies of what they split (`Layout.zero_replicas`)."""
    recompute: tuple[Recompute, ...] = get_args(Recompute)
    recompute_modules: tuple[RecomputeModule, ...] = get_args(RecomputeModule)
    recompute_activation_of_experts: bool = False
    """Of the modules, activation functions are recomputed in layers with experts alone."""
    recompute_some_layers: tuple[Recompute, ...] = ("selective", "full")
    """Kinds that recompute the first layers of each stage alone, too (`recompute_method` block)."""
    offload: tuple[OffloadTarget, ...] = get_args(OffloadTarget)

    def modules_of(self, experts: int) -> tuple[RecomputeModule, ...]:
        """What selective recomputation computes again in a model with so many experts in a layer."""
        without = {"activation"} if self.recompute_activation_of_experts and not experts else set()
        return tuple(module for module in self.recompute_modules if module not in without)
