"""Flags without effect beside a job's other flags; scripts have many of them, and each is noted once.

Nothing here refuses a job or needs torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from costmodels import Layout, ModelSpec
from planner.options.flags import flag_names

Reason = Callable[[Any], str | None]
"""A function of a job's flags, `spec` and `layout` that returns the reason why flags have no effect."""

ADAM = ("adam_beta1", "adam_beta2", "adam_eps")
MUON = (
    "muon_momentum",
    "no_muon_nesterov",
    "muon_num_ns_steps",
    "muon_scale_mode",
    "muon_extra_scale_factor",
)
CAME = ("came_beta1", "came_decay_rate", "came_beta3", "came_clip_threshold")
SCALES = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
BALANCE = ("moe_aux_loss_coeff", "moe_z_loss_coeff", "moe_router_load_balancing_type")

REASONS: tuple[tuple[tuple[str, ...], Reason], ...] = (
    (ADAM, lambda job: _optimizer(job, "adam", "adam8bit", "muon")),
    (("sgd_momentum",), lambda job: _optimizer(job, "sgd")),
    (MUON, lambda job: _optimizer(job, "muon")),
    (CAME, lambda job: _optimizer(job, "came")),
    (("min_lr",), lambda job: "--lr-decay-style is constant" if job.lr_decay_style == "constant" else None),
    (
        ("lr_decay_iters",),
        lambda job: (
            "--lr-decay-style is constant"
            if job.lr_decay_style == "constant" and job.lr_warmup_fraction is None
            else None
        ),
    ),
    (
        ("lr_wsd_decay_style",),
        lambda job: None if job.lr_decay_style == "WSD" else f"--lr-decay-style is {job.lr_decay_style}",
    ),
    (
        ("lr_warmup_init",),
        lambda job: None if job.lr_warmup_iters or job.lr_warmup_fraction else "there is no warm-up",
    ),
    (
        ("weight_decay",),
        lambda job: (
            None
            if job.weight_decay_incr_style == "constant"
            else "it grows from --start-weight-decay to --end-weight-decay"
        ),
    ),
    (
        ("loss_scale",),
        lambda job: (
            None if job.layout.precision == "fp16" else f"precision {job.layout.precision} needs none"
        ),
    ),
    (SCALES, lambda job: _scale(job)),
    (
        (*BALANCE, "moe_router_bias_update_rate"),
        lambda job: None if job.spec.moe_layers else f"{job.spec.name} has no experts",
    ),
    (
        ("moe_aux_loss_coeff",),
        lambda job: (
            "--moe-router-load-balancing-type is none"
            if job.moe_router_load_balancing_type == "none"
            else None
        ),
    ),
    (
        ("moe_router_bias_update_rate",),
        lambda job: None if job.spec.router.expert_bias else f"experts of {job.spec.name} have no biases",
    ),
    (
        ("reset_attention_mask", "reset_position_ids", "eod_mask_loss"),
        lambda job: (
            "--pack-documents keeps attention, positions and loss within documents, which end where they end "
            "in their file"
            if job.pack_documents
            else None
        ),
    ),
    (("split",), lambda job: "--train-data-path names data of its own" if job.train_data_path else None),
    (
        ("tokenizer_model",),
        lambda job: (
            f"{job.tokenizer_type} reads no such file"
            if job.tokenizer_type in ("GPT2BPETokenizer", "ByteTokenizer")
            else None
        ),
    ),
    (("vocab_file", "merge_file"), lambda job: _not_gpt2(job)),
    (("allow_data_change",), lambda job: None if job.load else "there is no --load"),
    (("save_interval",), lambda job: None if job.save else "there is no --save"),
    (("eval_interval",), lambda job: None if job.eval_iters else "--eval-iters is 0"),
    (
        ("max_skipped_steps",),
        lambda job: (
            "--no-check-for-nan-in-loss-and-grad skips none"
            if job.no_check_for_nan_in_loss_and_grad and job.skip_grad_norm_above is None
            else None
        ),
    ),
    (
        ("straggler_factor",),
        lambda job: "one rank has no other to be slower than" if job.layout.world_size == 1 else None,
    ),
)
"""Fields of groups of flags, and reasons why they have no effect. The first reason of a field counts."""


def _optimizer(job: Any, *users: str) -> str | None:
    return None if job.layout.optimizer in users else f"the optimizer is {job.layout.optimizer}"


def _scale(job: Any) -> str | None:
    if job.layout.precision != "fp16":
        return f"precision {job.layout.precision} needs no loss scale"
    return None if job.loss_scale is None else f"--loss-scale {job.loss_scale:g} is constant"


def _not_gpt2(job: Any) -> str | None:
    kind = job.tokenizer_type or ("HuggingFaceTokenizer" if job.tokenizer_model else None)
    return None if kind in (None, "GPT2BPETokenizer") else f"{kind} reads no such file"


def idle_flag_notes(*groups: Any, spec: ModelSpec | None = None, layout: Layout | None = None) -> list[str]:
    """One line for each reason why given flags of `groups` (dataclasses) have no effect here.

    Flags of training and of faults need the model and the layout, and `DataOptions` the `OutputOptions`.
    """
    job = SimpleNamespace(spec=spec, layout=layout)
    given: dict[str, str] = {}
    for group in groups:
        for field in dataclasses.fields(group):
            value = getattr(group, field.name)
            setattr(job, field.name, value)
            if value != field.default:
                name = flag_names(field)[0]
                shown = f"{value:g}" if isinstance(value, float) else str(value)
                given[field.name] = name if value is True else f"{name} {shown}"
    return list(_lines(job, given))


def _lines(job: Any, given: dict[str, str]) -> Iterator[str]:
    for names, reason in REASONS:
        idle = [name for name in names if name in given]
        why = reason(job) if idle else None
        if why is not None:
            words = ", ".join(given.pop(name) for name in idle)
            yield f"{words} {'has' if len(idle) == 1 else 'have'} no effect: {why}"
