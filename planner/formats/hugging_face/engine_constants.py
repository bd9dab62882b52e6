"""Constants of an engine that the files of a Hugging Face job decide: bytes of states, loss and buffers."""

from __future__ import annotations

from typing import Any

from costmodels.dataclass import dataclass
from costmodels.memory.states import NARROW
from costmodels.spec.model import ModelSpec
from planner.formats.hugging_face import deepspeed_config
from planner.formats.hugging_face.job import Job

LIGER = ("--use_liger_kernel", "--use_liger", "--enable_liger_kernel")
"""Switches of all kernels of Liger, its fused loss among them."""

_FUSED = "--liger_fused_linear_cross_entropy"
_CUT = "--cut_cross_entropy"
_CUTS = "CutCrossEntropyPlugin"
"""axolotl's plugin, on unless `cut_cross_entropy` is false (integrations/cut_cross_entropy/args.py)."""

_BUCKET = "zero_optimization.reduce_bucket_size"
_OVERLAPS = "zero_optimization.overlap_comm"
_COPIES = "zero_optimization.contiguous_gradients"

_LIVE = ("zero_optimization.stage3_max_live_parameters", "zero_optimization.max_live_parameters")
_GROUP = "zero_optimization.sub_group_size"
_SECOND = "zero_optimization.zero_hpz_partition_size"

DEFAULT_BUCKET = 5e8
"""Elements of DeepSpeed's `reduce_bucket_size` (deepspeed/runtime/zero/config.py)."""

SWIFT_BUCKET = 2e8
"""Elements of `reduce_bucket_size` in ms-swift's own files of ZeRO 0 to 2, which do not overlap
(swift/config/zero*.json)."""


def fuses_loss(job: Job, model: ModelSpec | None) -> bool:
    """Return whether the head's GEMM and the loss are one operation, so that logits are never whole."""
    if job.command.switch(_FUSED) or has_liger(job, model):
        return True
    plugged = _CUTS in (job.command.text("--plugins") or "")
    return job.command.switch(_CUT, default=plugged)


def has_liger(job: Job, model: ModelSpec | None) -> bool:
    """Return whether Liger's kernels replace those of the model (liger_kernel/transformers/monkey_patch.py).

    They are written for the blocks of Llama and its kin; other models run without them, or with some of them.
    """
    if model is None or not any(name in job.command and job.command.switch(name) for name in LIGER):
        return False
    usual = model.gated and model.norm == "rmsnorm" and model.position == "rope"
    return usual and model.latent_attention is None and model.linear_attention is None


@dataclass(frozen=True)
class Facts:
    """Facts about a job that decide constants of its engine."""

    engine: str
    stage: int
    world_size: int | None
    narrow: bool
    """True if weights, gradients and optimizer states are all in 16 bits."""


def engine_constants(job: Job, model: ModelSpec | None, facts: Facts) -> dict[str, Any]:
    """Constants by names such as `loss.chunked`, instead of those of the engine."""
    found: dict[str, Any] = {}
    if facts.narrow:
        # A model that is not sharded stays as it is loaded; accelerate adds a copy in fp32 where it shards.
        found["sharding.narrow_stages"] = (0, 2, 3) if job.is_under_fsdp else (0,)
    if fuses_loss(job, model):
        found["loss.chunked"] = True
    if has_liger(job, model):
        # Norms keep their input, and the activation its two (liger_kernel/ops/rms_norm.py, swiglu.py).
        found |= {"activations.norm_bytes": 0.0, "activations.fused_activation": True}
    if (job.command.text("--optim") or "").lower() == "adamw_torch" and facts.engine != "deepspeed":
        # transformers/trainer_optimizer.py asks for the fused kernel by its own name alone.
        found["sharding.copies_moment"] = True
    if facts.engine == "deepspeed" and model is not None:
        found |= _buckets(job, model, facts.stage) | _second_copy(job, facts)
    return found


def _buckets(job: Job, model: ModelSpec, stage: int) -> dict[str, Any]:
    """Constants of DeepSpeed's buffers.

    ZeRO 1 and 2 have a bucket of gradients, and a second one if reductions overlap with the backward pass
    (stage_1_and_2.py, `setup_buckets`). ZeRO 3 has one (stage3.py).
    """
    if stage == 0:
        return {}
    keys = job.deepspeed
    size, overlaps = DEFAULT_BUCKET, stage == 3
    if job.software == "ms-swift" and not keys.entries:
        size, overlaps = (SWIFT_BUCKET if stage < 3 else float(model.hidden**2)), False
    if keys.text(_BUCKET) == deepspeed_config.AUTO:
        size = float(model.hidden**2)  # transformers/integrations/deepspeed.py
    elif _BUCKET in keys:
        number_of_elements = keys.number(_BUCKET)
        size = size if number_of_elements is None else number_of_elements
    if keys.text(_OVERLAPS) not in (None, deepspeed_config.AUTO):
        overlaps = keys.switch(_OVERLAPS)
    number = 2 if overlaps and stage < 3 else 1
    if _COPIES in keys and not keys.switch(_COPIES):
        number = 0
    found: dict[str, Any] = {"allocator.workspace_bytes": number * size * NARROW}
    live, group = keys.number(*_LIVE), keys.number(_GROUP)
    if live is not None:
        # With 0, parameters are freed after each layer, as those of FSDP are.
        found["sharding.live_parameters"] = live
    if group is not None:
        # With 0, each parameter is a group (stage3.py, `_create_fp16_sub_groups`).
        found["sharding.stepping_group"] = group or float(model.hidden * max(model.vocab, model.ffn))
    return found


def _second_copy(job: Job, facts: Facts) -> dict[str, Any]:
    """Constants of ZeRO++'s second copy of the parameters (deepspeed/utils/groups.py,
    `_create_zero_param_parallel_group`)."""
    ranks = deepspeed_config.count(job.deepspeed, _SECOND) if _SECOND in job.deepspeed else None
    if facts.stage < 3 or ranks is None or ranks < 2:
        return {}
    if facts.world_size is not None and facts.world_size % min(ranks, facts.world_size):
        job.deepspeed.add("illegal", f"{ranks} ranks do not divide {facts.world_size}", _SECOND)
    return {"sharding.secondary_shards": ranks}
