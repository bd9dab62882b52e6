"""A small job of the same form as a large one, with fewer layers, widths, tokens and ranks."""

from __future__ import annotations

from math import lcm
from typing import Any

from costmodels.dataclass import dataclass
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec

HEAD_DIM = 16
"""Elements of an attention head in small jobs."""

MOST_TOKENS, MOST_VOCAB, MOST_EXPERTS = 128, 512, 4
"""Most tokens of a sequence, entries of the vocabulary and experts (more where ranks need them)."""

DEGREES = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel")
"""Degrees in the order in which ranks are assigned to them."""


@dataclass(frozen=True)
class SmallJob:
    """A small version of a job."""

    model: ModelSpec
    layout: Layout
    changes: tuple[str, ...]
    """Differences from the large job, in words."""


def scaled_down(model: ModelSpec, layout: Layout, ranks: int) -> SmallJob:
    """A job of the same form on at most `ranks` ranks, with degrees of at most 2.

    Degrees above 1 become 2, in the order tensor, pipeline, context, data, as far as ranks suffice.
    Recomputation, offload, ZeRO, schedule, and the choice of larger stages are unchanged.
    """
    degrees = _degrees(layout, ranks)
    small = _model(model, layout, degrees)
    fields = _layout(model, layout, degrees, small)
    made = Layout.model_validate(fields)
    changed = [
        f"{name} {getattr(before, name)} -> {getattr(after, name)}"
        for before, after in ((model, small), (layout, made))
        for name in type(before).model_fields
        if getattr(before, name) != getattr(after, name) and name not in ("name", "source", "max_positions")
    ]
    return SmallJob(small, made, tuple(changed))


def _degrees(layout: Layout, ranks: int) -> dict[str, int]:
    left = max(1, ranks)
    degrees = {}
    for name in DEGREES:
        degrees[name] = 2 if getattr(layout, name) > 1 and left >= 2 else 1
        left //= degrees[name]
    return degrees


def _stage_layers(layout: Layout, degrees: dict[str, int]) -> tuple[int, ...]:
    """Layers of each stage: one, or two where the large job's stage has more than its smallest stage."""
    chunks = min(layout.virtual_pipeline_parallel, 2) if degrees["pipeline_parallel"] > 1 else 1
    stages = degrees["pipeline_parallel"] * chunks
    least, listed = min(layout.layers_per_stage), layout.layers_per_stage
    if stages == 1:
        return (2,)
    # The stages at both ends, and those between them by their place.
    places = [round(stage * (len(listed) - 1) / (stages - 1)) for stage in range(stages)]
    return tuple(1 + (listed[place] > least) for place in places)


def _model(model: ModelSpec, layout: Layout, degrees: dict[str, int]) -> ModelSpec:
    tp, cp = degrees["tensor_parallel"], degrees["context_parallel"]
    per_group = model.heads // model.kv_heads
    kv_heads = 2 * tp * cp
    heads = kv_heads * min(per_group, 2)
    hidden = heads * HEAD_DIM

    def narrow(width: int) -> int:
        """A width with the original ratio to `hidden`, in multiples that ranks can divide."""
        unit = 8 * tp
        return max(unit, round(width / model.hidden * hidden / unit) * unit)

    seq = min(model.seq, lcm(2 * tp * cp, MOST_TOKENS))
    fields: dict[str, Any] = model.model_dump() | {
        "name": f"{model.name}-small",
        "layers": sum(_stage_layers(layout, degrees)),
        "hidden": hidden,
        "ffn": narrow(model.ffn),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "vocab": min(model.vocab, MOST_VOCAB),
        "seq": seq,
        "max_positions": max(seq, min(model.max_positions, seq)),
        "published_parameters": 0,
        "source": f"{model.name} in small",
    }
    fields |= _experts(model, narrow) | _latent(model, heads)
    return ModelSpec.model_validate(fields)


def _experts(model: ModelSpec, narrow: Any) -> dict[str, Any]:
    if not model.experts:
        return {}
    router = model.router.model_dump()
    experts = min(model.experts, MOST_EXPERTS)
    if model.router.groups > 1:
        router |= {"groups": 2, "top_groups": min(model.router.top_groups, 2)}
        experts = max(experts, 4)
    return {
        "experts": experts,
        "top_k": min(model.top_k, 2, experts),
        "expert_ffn": narrow(model.expert_ffn),
        "shared_expert_ffn": narrow(model.shared_expert_ffn) if model.shared_expert_ffn else 0,
        "dense_layers": min(model.dense_layers, 1),
        "router": router,
    }


def _latent(model: ModelSpec, heads: int) -> dict[str, Any]:
    latent = model.latent_attention
    if latent is None:
        return {}
    return {
        "latent_attention": {
            "q_lora_rank": 2 * HEAD_DIM if latent.q_lora_rank else 0,
            "kv_lora_rank": 2 * HEAD_DIM,
            "qk_nope_head_dim": HEAD_DIM,
            "qk_rope_head_dim": HEAD_DIM,
            "v_head_dim": HEAD_DIM,
        },
        "kv_heads": heads,
        "head_dim": 2 * HEAD_DIM,
    }


def _layout(model: ModelSpec, layout: Layout, degrees: dict[str, int], small: ModelSpec) -> dict[str, Any]:
    pipeline = degrees["pipeline_parallel"]
    chunks = min(layout.virtual_pipeline_parallel, 2) if pipeline > 1 else 1
    replicas = degrees["data_parallel"] * degrees["context_parallel"]
    batches = min(layout.micro_batches, 2 * pipeline)
    if pipeline > 1:
        batches = max(pipeline, batches // pipeline * pipeline)
    fields: dict[str, Any] = layout.model_dump() | degrees
    stage = degrees["tensor_parallel"] * replicas
    split = min(layout.expert_tensor_parallel, degrees["tensor_parallel"])
    spread = min(layout.expert_parallel, 2, stage // split, small.experts or 1)
    fields |= {
        "sequence_parallel": layout.sequence_parallel and degrees["tensor_parallel"] > 1,
        "virtual_pipeline_parallel": chunks,
        "schedule": layout.schedule if pipeline > 1 else "1f1b",
        "layers_per_stage": _stage_layers(layout, degrees),
        "expert_parallel": spread,
        "expert_tensor_parallel": split,
        "zero_stage": layout.zero_stage if replicas > 1 else 0,
        "zero_replicas": 2 if layout.zero_replicas > 1 and layout.zero_stage and replicas >= 4 else 1,
        "micro_batch_size": min(layout.micro_batch_size, 2),
        "recompute_num_layers": min(layout.recompute_num_layers, max(_stage_layers(layout, degrees))),
    }
    if degrees["context_parallel"] == 1:
        fields["context_parallel_form"] = "all_gather"
    fields["global_batch_size"] = fields["micro_batch_size"] * degrees["data_parallel"] * batches
    return fields
