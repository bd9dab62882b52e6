"""The flags of a planning job as dataclasses, in Megatron-LM's spelling where it has one.

The command line of `planner` and of `runtime.pretrain` take these flags through `planner.flags`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

from costmodels.catalogue.yaml_files import build, is_file_name
from costmodels.errors import InputError
from costmodels.layout import RecomputeMethod, Schedule
from costmodels.model_spec import ModelSpec
from planner.flags import arguments, flag
from planner.inputs import DEFAULT_DEVICE, DEFAULT_ENGINE, is_hf_config, resolve_model
from planner.pins import Pins, parse_pins, where_possible

DEFAULT_MODEL = "gpt-22b"
"""Model that is assumed when none is given: the GPT of 22 billion parameters of PAI's guide."""

DEFAULT_VOCAB = 50257
"""Vocabulary that is assumed for a model given by its dimensions: GPT-2's."""

TASK_TYPE = "llmacc.megatron.GPT"

_POSITIONS = {"learned_absolute": "learned", "rope": "rope", "none": "none"}
_NORMS = {"LayerNorm": "layernorm", "RMSNorm": "rmsnorm"}
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


@dataclass(frozen=True)
class ModelOptions:
    """What is trained: a named model, a model by its dimensions, or the one with changes by the other."""

    model: str | None = flag(None, "Catalogue name, or path of a Hugging Face config.json or a YAML file.")
    num_layers: int | None = flag(None, "Transformer layers.")
    hidden_size: int | None = flag(None, "Width of the residual stream.")
    ffn_hidden_size: int | None = flag(
        None, "Inner width of the MLP; 4 x hidden size unless given, 8/3 x with --swiglu (in steps of 64)."
    )
    num_attention_heads: int | None = flag(None, "Attention heads.")
    kv_channels: int | None = flag(None, "Width of one head; hidden size / heads unless given.")
    group_query_attention: bool = flag(False, "Use grouped-query attention.")
    num_query_groups: int | None = flag(None, "Key/value heads of grouped-query attention.")
    seq_length: int | None = flag(None, "Tokens of one training sample.")
    max_position_embeddings: int | None = flag(None, "Longest sequence; rows of a learned position table.")
    position_embedding_type: str | None = flag(None, "learned_absolute, rope or none.")
    rotary_base: float | None = flag(None, "Base of the rotary embedding.")
    normalization: str | None = flag(None, "LayerNorm or RMSNorm.")
    norm_epsilon: float | None = flag(None, "Epsilon of the norms.")
    swiglu: bool = flag(False, "Gated MLP with SiLU.")
    squared_relu: bool = flag(False, "MLP with squared ReLU.")
    disable_bias_linear: bool = flag(False, "No biases on the linear layers.")
    add_qkv_bias: bool = flag(False, "Biases on query, key and value even without other biases.")
    qk_layernorm: bool = flag(False, "Norms on queries and keys.")
    untie_embeddings_and_output_weights: bool = flag(False, "An output head of its own.")
    vocab_size: int | None = flag(None, "Entries of the tokenizer, before padding.")
    num_experts: int | None = flag(None, "Routed experts of a mixture of experts.")
    moe_router_topk: int | None = flag(None, "Experts of each token; 2 unless given.")
    moe_ffn_hidden_size: int | None = flag(None, "Inner width of one expert; that of the MLP unless given.")
    moe_shared_expert_intermediate_size: int | None = flag(None, "Inner width of all shared experts.")

    def spec(self) -> ModelSpec:
        """The model; raises `InputError` for an unknown one, missing dimensions or values that clash."""
        changes = self._changes()
        if self.model is None and {"layers", "hidden", "heads"} & changes.keys():
            return self._from_dimensions(changes)
        base = resolve_model(self.model or DEFAULT_MODEL, changes.pop("seq", None))
        return self._changed(base, changes) if changes else base

    def notes(self) -> list[str]:
        """What was assumed because no flag said it."""
        if self.model is not None:
            if self.seq_length is not None or not (is_file_name(self.model) or is_hf_config(self.model)):
                return []
            spec = self.spec()
            return [f"sequence length {spec.seq} of at most {spec.max_positions} (no --seq-length given)"]
        if self.num_layers is None:
            return [f"no model given: {DEFAULT_MODEL} (the GPT of PAI's guide)"]
        return [] if self.vocab_size else [f"no --vocab-size given: {DEFAULT_VOCAB} (GPT-2)"]

    def _changes(self) -> dict[str, Any]:
        """Fields of `ModelSpec` that a flag sets."""
        given: dict[str, Any] = {
            "layers": self.num_layers,
            "hidden": self.hidden_size,
            "ffn": self.ffn_hidden_size,
            "heads": self.num_attention_heads,
            "head_dim": self.kv_channels,
            "kv_heads": self._query_groups(),
            "seq": self.seq_length,
            "max_positions": self.max_position_embeddings,
            "position": _choice("--position-embedding-type", self.position_embedding_type, _POSITIONS),
            "rope_theta": self.rotary_base,
            "norm": _choice("--normalization", self.normalization, _NORMS),
            "norm_eps": self.norm_epsilon,
            "vocab": self.vocab_size,
            "experts": self.num_experts,
            "top_k": self.moe_router_topk,
            "expert_ffn": self.moe_ffn_hidden_size,
            "shared_expert_ffn": self.moe_shared_expert_intermediate_size,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        if self.swiglu and self.squared_relu:
            raise InputError("--swiglu and --squared-relu contradict each other; give one")
        if self.swiglu:
            changes |= {"gated": True, "activation": "silu"}
        if self.squared_relu:
            changes |= {"gated": False, "activation": "relu2"}
        if self.disable_bias_linear:
            changes["linear_bias"] = False
        if self.add_qkv_bias:
            changes["qkv_bias"] = True
        if self.qk_layernorm:
            changes["qk_norm"] = True
        if self.untie_embeddings_and_output_weights:
            changes["tied"] = False
        return changes

    def _query_groups(self) -> int | None:
        if self.group_query_attention:
            return self.num_query_groups or 1  # Megatron's default is one group.
        if self.num_query_groups is not None:
            raise InputError(f"--num-query-groups {self.num_query_groups} needs --group-query-attention")
        return None

    def _from_dimensions(self, changes: dict[str, Any]) -> ModelSpec:
        changes.setdefault("seq", self.max_position_embeddings)
        flags = {
            "layers": "--num-layers",
            "hidden": "--hidden-size",
            "heads": "--num-attention-heads",
            "seq": "--seq-length",
        }
        missing = [name for field, name in flags.items() if changes.get(field) is None]
        if missing:
            raise InputError(
                f"a model by its dimensions also needs {', '.join(missing)} (or give --model NAME)"
            )
        changes.setdefault("ffn", _usual_ffn(changes["hidden"], self.swiglu))
        changes.setdefault("vocab", DEFAULT_VOCAB)
        name = f"gpt-{changes['layers']}x{changes['hidden']}"
        return self._built({"name": name} | changes, "model")

    def _changed(self, base: ModelSpec, changes: dict[str, Any]) -> ModelSpec:
        """`base` with the fields that flags set; what followed from a changed width follows again."""
        values = base.model_dump(exclude={"published_parameters", "source"})
        hidden, gated = changes.get("hidden", base.hidden), changes.get("gated", base.gated)
        if (hidden, gated) != (base.hidden, base.gated) and "ffn" not in changes:
            if base.ffn != _usual_ffn(base.hidden, base.gated):
                gate = "--swiglu" if gated else "--squared-relu"
                flag_text = f"--hidden-size {hidden}" if hidden != base.hidden else gate
                raise InputError(
                    f"{flag_text} changes {base.name}, whose MLP is {base.ffn} wide: "
                    "give --ffn-hidden-size too"
                )
            values["ffn"] = _usual_ffn(hidden, gated)
        if {"hidden", "heads"} & changes.keys() and "head_dim" not in changes:
            values.pop("head_dim")
        if "heads" in changes and base.kv_heads == base.heads:
            values.pop("kv_heads")
        if base.seq > changes.get("max_positions", base.max_positions):
            raise InputError(
                f"--seq-length {base.seq} is longer than --max-position-embeddings {changes['max_positions']}"
            )
        if changes.get("position", base.position) != "rope":
            values["rope_scaling"] = ""
        if not base.experts:  # Their sizes, zero in a dense model, are the defaults again.
            values = {name: value for name, value in values.items() if name not in ("top_k", "expert_ffn")}
        name = f"{base.name} (changed)"
        return self._built(values | changes | {"name": name}, f"model {name}")

    def _built(self, values: dict[str, Any], origin: str) -> ModelSpec:
        """The model of `values`, with the defaults that the flags of experts promise."""
        if values.get("experts"):
            values = {"top_k": 2, "expert_ffn": values["ffn"]} | values
        spec = build(ModelSpec, values, origin)
        if self.rotary_base is not None and spec.position != "rope":
            raise InputError(
                f"--rotary-base {self.rotary_base:g}: {spec.name} has no rotary positions; add "
                "--position-embedding-type rope or leave it out"
            )
        return spec


def _usual_ffn(hidden: int, gated: bool) -> int:
    """Width of the MLP that Megatron-LM assumes (arguments.py `validate_args`).

    Four times the residual; of a gated MLP two thirds of that, rounded down to a multiple of 64, so that
    three matrices hold what two did.
    """
    return int((4 * hidden * 2 / 3) / 64) * 64 if gated else 4 * hidden


def check_alone(*groups: object) -> None:
    """Raise `InputError` when `groups` give flags beside a plan, which says all that they would."""
    given = [word for group in groups for word in arguments(group) if word.startswith("--")]
    if given:
        raise InputError(
            f"--plan decides model, batch and layout: {', '.join(dict.fromkeys(given))} cannot change it; "
            "leave that out, or plan again without --plan"
        )


@dataclass(frozen=True)
class ClusterOptions:
    """On what a job runs."""

    world_size: int | None = flag(None, "Devices of the job.")
    local_world_size: int | None = flag(None, "Devices of one node; as in the device's usual server.")
    device: str | None = flag(
        None, f"Catalogue name of the device (see `devices`); {DEFAULT_DEVICE} if none."
    )

    def required_world_size(self) -> int:
        """The world size; raises `InputError` when none is given."""
        if self.world_size is None:
            raise InputError("no world size: give --world-size, the number of devices of the job")
        return self.world_size

    def notes(self) -> list[str]:
        """What was assumed because no flag said it."""
        return [] if self.device else [f"no device given: {DEFAULT_DEVICE}"]


@dataclass(frozen=True)
class BatchOptions:
    """How many sequences one optimizer step takes: one of the two."""

    global_batch_size: int | None = flag(None, "Sequences of one step, exactly.")
    max_global_batch_size: int | None = flag(None, "Sequences of one step, at most.")


@dataclass(frozen=True)
class ParallelOptions:
    """Degrees of freedom that are fixed instead of searched, and who executes the layout."""

    pin: list[str] = flag(
        [], "Fix a degree, such as tp=8 or recompute=full; repeatable.", metavar="NAME=VALUE"
    )
    tensor_model_parallel_size: int | None = flag(None, "Fix tensor_parallel.")
    pipeline_model_parallel_size: int | None = flag(None, "Fix pipeline_parallel.")
    num_virtual_stages_per_pipeline_rank: int | None = flag(None, "Fix virtual_pipeline_parallel.")
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None, "Fix virtual_pipeline_parallel by the layers of one chunk."
    )
    pipeline_schedule: str | None = flag(
        None, f"Fix schedule: {', '.join(get_args(Schedule))}.", metavar="NAME"
    )
    context_parallel_size: int | None = flag(None, "Fix context_parallel.")
    cp_comm_type: str | None = flag(
        None, "Fix context_parallel_form wherever context_parallel > 1: p2p (ring), all_gather or a2a."
    )
    sequence_parallel: bool = flag(False, "Fix sequence_parallel=true wherever tensor_parallel > 1.")
    micro_batch_size: int | None = flag(None, "Fix micro_batch_size.")
    recompute_granularity: str | None = flag(None, "Fix recompute: full or selective.")
    recompute_activations: bool = flag(False, "Fix recompute=selective.")
    recompute_modules: list[str] = flag(
        [],
        "With selective recomputation: core_attn, layernorm, mlp, moe_act; several with commas between them, "
        "not blanks.",
        metavar="NAMES",
    )
    recompute_method: str | None = flag(None, "With --recompute-granularity full: uniform or block.")
    recompute_num_layers: int | None = flag(
        None, "Layers that uniform recomputation repeats from one input, or that block recomputes in a stage."
    )
    use_distributed_optimizer: bool = flag(False, "Fix zero_stage=1 wherever data_parallel > 1.")
    num_distributed_optimizer_instances: int | None = flag(None, "Fix zero_replicas.")
    optimizer_cpu_offload: bool = flag(False, "Fix offload_optimizer=true.")
    swap_attention: bool = flag(False, "Fix offload_activations=true.")
    grad_reduce_in_bf16: bool = flag(False, "Fix gradient_reduction=bf16.")
    bf16: bool = flag(False, "Train in bf16; the device's usual format unless one is given.")
    fp16: bool = flag(False, "Train in fp16.")
    fp32: bool = flag(False, "Train in fp32.")
    fp8: bool = flag(False, "Matrix products of the layers in fp8, all else in bf16.")
    engine: str = flag(DEFAULT_ENGINE, "Who executes the layout (see `engines`).")
    task_type: str | None = flag(None, f"Accepted for compatibility: {TASK_TYPE}.")

    def pins(self, model: ModelSpec) -> Pins:
        """All pins by full name; raises `InputError` for unknown, wrong or contradicting ones."""
        if self.task_type not in (None, TASK_TYPE):
            raise InputError(f"--task-type {self.task_type}: only {TASK_TYPE} is known")
        granularities = ("full", "selective")
        if self.recompute_granularity not in (None, *granularities):
            raise InputError(
                f"--recompute-granularity {self.recompute_granularity}: expected {' or '.join(granularities)}"
            )
        self._check_recompute()
        pairs = [
            ("tensor_parallel", self.tensor_model_parallel_size),
            ("pipeline_parallel", self.pipeline_model_parallel_size),
            ("virtual_pipeline_parallel", self.num_virtual_stages_per_pipeline_rank),
            ("schedule", self.pipeline_schedule),
            ("context_parallel", self.context_parallel_size),
            ("micro_batch_size", self.micro_batch_size),
            ("zero_replicas", self.num_distributed_optimizer_instances),
            ("offload_optimizer", self.optimizer_cpu_offload or None),
            ("offload_activations", self.swap_attention or None),
            ("gradient_reduction", "bf16" if self.grad_reduce_in_bf16 else None),
            ("recompute", self.recompute_granularity),
            ("recompute", "selective" if self.recompute_activations else None),
            ("recompute_modules", self._recompute_modules()),
            ("recompute_method", self.recompute_method),
            ("recompute_num_layers", self.recompute_num_layers),
            *(("precision", kind) for kind in self._precisions()),
        ]
        strings = [*self.pin, *(f"{name}={value}" for name, value in pairs if value is not None)]
        pins = parse_pins(strings)
        if self.num_layers_per_virtual_pipeline_stage is not None:
            chunks = self._chunks(model, pins, self.num_layers_per_virtual_pipeline_stage)
            pins = parse_pins([*strings, f"virtual_pipeline_parallel={chunks}"])
        # Megatron-LM's scripts set both whatever the layout: they do nothing in a group of one.
        if self.sequence_parallel:
            pins = where_possible(pins, "sequence_parallel", True)
        if self.use_distributed_optimizer:
            pins = where_possible(pins, "zero_stage", 1)
        form = _choice("--cp-comm-type", self.cp_comm_type, _CONTEXT_FORMS)
        return where_possible(pins, "context_parallel_form", form) if form else pins

    def _precisions(self) -> list[str]:
        """The formats that are asked for; scripts of Megatron-LM say bf16 beside fp8."""
        given = [kind for kind in ("bf16", "fp16", "fp32", "fp8") if getattr(self, kind)]
        return ["fp8"] if given == ["bf16", "fp8"] else given

    def _recompute_modules(self) -> str | None:
        words = [word.strip() for given in self.recompute_modules for word in given.split(",")]
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

    def _check_recompute(self) -> None:
        """Megatron-LM's rules: only full recomputation chooses layers, and how many needs a method."""
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
        if ranks is None:
            raise InputError(f"{flag_text} needs --pipeline-model-parallel-size")
        stages = int(str(ranks)) * layers
        if layers < 1 or model.layers % stages:
            raise InputError(
                f"{flag_text} x pipeline_parallel {ranks} does not divide the {model.layers} layers "
                f"of {model.name}"
            )
        return model.layers // stages


def _choice(name: str, value: str | None, choices: dict[str, str]) -> str | None:
    """What a flag's word means, None where it was not given."""
    if value is None:
        return None
    if value not in choices:
        raise InputError(f"{name} {value}: expected {', '.join(choices)}")
    return choices[value]
