"""Random models and layouts that the runtime runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar

from costmodels import LatentAttention, Layout, ModelSpec, even_split
from costmodels.spec.layout import SPLIT_BACKWARD, RecomputeMethod, Schedule
from costmodels.spec.model_parts import MultiTokenPrediction
from costmodels.spec.table import LayoutTable
from planner.space.kind_rules import kind_rules
from planner.space.rules import first_violation

OPTIMIZERS = ["adam", "adam", "adam", "sgd", "adafactor", "muon"]

MORE_OPTIMIZERS = ["adam8bit"] if find_spec("torchao") else []
"""Optimizers that examples have besides where they are installed."""

FP8 = ["fp8"] if find_spec("torchao") else []

SCHEDULES: tuple[Schedule, ...] = ("interleaved", "interleaved_zb", "zbv", "dualpipev")
"""Schedules of several stages on a rank; the last two have two of them."""

Chosen = TypeVar("Chosen")
Choose = Callable[[Sequence[Any]], Any]
"""Takes one of several values."""

MODULES: tuple[tuple[str, ...], ...] = (
    ("core_attention",),
    ("mlp",),
    ("norm",),
    ("norm", "activation"),
    ("core_attention", "mlp", "norm"),
)


class Example(NamedTuple):
    """One pipeline rank of a job."""

    model: ModelSpec
    layout: Layout
    rank: int
    """The pipeline rank."""
    compiled: bool
    """True if layers are compiled."""

    def describe(self) -> str:
        """In one line."""
        layers = "compiled" if self.compiled else "eager"
        layout = f"{self.layout.describe()} {self.layout.precision}"
        return f"rank {self.rank} of {layout}, {layers}: {self.model!r}"


KINDS = ("plain", "window", "sinks", "linear", "capped", "further")
"""Kinds of models: attention of all tokens, windows, these with sinks, Gated DeltaNet, scores with caps, MTP.

Some models have sequences of no whole number of steps, or of few steps.
"""


def draw_kind(choose: Choose, kind: str) -> dict[str, Any]:
    """Random fields of models of a kind."""
    if kind == "plain":
        return {}
    if kind == "further":
        return {"mtp": MultiTokenPrediction(depths=choose([1, 2]))}
    if kind == "linear":
        keys = choose([4, 8])
        sizes = {
            "kind": "gated_delta",
            "key_heads": keys,
            "value_heads": keys * choose([1, 2]),
            "key_dim": choose([64, 96]),
            "value_dim": choose([64, 128]),
            "chunk": choose([64, 64, 80]),
        }
        pattern = choose([("linear",), ("linear", "full"), ("linear", "linear", "full")])
        gate, norm = choose([False, True]), choose([False, True])
        own = {"attention_gate": gate, "norm_from_one": norm, "seq": choose([1024, 2048, 4096, 2000, 192])}
        return {"linear_attention": sizes, "attention_pattern": pattern} | own
    pattern = choose([("window",), ("window", "full"), ("full", "window", "window")])
    found = {"window": choose([256, 512, 1000]), "attention_pattern": pattern}
    if kind == "capped":
        own = {"attention_softcap": 50.0, "logits_softcap": choose([0.0, 30.0])}
        return found | own | {"seq": choose([1024, 2048, 4096, 2000, 3120])}
    return found | {"attention_sinks": kind == "sinks"}


def draw_model(choose: Choose, depths: Sequence[int]) -> ModelSpec:
    """A random model, wide enough for errors to show, of one of these numbers of layers.

    Raises:
        ValueError: its fields contradict each other.
    """
    heads, head_dim = choose([8, 16]), choose([64, 128, 128, 80])
    kind = choose(["plain", *KINDS])
    gated = choose([False, True])
    latent = kind in ("plain", "further", "linear") and choose([False, False, True])
    if latent:
        extra: dict[str, Any] = {"latent_attention": draw_latent(choose), "kv_heads": heads}
    else:
        extra = {"kv_heads": choose([heads, heads, 4, 2])}
    fields: dict[str, Any] = {
        "name": "drawn",
        "layers": choose(depths),
        "hidden": choose([1024, 2048, 4096]),
        "heads": heads,
        "head_dim": head_dim,
        "ffn": choose([2048, 2816, 8192]),
        "vocab": choose([8000, 32000, 50257]),
        "seq": choose([1024, 2048, 4096]),
        "gated": gated,
        "activation": "silu" if gated else choose(["gelu", "gelu_tanh", "relu2"]),
        "norm": choose(["layernorm", "rmsnorm"]),
        "position": choose(["learned", "rope", "none"]),
        "tied": choose([False, True]),
        "linear_bias": choose([False, True]),
        "qkv_bias": choose([False, True]),
        "qk_norm": choose([False, True]) and not latent,
        **extra,
        **(draw_experts(choose) if choose([False, False, True]) else {}),
    }
    return ModelSpec(**(fields | draw_kind(choose, kind)))


def draw_experts(choose: Choose) -> dict[str, Any]:
    """Random experts."""
    shared, groups = choose([0, 0, 1024]), choose([1, 1, 2, 4])
    return {
        "experts": choose([4, 8, 16]),
        "top_k": choose([1, 2, 4]),
        "expert_ffn": choose([512, 1024, 2048]),
        "dense_layers": choose([0, 0, 1, 8]),
        "shared_expert_ffn": shared,
        "shared_expert_gate": bool(shared) and choose([False, True]),
        "router": {
            "score": choose(["softmax", "sigmoid"]),
            "scale": choose([1.0, 1.0, 2.5]),
            "normalised": choose([False, True]),
            "groups": groups,
            "top_groups": choose([1, 2]) if groups > 1 else 1,
            "group_score": choose(["max", "top2"]) if groups > 1 else "max",
            "expert_bias": choose([False, True]),
            "capacity_factor": choose([0.0, 0.0, 0.0, 0.5, 1.0, 1.5]),
        },
    }


def draw_latent(choose: Choose) -> LatentAttention:
    """Random sizes of latent attention."""
    return LatentAttention(
        q_lora_rank=choose([0, 768]),
        kv_lora_rank=choose([256, 512]),
        qk_nope_head_dim=choose([64, 128]),
        qk_rope_head_dim=choose([32, 64]),
        v_head_dim=choose([64, 128]),
    )


def draw_layout(choose: Choose, model: ModelSpec, blocks: Sequence[int]) -> Layout:
    """A random layout of up to 64 ranks, legal or not.

    Raises:
        ValueError: its fields contradict each other.
    """
    tp, dp, cp = choose([1, 1, 2, 4]), choose([1, 2, 4, 8]), choose([1, 1, 1, 2])
    pipeline = min(choose([1, 1, 2, 3, 4]), model.layers)
    zero: Any = choose([0, 1, 2, 3]) if dp * cp > 1 else 0
    size, more = choose([1, 1, 2]), choose([0, 1, 2, 4])
    recompute = choose(["none", "none", "full", "selective"])
    method: RecomputeMethod = choose(["uniform", "uniform", "block"]) if recompute != "none" else "uniform"
    is_full = recompute == "full"
    chunks = choose([1, 1, 2, 3, 4]) if 1 < pipeline <= model.layers // 2 else 1
    chunks = min(chunks, model.layers // pipeline)
    schedule: Any = choose(SCHEDULES[: 4 if chunks == 2 else 2]) if chunks > 1 else "1f1b"
    fewest = 2 * pipeline if schedule == "dualpipev" else max(1, pipeline)
    split = list(even_split(model.layers, pipeline * chunks))
    if pipeline > 1 and split[-1] > 1 and choose([False, True]):
        split[0], split[-1] = split[0] + 1, split[-1] - 1
    return Layout(
        tensor_parallel=tp,
        sequence_parallel=tp > 1 and choose([False, True]),
        pipeline_parallel=pipeline,
        virtual_pipeline_parallel=chunks,
        schedule=schedule,
        layers_per_stage=tuple(split),
        context_parallel=cp,
        context_parallel_form=choose(["all_gather", "all_to_all", "ring"]) if cp > 1 else "all_gather",
        expert_parallel=choose([1, 2, 4]) if model.experts else 1,
        expert_tensor_parallel=choose([1, 1, 2]) if model.experts else 1,
        data_parallel=dp,
        zero_stage=zero,
        zero_replicas=choose([1, 1, 2, 4]) if zero else 1,
        micro_batch_size=size,
        global_batch_size=size * dp * (fewest + more),
        recompute=recompute,
        recompute_modules=choose(MODULES) if recompute == "selective" else (),
        recompute_method=method,
        recompute_num_layers=choose(blocks if method == "block" else [1, 1, 2, 3]) if is_full else 1,
        offload_activations=choose([False, False, False, True]),
        precision=choose(["bf16", "bf16", "fp16", "fp32", *FP8]),
        gradient_reduction=choose(["fp32", "fp32", "bf16"]),
        optimizer=choose([*OPTIMIZERS, *MORE_OPTIMIZERS]),
        offload_optimizer=choose([False, False, False, True]),
    )


def draw(choose: Choose, depths: Sequence[int], blocks: Sequence[int]) -> Example | None:
    """A random example; None for what the runtime does not run.

    Args:
        depths: numbers of layers that a model may have.
        blocks: numbers of layers that may recompute where not all do.
    """
    compiled = choose([False, True])
    try:
        model = draw_model(choose, depths)
        layout = draw_layout(choose, model, blocks)
    except ValueError:
        return None
    if layout.world_size > 64 or first_violation(model, layout) is not None:
        return None
    if any(bool(rule.broken(model, LayoutTable.one(layout))) for rule in kind_rules(layout.precision)):
        return None
    if compiled and layout.schedule in SPLIT_BACKWARD:
        return None
    return Example(model, layout, choose(range(layout.pipeline_parallel)), compiled)
