"""The flags of a planning job as dataclasses, in Megatron-LM's spelling where it has one.

The command line of `planner` and of `runtime.pretrain` take these flags through `planner.options.flags`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, cast, get_args

from costmodels.catalogue import device_names, engine_names
from costmodels.errors import InputError
from costmodels.spec.layout import Optimizer, RecomputeMethod, Schedule
from costmodels.spec.model import ModelSpec
from planner.objective import DEFAULT_OBJECTIVE
from planner.options.flags import arguments, flag
from planner.options.inputs import (
    DEFAULT_DEVICE,
    DEFAULT_ENGINE,
    MOST_DEVICES,
    NetworkOptions,
    world_size_of_kinds,
)
from planner.options.limits import Bounds
from planner.options.megatron import AcceptedFlags, accepted_names
from planner.options.model import ModelOptions, choice
from planner.options.node_kinds import KINDS, is_of_kinds
from planner.options.pins import Pins, parse_pins, where_possible

__all__ = [
    "BatchOptions",
    "ClusterOptions",
    "HardwareOptions",
    "ModelOptions",
    "ParallelOptions",
    "check_alone",
]

COUNT = Bounds(f"a whole number from 1 to {MOST_DEVICES}", 1, MOST_DEVICES)
"""Numbers of devices, of nodes and of cards that somebody builds."""

TASK_TYPE = "llmacc.megatron.GPT"

_CONTEXT_FORMS = {
    "p2p": "ring",
    "all_gather": "all_gather",
    "a2a": "all_to_all",
    "ring": "ring",
    "all_to_all": "all_to_all",
}
_MODULES = {
    "core_attn": "core_attention",
    "layernorm": "norm",
    "mlp": "mlp",
    "moe_act": "activation",
    "core_attention": "core_attention",
    "norm": "norm",
    "activation": "activation",
}
"""Megatron-LM's words first, then those of `Layout`."""


def check_alone(*groups: object) -> None:
    """Raise `InputError` when `groups` give flags beside a plan, which says all that they would."""
    for group in groups:
        if isinstance(group, AcceptedFlags):
            group.check_accepted()
    words = [word for group in groups for word in arguments(group) if word.startswith("--")]
    given = [word for word in words if word not in accepted_names()]
    if given:
        raise InputError(
            f"--plan decides model, batch and layout: {', '.join(dict.fromkeys(given))} cannot change it; "
            "leave that out, or plan again without --plan"
        )


@dataclass(frozen=True)
class HardwareOptions:
    """What devices a job runs on, and what joins them."""

    SECTIONS: ClassVar[dict[str, str]] = {"local_world_size": "Cluster"}

    local_world_size: int | None = flag(None, "Devices of one node; as in the device's usual server.")
    device: str | None = flag(
        None,
        f"Catalogue name of the device (see `devices`); {DEFAULT_DEVICE} if none. Nodes of two kinds with "
        f"the number of each: {KINDS}.",
        values=device_names,
    )
    memory_margin_gib: float | None = flag(
        None,
        "GiB of each device to set aside for driver context, communication buffers and fragmentation, "
        "instead of their estimates; 0 for none.",
        metavar="GIB",
    )
    intra_node_gbps: float | None = flag(
        None,
        "Gigabits per second (8 x GB/s) and direction of one device's fast link (NVLink, HCCS); the data "
        "sheet's unless given.",
    )
    inter_node_gbps: float | None = flag(
        None,
        "Gigabits per second (8 x GB/s) of the network between nodes: of one card with --nics-per-node, "
        "otherwise of one device's share of the cards.",
    )
    island: int | None = flag(
        None,
        "Devices that the fast link joins: a part of a node, or several nodes (72 for an NVL72 rack).",
        within=COUNT,
    )
    nics_per_node: int | None = flag(None, "Network cards of a node, shared by its devices.", within=COUNT)
    nodes_per_pod: int | None = flag(
        None, "Nodes under the same leaf switches (a rack or pod).", within=COUNT
    )
    oversubscription: float | None = flag(
        None, "Bandwidth of a pod's cards over that of its spine links, such as 2; needs --nodes-per-pod."
    )
    network_table: str | None = flag(
        None,
        "CSV of measured collectives (collective, devices, nodes, busbw_gbs in GB/s, bytes), which replace "
        "the bandwidth of links.",
        metavar="FILE",
    )

    def network(self) -> NetworkOptions:
        """What joins the devices, as far as flags say it."""
        names = NetworkOptions.__annotations__
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return cast(NetworkOptions, given)

    def counted_devices(self) -> int | None:
        """Devices of nodes of two kinds, of which `device` tells the number; None for one kind."""
        if self.device is None or not is_of_kinds(self.device):
            return None
        return world_size_of_kinds(self.device, self.local_world_size)

    def notes(self) -> list[str]:
        """What was assumed because no flag said it."""
        return [] if self.device else [f"no device given: {DEFAULT_DEVICE}"]


@dataclass(frozen=True)
class ClusterOptions(HardwareOptions):
    """On what a job runs."""

    world_size: int | None = flag(None, "Devices of the job.")

    def required_world_size(self) -> int:
        """The world size, which nodes of two kinds tell; raises `InputError` when none is given."""
        if self.world_size is None:
            counted = self.counted_devices()
            if counted is not None:
                return counted
            raise InputError("no world size: give --world-size, the number of devices of the job")
        return self.world_size


@dataclass(frozen=True)
class BatchOptions:
    """How many sequences one optimizer step takes (one of the two), and what makes one layout the best."""

    SECTIONS: ClassVar[dict[str, str]] = {"global_batch_size": "Batch", "objective": "Objective"}

    global_batch_size: int | None = flag(
        None, "Sequences of one step, exactly.", "--global-batch-size", "--gbs"
    )
    max_global_batch_size: int | None = flag(None, "Sequences of one step, at most.")
    objective: str = flag(
        DEFAULT_OBJECTIVE,
        "What the best layout is best at: throughput (tokens per second), step-time (seconds of a step; "
        "under a maximum, of the largest batch that each layout can run), cost (device-hours per token), or "
        "memory (lowest peak, then throughput).",
        metavar="NAME",
    )


def _degree(name: str, megatron: str, short: str) -> Any:
    """A flag for a degree: Megatron-LM's spelling, the degree's own, and a short one."""
    names = (megatron, f"--{name.replace('_', '-')}", short)
    text = f"Fix or narrow {name}: 8, 2..8, ..4 or 2,4."
    return flag(None, text, *names, metavar="NUMBER|RANGE", degree=name)


@dataclass(frozen=True)
class ParallelOptions(AcceptedFlags):
    """Degrees of freedom that are fixed instead of searched, and who executes the layout."""

    SECTIONS: ClassVar[dict[str, str]] = {
        "pin": "Pins",
        "recompute_granularity": "Recomputation and offload",
        "use_distributed_optimizer": "Optimizer",
        "swap_attention": "Recomputation and offload",
        "optimizer": "Optimizer",
        "bf16": "Precision",
        "engine": "Engine",
    }

    pin: list[str] = flag(
        [],
        "Fix or narrow a degree, such as tp=8, recompute=full, tp=2..8, pp=..4 or dp=2,4; repeatable.",
        metavar="NAME=VALUE",
    )
    forbid: list[str] = flag(
        [],
        "Leave out values of a degree, such as tp=16, schedule=zbv,dualpipev or zero=2..3; repeatable.",
        metavar="NAME=VALUE",
    )
    tensor_model_parallel_size: str | None = _degree(
        "tensor_parallel", "--tensor-model-parallel-size", "--tp"
    )
    pipeline_model_parallel_size: str | None = _degree(
        "pipeline_parallel", "--pipeline-model-parallel-size", "--pp"
    )
    data_parallel_size: str | None = _degree("data_parallel", "--data-parallel-size", "--dp")
    num_virtual_stages_per_pipeline_rank: str | None = _degree(
        "virtual_pipeline_parallel", "--num-virtual-stages-per-pipeline-rank", "--vpp"
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "Fix virtual_pipeline_parallel by the layers of one chunk."
    )
    pipeline_schedule: str | None = flag(
        None,
        f"Fix schedule: {', '.join(get_args(Schedule))}.",
        metavar="NAME",
        degree="schedule",
        values=lambda: get_args(Schedule),
    )
    context_parallel_size: str | None = _degree("context_parallel", "--context-parallel-size", "--cp")
    cp_comm_type: str | None = flag(
        None, "Fix context_parallel_form wherever context_parallel > 1: p2p (ring), all_gather or a2a."
    )
    expert_model_parallel_size: str | None = _degree(
        "expert_parallel", "--expert-model-parallel-size", "--ep"
    )
    expert_tensor_parallel_size: str | None = _degree(
        "expert_tensor_parallel", "--expert-tensor-parallel-size", "--etp"
    )
    sequence_parallel: bool = flag(False, "Fix sequence_parallel=true wherever tensor_parallel > 1.")
    micro_batch_size: str | None = flag(
        None, "Fix or narrow micro_batch_size.", "--micro-batch-size", "--mbs", metavar="NUMBER|RANGE"
    )
    recompute_granularity: str | None = flag(None, "Fix recompute: full or selective.", degree="recompute")
    recompute_activations: bool = flag(False, "Fix recompute=selective.", degree="recompute")
    recompute_activation_function: bool = flag(
        False, "Fix recompute=selective with recompute_modules=activation."
    )
    recompute_modules: list[str] = flag(
        [],
        "With selective recomputation: core_attn, layernorm, mlp, moe_act; several with commas between them, "
        "not blanks.",
        metavar="NAMES",
    )
    recompute_method: str | None = flag(None, "With --recompute-granularity full: uniform or block.")
    recompute_num_layers: int | None = flag(
        None,
        "Layers that uniform recomputation repeats from one input, or that block recomputes in a stage; with "
        "--swap-attention alone the first layers of a stage whose MLP recomputes, as in MindSpeed.",
    )
    use_distributed_optimizer: bool = flag(
        False, "Fix zero_stage=1 wherever data_parallel > 1.", degree="zero_stage"
    )
    num_distributed_optimizer_instances: int | None = flag(None, "Fix zero_replicas.", degree="zero_replicas")
    optimizer_cpu_offload: bool = flag(False, "Fix offload_optimizer=true.", degree="offload_optimizer")
    swap_attention: bool = flag(False, "Fix offload_activations=true.", degree="offload_activations")
    optimizer: str | None = flag(None, f"Fix optimizer: {', '.join(get_args(Optimizer))}; adam unless given.")
    grad_reduce_in_bf16: bool = flag(False, "Fix gradient_reduction=bf16.")
    bf16: bool = flag(False, "Train in bf16; the device's usual format unless one is given.")
    fp16: bool = flag(False, "Train in fp16.")
    fp32: bool = flag(False, "Train in fp32.")
    fp8: bool = flag(False, "Matrix products of the layers in fp8, all else in bf16.")
    engine: str | None = flag(
        None,
        f"Who executes the layout (see `engines`), and so which layouts there are: {DEFAULT_ENGINE} unless "
        "given, or on NPUs mindspeed.",
        values=engine_names,
    )
    task_type: str | None = flag(None, f"Accepted for compatibility: {TASK_TYPE}.")

    def pins(self, model: ModelSpec) -> Pins:
        """All pins by full name; raises `InputError` for unknown, wrong or contradicting ones."""
        if self.task_type not in (None, TASK_TYPE):
            raise InputError(f"--task-type {self.task_type}: only {TASK_TYPE} is known")
        self.check_accepted()
        granularities = ("full", "selective")
        if self.recompute_granularity not in (None, *granularities):
            raise InputError(
                f"--recompute-granularity {self.recompute_granularity}: expected {' or '.join(granularities)}"
            )
        self._check_recompute()
        pairs = [
            ("tensor_parallel", self.tensor_model_parallel_size),
            ("pipeline_parallel", self.pipeline_model_parallel_size),
            ("data_parallel", self.data_parallel_size),
            ("virtual_pipeline_parallel", self.num_virtual_stages_per_pipeline_rank),
            ("schedule", self.pipeline_schedule),
            ("context_parallel", self.context_parallel_size),
            ("expert_parallel", self.expert_model_parallel_size),
            ("expert_tensor_parallel", self.expert_tensor_parallel_size),
            ("micro_batch_size", self.micro_batch_size),
            ("optimizer", self.optimizer),
            ("zero_replicas", self.num_distributed_optimizer_instances),
            ("offload_optimizer", self.optimizer_cpu_offload or None),
            ("offload_activations", self.swap_attention or None),
            ("gradient_reduction", "bf16" if self.grad_reduce_in_bf16 else None),
            ("recompute", self.recompute_granularity),
            ("recompute", "selective" if self.recompute_activations else None),
            ("recompute_modules", "mlp" if self._swaps_first_layers else self._recompute_modules()),
            ("recompute_method", "block" if self._swaps_first_layers else self.recompute_method),
            ("recompute_num_layers", None if self.notes() else self.recompute_num_layers),
            *(("precision", kind) for kind in self._precisions()),
        ]
        strings = [*self.pin, *(f"{name}={value}" for name, value in pairs if value is not None)]
        pins = parse_pins(strings, self.forbid)
        self._check_formats(pins)
        if self.num_layers_per_virtual_pipeline_stage is not None:
            chunks = self._chunks(model, pins, self.num_layers_per_virtual_pipeline_stage)
            pins = parse_pins([*strings, f"virtual_pipeline_parallel={chunks}"], self.forbid)
        # Megatron-LM's scripts set both whatever the layout: they do nothing in a group of one.
        if self.sequence_parallel:
            pins = where_possible(pins, "sequence_parallel", True)
        if self.use_distributed_optimizer:
            pins = where_possible(pins, "zero_stage", 1)
        form = choice("--cp-comm-type", self.cp_comm_type, _CONTEXT_FORMS)
        return where_possible(pins, "context_parallel_form", form) if form else pins

    def _precisions(self) -> list[str]:
        """The formats that are asked for; scripts of Megatron-LM say bf16 beside fp8."""
        given = [kind for kind in ("bf16", "fp16", "fp32", "fp8") if getattr(self, kind)]
        return ["fp8"] if given == ["bf16", "fp8"] else given

    def _check_formats(self, pins: Pins) -> None:
        """What Megatron-LM and MindSpeed say of accepted flags that ask for number formats."""
        if self.accumulate_allreduce_grads_in_fp32 and pins.get("gradient_reduction") == "bf16":
            raise InputError(
                "--accumulate-allreduce-grads-in-fp32 and gradients summed in bf16 "
                "(--grad-reduce-in-bf16) contradict each other; give one"
            )
        if self.reuse_fp32_param and not (self.bf16 or pins.get("precision") == "bf16"):
            raise InputError("--reuse-fp32-param is about weights in bf16; add --bf16 or leave it out")

    def _recompute_modules(self) -> str | None:
        words = [word.strip() for given in self.recompute_modules for word in given.split(",")]
        words += ["activation"] * self.recompute_activation_function
        if not words:
            return None
        if self.recompute_granularity == "full":
            raise InputError("--recompute-modules need --recompute-granularity selective, not full")
        unknown = [word for word in words if word not in _MODULES]
        if unknown:
            raise InputError(
                f"--recompute-modules {unknown[0]}: expected some of {', '.join(dict.fromkeys(_MODULES))}"
            )
        return ",".join(dict.fromkeys(_MODULES[word] for word in words))

    @property
    def _swaps_first_layers(self) -> bool:
        """MindSpeed: `--recompute-num-layers N` with `--swap-attention` recomputes the MLPs of N layers."""
        others = self.recompute_granularity, self.recompute_modules, self.recompute_activations
        swaps = self.swap_attention and not self.recompute_activation_function
        return swaps and not any(others) and self.recompute_num_layers is not None

    def notes(self) -> list[str]:
        """Flags that have no effect beside others."""
        layers = self.recompute_num_layers
        if layers is None or self.recompute_granularity or not self.recompute_activation_function:
            return []
        return [
            f"--recompute-num-layers {layers} has no effect beside --recompute-activation-function, which is "
            "about every layer"
        ]

    def _check_recompute(self) -> None:
        """Megatron-LM's rules: only full recomputation chooses layers, and how many needs a method.

        Scripts of MindSpeed name a number of layers beside swapped attention or activation functions.
        """
        if self.recompute_num_layers is not None and self.recompute_num_layers < 1:
            raise InputError(
                f"--recompute-num-layers {self.recompute_num_layers}: expected a whole number of at least 1"
            )
        if self._swaps_first_layers and self.recompute_method in (None, "block"):
            return
        if self.notes() and self.recompute_method is None:
            return
        for name, value in (
            ("--recompute-method", self.recompute_method),
            ("--recompute-num-layers", self.recompute_num_layers),
        ):
            if value is not None and self.recompute_granularity != "full":
                raise InputError(f"{name} {value} needs --recompute-granularity full")
        if self.recompute_method not in (None, *get_args(RecomputeMethod)):
            raise InputError(f"--recompute-method {self.recompute_method}: expected uniform or block")
        if self.recompute_num_layers is not None and self.recompute_method is None:
            raise InputError(
                f"--recompute-num-layers {self.recompute_num_layers} needs --recompute-method, "
                "uniform or block"
            )

    def _chunks(self, model: ModelSpec, pins: Pins, layers: int) -> int:
        flag_text = f"--num-layers-per-virtual-pipeline-stage {layers}"
        ranks = pins.get("pipeline_parallel")
        if not isinstance(ranks, int):
            raise InputError(f"{flag_text} needs --pipeline-model-parallel-size, one number")
        stages = ranks * layers
        if layers < 1 or model.layers % stages:
            raise InputError(
                f"{flag_text} x pipeline_parallel {ranks} does not divide the {model.layers} layers "
                f"of {model.name}"
            )
        return model.layers // stages
