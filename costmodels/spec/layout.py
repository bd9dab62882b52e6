"""`Layout`: the split of a job over its devices. The planner ranks layouts and the runtime executes them."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

from pydantic import model_validator

from costmodels.errors import InputError
from costmodels.spec.hardware import Precision
from costmodels.spec.record import Count, Record

Recompute = Literal["none", "selective", "full"]
"""Activations that backward computes again: none, those of some modules, or whole layers."""

RecomputeModule = Literal["core_attention", "mlp", "norm", "activation"]
"""Modules that selective recomputation computes again in every layer."""

RecomputeMethod = Literal["uniform", "block"]
"""The choice of layers that recompute (Megatron-LM's `--recompute-method`).

uniform: all layers; full recomputation keeps one input for every `recompute_num_layers` layers. block: the
first `recompute_num_layers` layers of each stage, one by one.
"""

Schedule = Literal["1f1b", "interleaved", "interleaved_zb", "zbv", "dualpipev"]
"""Order of forward and backward passes in a pipeline: those of torch.distributed.pipelining.

The last three split backward into input gradients and weight gradients; the latter fill the bubble
(arXiv:2401.10241).
"""


class ScheduleTraits(NamedTuple):
    """Requirements of a schedule and the kinds of its passes."""

    least_chunks: int
    """Least number of model chunks of a rank (`virtual_pipeline_parallel`)."""
    most_chunks: int | None = None
    in_rounds: bool = False
    """True if chunks take turns of pp microbatches."""
    in_v: bool = False
    """True if a rank's two chunks are placed as a V: rank 0 has the first and the last stage."""
    splits_backward: bool = False
    """True if weight gradients run in separate passes from input gradients."""
    steady_passes: int = 2
    """Number of passes of a microbatch on a stage while the pipeline is full; a whole backward pass counts as
    one."""
    least_micro_batches: int = 0
    """Fewest microbatches for each pipeline rank that PyTorch accepts."""


SCHEDULE_TRAITS: dict[Schedule, ScheduleTraits] = {
    "1f1b": ScheduleTraits(1, 1),
    "interleaved": ScheduleTraits(2, in_rounds=True),
    "interleaved_zb": ScheduleTraits(2, in_rounds=True, splits_backward=True, steady_passes=3),
    "zbv": ScheduleTraits(2, 2, in_v=True, splits_backward=True, steady_passes=3),
    "dualpipev": ScheduleTraits(2, 2, in_v=True, splits_backward=True, least_micro_batches=2),
}

V_SCHEDULES = tuple(name for name, traits in SCHEDULE_TRAITS.items() if traits.in_v)
"""Schedules whose ranks hold two chunks each, placed as a V."""

SPLIT_BACKWARD = tuple(name for name, traits in SCHEDULE_TRAITS.items() if traits.splits_backward)
"""Schedules that run weight gradients in separate passes from input gradients."""

IN_ROUNDS = tuple(name for name, traits in SCHEDULE_TRAITS.items() if traits.in_rounds)
"""Schedules whose microbatches come in multiples of the pipeline ranks."""

ContextParallelForm = Literal["all_gather", "all_to_all", "ring"]
"""Communication by which attention reaches tokens of other context-parallel ranks.

all_gather: every rank gathers keys and values (Llama 3, arXiv:2407.21783, section 3.3.2);
all_to_all: ranks exchange tokens for heads (DeepSpeed-Ulysses, arXiv:2309.14509);
ring: keys and values go round while attention runs (arXiv:2310.01889).
"""

GradientReduction = Literal["fp32", "bf16"]
"""Number format in which data-parallel ranks sum gradients."""

Fp8Recipe = Literal["default", "rowwise", "tensorwise", "rowwise_with_gw_hp", "delayed", "blockwise"]
"""Scales of GEMMs in fp8, by torchao's names, and by Megatron-LM's names for Transformer Engine's. default:
the engine's default; rowwise: one scale per row or column of an operand, from its present values; tensorwise:
one scale per operand, from its present values (Transformer Engine's "current scaling"); rowwise_with_gw_hp:
rowwise, with weight gradients in 16 bits; delayed: one scale per operand, from its values in earlier steps;
blockwise: one scale per 128 elements of a row, and per 128 x 128 block of a weight.
"""

WIDE_WEIGHT_GRADIENTS: tuple[Fp8Recipe, ...] = ("rowwise_with_gw_hp",)
"""Recipes whose weight gradients are 16-bit GEMMs."""

GATHERS_FP8: tuple[Fp8Recipe, ...] = ("tensorwise",)
"""Recipes whose weights data-parallel ranks can gather in fp8, as all ranks use the same scale."""

Optimizer = Literal["adam", "sgd", "adafactor", "muon", "adam8bit", "came"]
"""Optimizers of the weights, which differ in the size of their state.

adam: Adam, two moments of each weight; sgd: one, the momentum;
adafactor: a mean for each row and column (arXiv:1804.04235);
muon: the momentum of matrices of the layers, Adam for the rest (kellerjordan.github.io/posts/muon);
adam8bit: both moments in 8 bits (arXiv:2110.02861);
came: the momentum, and two means for each row and column (arXiv:2307.02047).
"""

MuonMode = Literal["default", "duplicated", "distributed", "blockwise", "layer_sharded"]
"""Division of Muon's Newton-Schulz steps among tensor-parallel ranks: Megatron-LM's `--muon-tp-mode`.

- default: the engine's own default;
- duplicated: each rank gathers the whole matrix, and computes all of it;
- distributed: each rank computes with its part, and each step sums a square matrix over the ranks;
- blockwise: each rank treats its part as a whole matrix, which gives another update;
- layer_sharded: each rank computes whole matrices, and gets their parts from the other ranks.
"""

SHORT_NAMES = {
    "tp": "tensor_parallel",
    "sp": "sequence_parallel",
    "pp": "pipeline_parallel",
    "vpp": "virtual_pipeline_parallel",
    "cp": "context_parallel",
    "ep": "expert_parallel",
    "etp": "expert_tensor_parallel",
    "dp": "data_parallel",
    "zero": "zero_stage",
    "cp_form": "context_parallel_form",
    "mbs": "micro_batch_size",
    "gbs": "global_batch_size",
}
"""Abbreviations of the field for the fields of `Layout`."""


class Layout(Record):
    """One way to split a training job over `world_size` devices.

    Ranks are placed in the order tp, cp, dp, pp, the first varying fastest (Megatron-LM's
    `tp-cp-ep-dp-pp`): rank = tp + TP * (cp + CP * (dp + DP * pp)). Experts are spread over the
    tp x cp x dp ranks of a stage: the place of a rank among them is etp + ETP * (ep + EP * edp), so that
    tp x cp x dp / (ep x etp) ranks hold the same experts (parallel folding, arXiv:2504.14960, section 3.1).

    Examples:
        >>> layout = Layout(
        ...     tensor_parallel=2, data_parallel=4, global_batch_size=32, layers_per_stage=(32,)
        ... )
        >>> layout.world_size, layout.micro_batches
        (8, 8)
        >>> layout.describe()
        'tp=2 pp=1 dp=4 zero=0 mbs=1 x 8 recompute=none'
    """

    tensor_parallel: Count = 1
    """Ranks that share each matrix of a layer."""
    sequence_parallel: bool = False
    """True if norms and residuals are split over the sequence inside the tensor-parallel group."""
    pipeline_parallel: Count = 1
    """Ranks over which the layers are divided."""
    virtual_pipeline_parallel: Count = 1
    """Model chunks on each pipeline rank."""
    context_parallel: Count = 1
    """Ranks that share the tokens of one sequence."""
    context_parallel_form: ContextParallelForm = "all_gather"
    """Communication by which attention reaches the tokens of other context-parallel ranks."""
    expert_parallel: Count = 1
    """Ranks over which the routed experts of a layer are spread."""
    expert_tensor_parallel: Count = 1
    """Ranks that share one routed expert, independent of `expert_parallel`."""
    data_parallel: Count = 1
    """Ranks that train copies of the model on different sequences."""
    zero_stage: Literal[0, 1, 2, 3] = 0
    """ZeRO stage over data- and context-parallel ranks: 1 splits optimizer states, 2 also gradients, 3 also
    parameters."""
    zero_replicas: Count = 1
    """Copies of the states that ZeRO splits; each copy is split over dp x cp / zero_replicas neighbouring
    ranks."""
    schedule: Schedule = "1f1b"
    """Order in which a pipeline runs the passes of microbatches."""
    layers_per_stage: tuple[Count, ...]
    """Layers of each stage; `stages_of` gives the rank of each stage."""
    micro_batch_size: Count = 1
    """Sequences of one forward pass on one data-parallel rank."""
    global_batch_size: Count
    """Sequences of one optimizer step over all ranks."""
    recompute: Recompute = "none"
    """Activations that backward computes again: none, selective modules, or full layers."""
    recompute_modules: tuple[RecomputeModule, ...] = ()
    """Modules of selective recomputation; core attention when not given."""
    recompute_method: RecomputeMethod = "uniform"
    """Layers that recompute: all (uniform), or the first ones of each stage (block)."""
    recompute_num_layers: Count = 1
    """Number of layers of a block, or of layers that share one kept input."""
    offload_activations: bool = False
    """True if tensors that attention keeps for backward are moved to host memory (MindSpeed's
    swap-attention)."""
    offload_optimizer: bool = False
    """True if optimizer state and master weights stay in host memory, and the optimizer step runs there."""
    precision: Precision = "bf16"
    """Number format of GEMMs."""
    gradient_reduction: GradientReduction = "fp32"
    """Number format in which data-parallel ranks sum gradients."""
    fp8_recipe: Fp8Recipe = "default"
    """The scaling recipe of precision fp8."""
    fp8_param_gather: bool = False
    """Gather weights of fp8 GEMMs in fp8 under ZeRO (Megatron-LM's flag of the name)."""
    optimizer: Optimizer = "adam"
    """Optimizer that updates the weights."""
    muon_mode: MuonMode = "default"
    """Division of Muon's Newton-Schulz steps among tensor-parallel ranks."""
    expert_halves: bool = False
    """Dispatch of a microbatch to experts in two parts: one travels while experts compute the other."""
    cuda_graphs: bool = False
    """True if forward and backward of a microbatch are one CUDA graph, which the host launches at once."""

    @model_validator(mode="before")
    @classmethod
    def _usual_modules(cls, values: Any) -> Any:
        selective = isinstance(values, dict) and values.get("recompute") == "selective"
        if selective and not values.get("recompute_modules"):
            return {**values, "recompute_modules": ("core_attention",)}
        return values

    @model_validator(mode="after")
    def _check(self) -> "Layout":
        stages = self.pipeline_parallel * self.virtual_pipeline_parallel
        if len(self.layers_per_stage) != stages:
            raise ValueError(
                f"layers_per_stage has {len(self.layers_per_stage)} entries, but pipeline_parallel x "
                f"virtual_pipeline_parallel is {stages}"
            )
        if self.global_batch_size % (self.micro_batch_size * self.data_parallel):
            raise ValueError(
                f"global_batch_size {self.global_batch_size} is not divisible by micro_batch_size "
                f"{self.micro_batch_size} times data_parallel {self.data_parallel}"
            )
        chunks = self.virtual_pipeline_parallel
        if not schedule_takes(self.schedule, chunks):
            raise ValueError(
                f"schedule {self.schedule} does not go with virtual_pipeline_parallel {chunks}; "
                f"{CHUNKS_OF_SCHEDULES}"
            )
        if self.virtual_pipeline_parallel > 1 and self.pipeline_parallel == 1:
            raise ValueError("virtual_pipeline_parallel above 1 needs pipeline_parallel of at least 2")
        if self.sequence_parallel and self.tensor_parallel == 1:
            raise ValueError("sequence_parallel needs tensor_parallel of at least 2")
        replicas = self.data_parallel * self.context_parallel
        if self.zero_stage and replicas == 1:
            raise ValueError(f"zero_stage {self.zero_stage} needs data_parallel of at least 2")
        if self.zero_replicas > 1 and (not self.zero_stage or replicas % self.zero_replicas):
            raise ValueError(
                f"zero_replicas {self.zero_replicas} needs zero_stage of at least 1 and must divide "
                f"data_parallel x context_parallel, which is {replicas}"
            )
        devices, groups = replicas * self.tensor_parallel, self.expert_parallel * self.expert_tensor_parallel
        if devices % groups:
            raise ValueError(
                f"expert_parallel {self.expert_parallel} x expert_tensor_parallel "
                f"{self.expert_tensor_parallel} does not divide the {devices} devices of a stage "
                "(tensor_parallel x context_parallel x data_parallel)"
            )
        if self.context_parallel == 1 and self.context_parallel_form != "all_gather":
            raise ValueError(
                f"context_parallel_form {self.context_parallel_form} needs context_parallel of at least 2"
            )
        conflict = recompute_conflict(
            self.recompute,
            self.recompute_modules,
            self.recompute_method,
            self.recompute_num_layers,
            self.offload_activations,
        )
        conflict = conflict or fp8_conflict(self.precision, self.fp8_recipe, self.fp8_param_gather)
        if conflict is not None:
            raise ValueError(conflict)
        if self.muon_mode != "default" and self.optimizer != "muon":
            raise ValueError(f"muon_mode {self.muon_mode} needs optimizer muon, not {self.optimizer}")
        return self

    @property
    def world_size(self) -> int:
        """Devices that the layout occupies."""
        return self.tensor_parallel * self.pipeline_parallel * self.context_parallel * self.data_parallel

    @property
    def micro_batches(self) -> int:
        """Microbatches that each data-parallel rank runs in one step."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel)

    @property
    def zero_shards(self) -> int:
        """Ranks over which ZeRO splits; 1 without ZeRO."""
        ranks = self.data_parallel * self.context_parallel
        return ranks // self.zero_replicas if self.zero_stage else 1

    @property
    def gathers_fp8(self) -> bool:
        """True if weights are gathered in fp8; shards in host memory are gathered in 16 bits."""
        return self.fp8_param_gather and self.zero_stage > 0 and not self.offload_optimizer

    def stages_of(self, pipeline_rank: int) -> tuple[int, ...]:
        """Indices of the stages of `pipeline_rank`, first chunk first.

        Stage i runs on rank i mod pp; in a V, every second round of stages runs in reverse order of ranks.
        """
        stages = len(self.layers_per_stage)
        if self.schedule in V_SCHEDULES:
            return pipeline_rank, stages - 1 - pipeline_rank
        return tuple(range(pipeline_rank, stages, self.pipeline_parallel))

    def layer_range(self, stage: int) -> range:
        """Global indices of the layers of `stage`."""
        start = sum(self.layers_per_stage[:stage])
        return range(start, start + self.layers_per_stage[stage])

    def describe(self) -> str:
        """The notation of the layout, such as `tp=8+sp pp=2 dp=4 zero=1 mbs=1 x 8 recompute=selective`.

        It has the layers of stages only where they differ from `even_split`.
        """
        parts = [f"tp={self.tensor_parallel}" + ("+sp" if self.sequence_parallel else "")]
        parts.append(f"pp={self.pipeline_parallel}")
        if self.virtual_pipeline_parallel > 1:
            parts.append(f"vpp={self.virtual_pipeline_parallel}")
        if self.schedule not in ("1f1b", "interleaved"):
            parts.append(f"schedule={self.schedule}")
        for short in ("cp", "ep", "etp"):
            value = getattr(self, SHORT_NAMES[short])
            if value > 1:
                parts.append(f"{short}={value}")
        if self.context_parallel > 1:
            parts.append(f"cp_form={self.context_parallel_form}")
        parts.append(f"dp={self.data_parallel}")
        parts.append(f"zero={self.zero_stage}")
        if self.zero_replicas > 1:
            parts.append(f"zero_replicas={self.zero_replicas}")
        parts.append(f"mbs={self.micro_batch_size} x {self.micro_batches}")
        parts.append(f"recompute={self.describe_recompute()}")
        offloaded = [name for name in ("activations", "optimizer") if getattr(self, f"offload_{name}")]
        if offloaded:
            parts.append(f"offload={'+'.join(offloaded)}")
        if self.gradient_reduction != "fp32":
            parts.append(f"gradient_reduction={self.gradient_reduction}")
        if self.fp8_recipe != "default":
            parts.append(f"fp8_recipe={self.fp8_recipe}")
        if self.gathers_fp8:
            parts.append("fp8_param_gather")
        if self.optimizer != "adam":
            parts.append(f"optimizer={self.optimizer}")
        if self.muon_mode != "default":
            parts.append(f"muon_mode={self.muon_mode}")
        parts += [name for name in ("expert_halves", "cuda_graphs") if getattr(self, name)]
        if self.layers_per_stage != even_split(sum(self.layers_per_stage), len(self.layers_per_stage)):
            parts.append(f"layers={written_split(self.layers_per_stage)}")
        return " ".join(parts)

    def describe_recompute(self) -> str:
        """The notation of the recomputation, such as `full`, `selective(norm+mlp)` or `full/block:2`."""
        text: str = self.recompute
        if self.recompute_modules not in ((), ("core_attention",)):
            text += f"({'+'.join(self.recompute_modules)})"
        if (self.recompute_method, self.recompute_num_layers) != ("uniform", 1):
            text += f"/{self.recompute_method}:{self.recompute_num_layers}"
        return text


NOTHING_TO_OFFLOAD = (
    "offload_activations has nothing to send with recompute full; use recompute selective, or "
    "recompute_method block"
)
"""Message: layers that are recomputed as a whole keep only their input, so there is nothing to offload."""


def recompute_conflict(
    recompute: str, modules: Sequence[str], method: str, layers: int, offloads: bool
) -> str | None:
    """The contradiction between a layout's recomputation and offloading, in words, or None."""
    if modules and recompute != "selective":
        return f"recompute_modules need recompute selective, not {recompute}"
    if len(set(modules)) < len(modules):
        return f"recompute_modules name one twice: {', '.join(modules)}"
    if (method, layers) != ("uniform", 1) and recompute == "none":
        return "recompute_method and recompute_num_layers need recompute selective or full"
    if method == "uniform" and layers > 1 and recompute == "selective":
        return (
            f"recompute_num_layers {layers}: recompute selective works layer by layer; add "
            "recompute_method block"
        )
    return NOTHING_TO_OFFLOAD if offloads and recompute == "full" and method == "uniform" else None


def fp8_conflict(precision: str, recipe: str, gathers: bool) -> str | None:
    """The contradiction between a layout's fp8 fields, in words, or None."""
    if recipe != "default" and precision != "fp8":
        return f"fp8_recipe {recipe} needs precision fp8, not {precision}"
    if gathers and recipe not in ("default", *GATHERS_FP8):
        return f"fp8_param_gather needs fp8_recipe {' or '.join(GATHERS_FP8)}, not {recipe}"
    return None


def _chunks_of_schedules() -> str:
    groups: dict[str, list[str]] = {}
    for name, traits in SCHEDULE_TRAITS.items():
        bound = "exactly" if traits.least_chunks == traits.most_chunks else "at least"
        groups.setdefault(f"{bound} {traits.least_chunks}", []).append(name)
    counts = [(" and ".join(names), count) for count, names in groups.items()]
    (first, count), *rest = counts
    verb = "need" if " " in first else "needs"
    return ", ".join([f"{first} {verb} {count}", *(" ".join(each) for each in rest)])


CHUNKS_OF_SCHEDULES = _chunks_of_schedules()
"""Model chunks (virtual_pipeline_parallel) that each schedule runs."""


def schedule_takes(schedule: Schedule, chunks: int) -> bool:
    """True where a schedule runs `chunks` model chunks on each rank."""
    traits = SCHEDULE_TRAITS[schedule]
    return traits.least_chunks <= chunks <= (traits.most_chunks or chunks)


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage when `stages` share `layers` as evenly as possible.

    The first stages take the remainder: the last stage also computes the output head.

    Examples:
        >>> even_split(30, 4)
        (8, 8, 7, 7)

    Raises:
        InputError: a stage would be empty, or there is none.
    """
    if not 1 <= stages <= layers:
        raise InputError(
            f"{stages} stages cannot share {layers} layers: each needs at least one; use 1 to {layers} stages"
        )
    return tuple(layers // stages + (stage < layers % stages) for stage in range(stages))


def written_split(layers_per_stage: Sequence[int]) -> str:
    """Layers of each stage as a sum, in which `5*3` are three stages of 5 layers each.

    Examples:
        >>> written_split((4, 5, 5, 5, 4, 4, 4, 1))
        '4+5*3+4*3+1'
    """
    runs = [(layers, len(list(run))) for layers, run in groupby(layers_per_stage)]
    return "+".join(f"{layers}*{count}" if count > 1 else str(layers) for layers, count in runs)
