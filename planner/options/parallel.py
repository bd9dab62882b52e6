"""The flags of degrees and of the engine, in Megatron-LM's spelling where it has one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any, ClassVar, get_args

from costmodels.catalogue import engine_names
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.hardware import NARROW, Precision
from costmodels.spec.layout import Fp8Recipe, Layout, MuonMode, Optimizer, RecomputeMethod, Schedule
from costmodels.spec.model import ModelSpec
from costmodels.spelling import or_nearest
from planner.inputs.engine import DEFAULT_ENGINE
from planner.inputs.pin_notation import without_pins
from planner.inputs.pins import (
    GROUP_DEGREES,
    Pins,
    degree_words,
    parse_pins,
    pin_words,
    where_possible,
    with_pin,
)
from planner.options.flags import arguments, flag
from planner.options.megatron import AcceptedFlags, accepted_names
from planner.options.model import choice

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


def check_alone(*groups: object, beside: str = "--plan") -> None:
    """Raise `InputError` when flags of `groups` are given beside a plan, or files, that already decide
    them."""
    for group in groups:
        if isinstance(group, AcceptedFlags):
            group.check_accepted()
    words = [word for group in groups for word in arguments(group) if word.startswith("--")]
    given = [word for word in words if word not in accepted_names()]
    if given:
        raise InputError(
            f"{beside} decides model, batch and layout: {', '.join(dict.fromkeys(given))} cannot change it; "
            f"leave that out, or plan again without {beside}"
        )


def _degree(name: str, megatron: str, short: str) -> Any:
    """A flag for a degree: Megatron-LM's spelling, the degree's own, and a short one."""
    names = (megatron, f"--{name.replace('_', '-')}", short)
    text = f"Fix or narrow {name}: 8, 2..8, ..4 or 2,4."
    return flag(None, text, *names, metavar="NUMBER|RANGE", degree=name)


@dataclass(frozen=True)
class ParallelOptions(AcceptedFlags):
    """Degrees of freedom that are fixed instead of searched, and the engine."""

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
        values=pin_words,
    )
    forbid: list[str] = flag(
        [],
        "Leave out values of a degree, such as tp=16, schedule=zbv,dualpipev or zero=2..3; repeatable.",
        metavar="NAME=VALUE",
        values=pin_words,
    )
    unpin: list[str] = flag(
        [],
        "Let the search choose a degree, such as zero or recompute, whatever other flags say; repeatable.",
        metavar="NAME",
        values=degree_words,
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
    num_distributed_optimizer_instances: int | None = flag(
        None, "Fix zero_replicas: copies of the states that ZeRO splits.", degree="zero_replicas"
    )
    optimizer_cpu_offload: bool = flag(False, "Fix offload_optimizer=true.", degree="offload_optimizer")
    swap_attention: bool = flag(False, "Fix offload_activations=true.", degree="offload_activations")
    optimizer: str | None = flag(
        None,
        f"Fix optimizer: {', '.join(get_args(Optimizer))}; adam unless given.",
        values=lambda: get_args(Optimizer),
    )
    muon_tp_mode: str | None = flag(
        None,
        "Division of the work of --optimizer muon among tensor-parallel ranks: "
        f"{', '.join(get_args(MuonMode)[1:])}; the engine's own way unless given.",
        degree="muon_mode",
        values=lambda: get_args(MuonMode)[1:],
    )
    grad_reduce_in_bf16: bool = flag(False, "Fix gradient_reduction=bf16.", degree="gradient_reduction")
    bf16: bool = flag(False, "Train in bf16; the device's usual format unless one is given.")
    fp16: bool = flag(False, "Train in fp16.")
    fp32: bool = flag(False, "Train in fp32.")
    fp8: bool = flag(False, "GEMMs of the layers in fp8, all else in bf16.")
    fp8_recipe: str | None = flag(
        None,
        "Scales of --fp8: tensorwise (here the default), rowwise, rowwise_with_gw_hp, or other engines' own; "
        "mxfp8 is --mxfp8.",
        values=lambda: (*get_args(Fp8Recipe)[1:], "mxfp8"),
    )
    fp8_param_gather: bool = flag(False, "ZeRO gathers weights in fp8, if their scales are tensorwise.")
    mxfp8: bool = flag(False, "GEMMs of the layers in MXFP8 (one scale per 32 values); Blackwell only.")
    nvfp4: bool = flag(False, "GEMMs of the layers in NVFP4 (one scale per 16 values); Blackwell only.")
    expert_halves: bool = flag(
        False,
        "Dispatch the tokens of a microbatch to experts in two parts: one travels while experts compute the "
        "other.",
    )
    cuda_graphs: bool = flag(
        False,
        "Launch forward and backward of a microbatch as one CUDA graph, so that small layers no longer "
        "wait for the host. Not with pipeline stages, ZeRO, expert parallelism or rings. For layouts "
        "whose graphs hold no collective, the search decides unless a pin does (cuda_graphs=false).",
    )
    engine: str | None = flag(
        None,
        "Software that executes the layout, and whose rules decide which layouts are legal: a name of "
        f"`engines`, or a YAML file; {DEFAULT_ENGINE} unless given, or on NPUs mindspeed.",
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
                + or_nearest(self.recompute_granularity, granularities)
            )
        self._check_recompute()
        pins = parse_pins([*self.pin, *self._given()], self.forbid)
        self._check_formats(pins)
        if self.num_layers_per_virtual_pipeline_stage is not None:
            chunks = self._chunks(model, pins, self.num_layers_per_virtual_pipeline_stage)
            pins = with_pin(pins, "virtual_pipeline_parallel", chunks)
        # Megatron-LM's scripts set both whatever the layout: they do nothing in a group of one.
        if self.sequence_parallel:
            pins = where_possible(pins, "sequence_parallel", True)
        if self.use_distributed_optimizer:
            pins = where_possible(pins, "zero_stage", 1)
        form = choice("--cp-comm-type", self.cp_comm_type, _CONTEXT_FORMS)
        pins = where_possible(pins, "context_parallel_form", form) if form else pins
        return without_pins(pins, self.unpin)

    def _given(self) -> Iterator[tuple[str, object]]:
        """Values of the degrees that flags fix, by the `degree` of the flag or by the name of its field."""
        swaps = self._swaps_first_layers
        instead: dict[str, object] = {
            "grad_reduce_in_bf16": self.grad_reduce_in_bf16 and "bf16",
            "recompute_activations": self.recompute_activations and "selective",
            "recompute_modules": "mlp" if swaps else self._recompute_modules(),
            "recompute_method": "block" if swaps else self.recompute_method,
            "recompute_num_layers": None if self.notes() else self.recompute_num_layers,
            "fp8_recipe": None if self.fp8_recipe == "mxfp8" else self.fp8_recipe,
            **dict.fromkeys(GROUP_DEGREES),
            "use_distributed_optimizer": None,
        }
        for field in fields(self):
            degree = field.metadata.get("degree") or field.name
            value = instead.get(field.name, getattr(self, field.name))
            if degree in Layout.model_fields and value is not None and value is not False:
                yield degree, value
        yield from (("precision", kind) for kind in self._precisions())

    def _precisions(self) -> list[str]:
        """The requested number formats; scripts of Megatron-LM give bf16 beside formats of fewer bits."""
        given = [kind for kind in get_args(Precision) if getattr(self, kind, False)]
        if self.fp8_recipe == "mxfp8":
            # Megatron-LM's spelling: a recipe of its formats in 8 bits.
            given = [*(kind for kind in given if kind not in ("fp8", "mxfp8")), "mxfp8"]
        narrow = [kind for kind in given if kind in NARROW]
        return narrow if narrow and given == ["bf16", *narrow] else given

    def _check_formats(self, pins: Pins) -> None:
        """Raise Megatron-LM's and MindSpeed's errors about accepted flags that ask for number formats."""
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
        if self.swap_attention:
            return [
                f"--recompute-num-layers {layers}: with --swap-attention MindSpeed recomputes the MLPs of so "
                "many layers of a stage too; beside --recompute-activation-function that is not priced"
            ]
        return [
            f"--recompute-num-layers {layers} has no effect beside --recompute-activation-function, which is "
            "about every layer"
        ]

    def _check_recompute(self) -> None:
        """Raise `InputError` by Megatron-LM's rules: only full recomputation chooses layers, and a number of
        layers needs a method.

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
