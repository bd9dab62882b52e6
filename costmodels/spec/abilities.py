"""`Abilities`: which layouts an engine can run at all. They are data (`catalogue/engines.yaml`)."""

from typing import Literal, get_args

from costmodels.spec.layout import (
    ContextParallelForm,
    Fp8Recipe,
    MuonMode,
    Recompute,
    RecomputeModule,
    Schedule,
)
from costmodels.spec.record import Record

ZeroStage = Literal[0, 1, 2, 3]

OffloadTarget = Literal["activations", "optimizer"]

ExpertSplit = Literal["any", "as_layers", "as_layers_unless_spread"]

DeviceKind = Literal["gpu", "npu", "tpu", "hpu", "neuron", "cpu"]

ZERO_STAGES: tuple[ZeroStage, ...] = get_args(ZeroStage)


class Abilities(Record):
    """Degrees of freedom of a layout that an engine runs: all, unless it is said.

    The search proposes nothing else (`planner/space/engine_rules.py`); a layout that is given is priced
    all the same.
    """

    source: str = ""
    devices: tuple[DeviceKind, ...] = get_args(DeviceKind)
    """Kinds of devices that the engine runs on."""
    untried_devices: tuple[DeviceKind, ...] = ()
    """Kinds of devices that the engine should run on, and that nobody has tried."""
    priced_devices: tuple[DeviceKind, ...] = ()
    """Kinds of devices whose steps are priced, to compare what to rent, and that it cannot run on."""
    tensor_parallel: bool = True
    whole_kv_heads: bool = False
    """Each tensor-parallel rank has key/value heads of its own: there are no more ranks than such heads."""
    sequence_parallel: bool = True
    pipeline_parallel: bool = True
    pipelines_of_experts: bool = True
    """Pipelines of models with experts."""
    splits_plain_layers: bool = False
    """Some of what splits layers splits those of plain attention alone (`planner/space/kind_rules.py`)."""
    expert_parallel: bool = True
    expert_tensor_parallel: bool = True
    experts_need_sequence_parallel: bool = False
    """Models with experts are tensor-parallel with sequence parallelism alone."""
    expert_split: ExpertSplit = "any"
    """Tensor parallelism of experts (`Layout.expert_tensor_parallel`): any, or that of their layer,
    always or where experts are not spread; there it is 1."""
    experts_over_data_parallel: bool = False
    """Experts are spread over data-parallel ranks alone."""
    schedules: tuple[Schedule, ...] = get_args(Schedule)
    context_parallel_forms: tuple[ContextParallelForm, ...] = get_args(ContextParallelForm)
    """Forms of context parallelism that the engine runs; none without context parallelism."""
    exchanges_whole_kv_heads: bool = False
    """All-to-all context parallelism gives each rank key/value heads of its own: it repeats none of them."""
    windows_in_ring: bool = True
    """Ring context parallelism goes with sliding windows."""
    sink_forms: tuple[ContextParallelForm, ...] = get_args(ContextParallelForm)
    """Forms of context parallelism that go with attention sinks."""
    context_parallel_schedules: tuple[Schedule, ...] = get_args(Schedule)
    """Schedules that go with context parallelism."""
    uneven_schedules: tuple[Schedule, ...] = get_args(Schedule)
    """Schedules whose stages may hold different numbers of layers."""
    stages_alike: bool = False
    """All stages hold as many layers but for the first and the last one."""
    offload_activations_schedules: tuple[Schedule, ...] = get_args(Schedule)
    """Schedules that go with offloaded activations."""
    untied_schedules: tuple[Schedule, ...] = ()
    """Schedules only for models whose output head has a weight of its own."""
    zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    pipeline_zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    """Stages that go with pipeline parallelism."""
    unpiped_zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    """Stages that go without pipeline parallelism."""
    context_zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    """Stages that go with context parallelism."""
    expert_zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    """ZeRO stages that go with expert parallelism."""
    hybrid_zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    """Stages that keep copies of what they split (`Layout.zero_replicas`)."""
    recompute: tuple[Recompute, ...] = get_args(Recompute)
    recompute_modules: tuple[RecomputeModule, ...] = get_args(RecomputeModule)
    recompute_activation_of_experts: bool = False
    """The module `activation` is recomputed in layers with experts alone."""
    recompute_some_layers: tuple[Recompute, ...] = ("selective", "full")
    """Kinds that recompute the first layers of each stage alone, too (`recompute_method` block)."""
    fp8_recipes: tuple[Fp8Recipe, ...] = get_args(Fp8Recipe)
    """Recipes of fp8 scales that the engine runs; the first one is its default."""
    muon_modes: tuple[MuonMode, ...] = ("duplicated",)
    """Divisions of Muon's work among ranks that the engine runs; the first one is its default."""
    fp8_param_gather: bool = True
    """ZeRO gathers weights in fp8."""
    expert_halves: bool = False
    """Dispatch to experts may be split in two parts (`Layout.expert_halves`)."""
    cuda_graphs: bool = False
    """Passes of a microbatch may be one CUDA graph (`Layout.cuda_graphs`)."""
    offload: tuple[OffloadTarget, ...] = get_args(OffloadTarget)
    offload_optimizer_zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    """Stages that go with an offloaded optimizer."""

    def modules_of(self, experts: int) -> tuple[RecomputeModule, ...]:
        """Modules that selective recomputation computes again in a model with so many experts in a layer."""
        without = {"activation"} if self.recompute_activation_of_experts and not experts else set()
        return tuple(module for module in self.recompute_modules if module not in without)
