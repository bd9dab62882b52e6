"""`Abilities`: the layouts that an engine can run. They are data (`catalogue/engines.yaml`)."""

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
    """Degrees of freedom of a layout that an engine runs; a field that is not given allows all.

    The search proposes no other layouts (`planner/space/engine_rules.py`), but a given layout is priced all
    the same.
    """

    source: str = ""
    devices: tuple[DeviceKind, ...] = get_args(DeviceKind)
    """Kinds of devices on which the engine runs."""
    untried_devices: tuple[DeviceKind, ...] = ()
    """Kinds of devices on which the engine should run, but was never tried."""
    priced_devices: tuple[DeviceKind, ...] = ()
    """Kinds of devices on which the engine cannot run; steps are priced to compare devices to rent."""
    tensor_parallel: bool = True
    whole_kv_heads: bool = False
    """True if each tensor-parallel rank needs its own key/value heads, so that ranks may not exceed these
    heads."""
    sequence_parallel: bool = True
    pipeline_parallel: bool = True
    pipelines_of_experts: bool = True
    """True if the engine runs pipelines of models with experts."""
    splits_plain_layers: bool = False
    """True if some splits of layers work for plain attention only (`planner/space/kind_rules.py`)."""
    expert_parallel: bool = True
    expert_tensor_parallel: bool = True
    experts_need_sequence_parallel: bool = False
    """True if models with experts need sequence parallelism together with tensor parallelism."""
    expert_split: ExpertSplit = "any"
    """Tensor parallelism of experts (`Layout.expert_tensor_parallel`): any; always that of their layer; or
    that of their layer where ep = 1, and 1 where ep > 1."""
    experts_over_data_parallel: bool = False
    """True if experts are spread over data-parallel ranks only."""
    schedules: tuple[Schedule, ...] = get_args(Schedule)
    context_parallel_forms: tuple[ContextParallelForm, ...] = get_args(ContextParallelForm)
    """Forms of context parallelism that the engine runs; none without context parallelism."""
    exchanges_whole_kv_heads: bool = False
    """True if all-to-all context parallelism gives each rank its own key/value heads, without repeats."""
    windows_in_ring: bool = True
    """True if ring context parallelism works with sliding windows."""
    sink_forms: tuple[ContextParallelForm, ...] = get_args(ContextParallelForm)
    """Forms of context parallelism that work with attention sinks."""
    context_parallel_schedules: tuple[Schedule, ...] = get_args(Schedule)
    """Schedules that work with context parallelism."""
    uneven_schedules: tuple[Schedule, ...] = get_args(Schedule)
    """Schedules whose stages may hold different numbers of layers."""
    stages_alike: bool = False
    """True if all stages except the first and the last one must have the same number of layers."""
    most_even_stages: bool = False
    """True if the engine itself divides layers into stages that are as equal as possible."""
    offload_activations_schedules: tuple[Schedule, ...] = get_args(Schedule)
    """Schedules that work with offloaded activations."""
    untied_schedules: tuple[Schedule, ...] = ()
    """Schedules that only work for models with an untied output head."""
    zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    pipeline_zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    """ZeRO stages that work with pipeline parallelism."""
    unpiped_zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    """ZeRO stages that work without pipeline parallelism."""
    context_zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    """ZeRO stages that work with context parallelism."""
    expert_zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    """ZeRO stages that work with expert parallelism."""
    hybrid_zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    """ZeRO stages that work with copies of the shards (`Layout.zero_replicas`)."""
    recompute: tuple[Recompute, ...] = get_args(Recompute)
    recompute_modules: tuple[RecomputeModule, ...] = get_args(RecomputeModule)
    recompute_activation_of_experts: bool = False
    """True if the module `activation` is recomputed only in layers with experts."""
    recompute_some_layers: tuple[Recompute, ...] = ("selective", "full")
    """Kinds of recomputation that also work for the first layers of each stage only (`recompute_method`
    block)."""
    fp8_recipes: tuple[Fp8Recipe, ...] = get_args(Fp8Recipe)
    """Recipes of fp8 scales that the engine supports; the first one is its default."""
    muon_modes: tuple[MuonMode, ...] = ("duplicated",)
    """Divisions of Muon's work among ranks that the engine supports; the first one is its default."""
    fp8_param_gather: bool = True
    """True if ZeRO can gather weights in fp8."""
    expert_halves: bool = False
    """True if dispatch to experts may be split in two parts (`Layout.expert_halves`)."""
    cuda_graphs: bool = False
    """True if the passes of a microbatch may be one CUDA graph (`Layout.cuda_graphs`)."""
    offload: tuple[OffloadTarget, ...] = get_args(OffloadTarget)
    offload_optimizer_zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES
    """ZeRO stages that work with an offloaded optimizer."""

    def modules_of(self, experts: int) -> tuple[RecomputeModule, ...]:
        """Modules that selective recomputation supports, for a model with the given number of experts in a
        layer."""
        without = {"activation"} if self.recompute_activation_of_experts and not experts else set()
        return tuple(module for module in self.recompute_modules if module not in without)
