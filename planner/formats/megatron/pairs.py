"""Flags of Megatron-LM that require or exclude other flags (arguments.py, `validate_args`), as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from planner.formats.facts.flag_catalogue import GivenFlag


class Need(NamedTuple):
    """A flag, and the flags of which at least one must be given with it."""

    flag: str
    one_of: tuple[str, ...]


class Conflict(NamedTuple):
    """Two flags that exclude each other."""

    flag: str
    other: str
    because: str = ""


_SHARDED = ("--use-distributed-optimizer", "--use-torch-fsdp2", "--use-megatron-fsdp", "--use-custom-fsdp")
_FP8 = ("--fp8-format", "--fp8-hybrid", "--fp8-e4m3")

NEEDS = (
    Need("--overlap-param-gather-with-optimizer-step", ("--overlap-param-gather",)),
    Need("--fp8-param-gather", _SHARDED),
    Need("--fp8-output-proj", _FP8),
    Need("--fp4-param-gather", ("--fp4-format",)),
    Need("--fp16-lm-cross-entropy", ("--fp16",)),
    Need("--fp32-residual-connection", ("--fp16", "--bf16")),
    Need("--save", ("--save-interval",)),
    Need("--optimizer-cpu-offload", ("--use-precision-aware-optimizer",)),
    Need("--tp-comm-overlap", ("--sequence-parallel",)),
    Need("--distribute-saved-activations", ("--recompute-method",)),
    Need("--load-main-params-from-ckpt", ("--no-load-optim",)),
    Need("--replication", ("--replication-jump",)),
    Need("--moe-pad-expert-input-to-capacity", ("--moe-expert-capacity-factor",)),
    Need("--moe-router-group-topk", ("--moe-router-num-groups",)),
    Need("--use-torch-fsdp2", ("--untie-embeddings-and-output-weights",)),
)

CONFLICTS = (
    Conflict("--data-path", "--data-args-path"),
    Conflict("--data-path", "--mock-data"),
    Conflict("--data-path", "--train-data-path"),
    Conflict("--train-samples", "--lr-decay-iters", "schedules go by samples then"),
    Conflict("--train-samples", "--lr-warmup-iters", "schedules go by samples then"),
    Conflict("--train-iters", "--lr-decay-samples", "schedules go by iterations then"),
    Conflict("--train-iters", "--lr-warmup-samples", "schedules go by iterations then"),
    Conflict("--lr-warmup-fraction", "--lr-warmup-iters"),
    Conflict("--lr-warmup-fraction", "--lr-warmup-samples"),
    Conflict("--num-layers", "--encoder-num-layers"),
    Conflict("--seq-length", "--encoder-seq-length"),
    Conflict("--fp4-format", "--fp8-format"),
    Conflict("--use-torch-fsdp2", "--use-distributed-optimizer"),
    Conflict("--use-torch-fsdp2", "--fp16"),
    Conflict("--deterministic-mode", "--use-flash-attn"),
    Conflict("--deterministic-mode", "--cross-entropy-loss-fusion"),
    Conflict("--enable-cuda-graph", "--external-cuda-graph"),
    Conflict("--num-layers-per-virtual-pipeline-stage", "--decoder-first-pipeline-num-layers"),
    Conflict("--num-layers-per-virtual-pipeline-stage", "--decoder-last-pipeline-num-layers"),
    Conflict(
        "--cpu-offloading", "--recompute-granularity", "recomputed activations are not kept, so not offloaded"
    ),
)


_NONE_AT_ZERO = ("--lr-warmup-iters", "--lr-warmup-samples", "--lr-warmup-fraction")
"""Flags that have no effect where their value is 0."""
_ZEROS = ("0", "0.0")


def broken_pairs(flags: Mapping[str, GivenFlag]) -> Iterator[tuple[str, str, str]]:
    """The flag, the error and the remedy of each broken pair."""
    given = {name for name, flag in flags.items() if name not in _NONE_AT_ZERO or flag.text not in _ZEROS}
    for need in NEEDS:
        if need.flag in given and not set(need.one_of) & given:
            yield need.flag, f"needs {' or '.join(need.one_of)}", "add it, or leave this out"
    for flag, other, because in CONFLICTS:
        if {flag, other} <= given and flags[flag].name != flags[other].name:  # Else one is an earlier name.
            yield other, f"and {flag} are given both" + (f": {because}" if because else ""), "leave one out"
