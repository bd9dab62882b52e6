"""Flags of other tools' scripts that are unknown here, and the flags that replace them."""

from __future__ import annotations

from collections.abc import Container

from costmodels.spec.layout import SHORT_NAMES, Layout

SUBSTITUTES = {
    "--context-parallel-algo": "use --cp-comm-type: a2a for Ulysses, p2p for a ring",
    "--moe-tp-extend-ep": "use --expert-tensor-parallel-size 1, and an expert-parallel size times tp",
    "--train-samples": "use --train-iters",
    "--lr-decay-samples": "use --lr-decay-iters",
    "--lr-warmup-samples": "use --lr-warmup-iters",
    "--use-cpu-initialization": "leave it out: initial weights are the same on every device",
    "--use-torch-fsdp2": "use --pin zero=3",
    "--use-megatron-fsdp": "use --pin zero=3",
    "--use-custom-fsdp": "use --pin zero=3",
    "--fsdp": "use --pin zero=3",
    "--data-parallel-sharding-strategy": "use --pin zero=1, 2 or 3",
    "--deepspeed": "use --engine deepspeed to price layouts that DeepSpeed runs",
    "--deepspeed-config": "use --engine deepspeed to price layouts that DeepSpeed runs",
    "--rope-theta": "use --rotary-base",
    "--num-key-value-heads": "use --group-query-attention --num-query-groups",
    "--intermediate-size": "use --ffn-hidden-size",
    "--num-hidden-layers": "use --num-layers",
    "--nproc-per-node": "use --local-world-size",
    "--gpus-per-node": "use --local-world-size",
    "--nnodes": "use --world-size, the devices of all nodes",
    "--num-gpus": "use --world-size",
    "--gpus": "use --world-size",
    "--num-devices": "use --world-size",
    "--batch-size": "use --global-batch-size or --micro-batch-size",
}
"""Replacements by the other tool's flag, spelled with dashes."""


def substitute(name: str, known: Container[str]) -> str:
    """The advice for an unknown flag: a flag to give instead; empty where there is none.

    Args:
        known: flags of the command; the advice names no other flags.
    """
    spelled = name.lower().replace("_", "-")
    said = SUBSTITUTES.get(spelled, "")
    degree = spelled.lstrip("-").replace("-", "_")
    if not said and (degree in SHORT_NAMES or degree in Layout.model_fields):
        short = "--" + degree.replace("_", "-")
        said = f"use {short}" if short in known else f"use --pin {degree}=VALUE"
    mentioned = [word.strip(",:") for word in said.split() if word.startswith("--")]
    return said if all(word in known for word in mentioned) else ""
