"""Earlier names of Megatron-LM's flags, and their names in software built on it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

from planner.formats.facts.flag_catalogue import GivenFlag, known_flags
from planner.formats.facts.reading import Problems
from planner.formats.megatron.mindspeed_layers import dense_layers
from planner.formats.shell.text import Word

ALIASES = {
    "--encoder-num-layers": "--num-layers",
    "--encoder-seq-length": "--seq-length",
    "--padded-vocab-size": "--vocab-size",
    "--pad-vocab-size-to": "--vocab-size",
    "--moe-expert-parallel-size": "--expert-model-parallel-size",
    "--ds-sequence-parallel-size": "--context-parallel-size",
    "--moe-train-capacity-factor": "--moe-expert-capacity-factor",
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--activations-checkpoint-method": "--recompute-method",
    "--activations-checkpoint-num-layers": "--recompute-num-layers",
    "--checkpoint-num-layers": "--recompute-num-layers",
    "--moe-intermediate-size": "--moe-ffn-hidden-size",
    "--shared-moe-ffn-hidden-size": "--moe-shared-expert-intermediate-size",
    "--qk-nope-head-dim": "--qk-head-dim",
    "--qk-rope-head-dim": "--qk-pos-emb-head-dim",
    "--multi-head-latent-attention": "--multi-latent-attention",
    "--intermediate-size": "--ffn-hidden-size",
    "--topk": "--moe-router-topk",
    "--moe-topk": "--moe-router-topk",
    "--cpu-optimizer": "--optimizer-cpu-offload",
    "--num-key-value-heads": "--num-query-groups",
    "--rotary-position-embeddings-theta": "--rotary-base",
    "--layernorm-epsilon": "--norm-epsilon",
}
"""Present flags by other flags of the same meaning: those of Megatron-LM 1 to 3, of Megatron-DeepSpeed, of
MindSpeed-LLM and of Pai-Megatron-Patch."""

IMPLIED = {
    "--activations-checkpoint-method": ("--recompute-granularity", "full"),
    "--num-key-value-heads": ("--group-query-attention", ""),
}
"""The flag and the value that an earlier flag implies besides its own meaning."""

MICRO = "--micro-batch-size"

_ONE_GROUP = "--attention-head-type"
"""Number of query groups by BigCode's flag: `multiquery` is one group."""

REFUSED = {
    "--batch-size": "--micro-batch-size and --global-batch-size",
    "--warmup": "--lr-warmup-fraction",
    "--model-parallel-size": "--tensor-model-parallel-size",
}
"""Flags that the parser refuses by name, and the flags that it suggests instead (arguments.py,
`validate_args`)."""


def with_todays_names(given: Mapping[str, GivenFlag], problems: Problems) -> dict[str, GivenFlag]:
    """The flags with aliases replaced by present flags; where both are given, the present flag counts.

    A replaced flag keeps its own name and line for messages.
    """
    found = dict(given)
    for name, today in ALIASES.items():
        if name in given and today not in given:
            found[today] = dataclasses.replace(given[name], known=known_flags()[today])
    for name, (today, text) in IMPLIED.items():
        if name in given and today not in given:
            found[today] = _made(given[name], today, text)
    kind = found.get(_ONE_GROUP)
    if kind is not None and kind.text == "multiquery":
        found["--group-query-attention"] = _made(kind, "--group-query-attention", "")
        found["--num-query-groups"] = _made(kind, "--num-query-groups", "1")
    if "--deepspeed" in given and "--batch-size" in given:
        # Megatron-LM 1, on which Megatron-DeepSpeed was built first: a microbatch of one device.
        flag = given["--batch-size"]
        found.setdefault(MICRO, dataclasses.replace(flag, known=known_flags()[MICRO]))
    _adapters(found, problems)
    _shared_experts(found)
    _dense_layers(found)
    for name, instead in REFUSED.items():
        if name in given and "--deepspeed" not in given:
            problems.add(
                "illegal", "is refused since Megatron-LM 2.0", name, given[name].line, f"use {instead}"
            )
    return found


def _made(flag: GivenFlag, name: str, text: str) -> GivenFlag:
    """The flag `name`, on the line of an alias."""
    values = (Word(text, flag.line),) if text else ()
    return GivenFlag(flag.name, values, flag.line, known_flags()[name])


_ADAPTED = {
    "linear_qkv": "query,key,value",
    "linear_proj": "output",
    "linear_fc1": "gate,up",
    "linear_fc2": "down",
}
"""Layers with adapters by Megatron-Core's names of layers."""


def _adapters(found: dict[str, GivenFlag], problems: Problems) -> None:
    """Adapters of the layers in a flag (MindSpeed-LLM, mindspeed_llm/features_manager)."""
    flag = found.get("--lora-target-modules")
    if flag is None or "--lora-rank" in found:
        return
    words = [word for value in flag.values for word in value.text.replace(",", " ").split()]
    if not words or not {*words} <= {*_ADAPTED}:
        text = f"{flag.text}: adapters of these layers are not known"
        problems.add("unknown", text, flag.name, flag.line, f"name {', '.join(_ADAPTED)}")
        return
    rank = found.get("--lora-r")
    found["--lora-rank"] = _made(rank or flag, "--lora-rank", rank.text if rank else "16")
    found.setdefault("--lora-alpha", _made(flag, "--lora-alpha", "32"))
    names = [_ADAPTED[word] for word in words]
    if "--swiglu" not in found:
        names = [name.replace("gate,", "") for name in names]
    found["--lora-targets"] = _made(flag, "--lora-targets", ",".join(names))
    if "--qlora" in found:
        found["--quantize-base"] = _made(found["--qlora"], "--quantize-base", "nf4")


def _shared_experts(found: dict[str, GivenFlag]) -> None:
    """Width of shared experts, from a number of experts of the usual width (MindSpeed-LLM,
    Pai-Megatron-Patch)."""
    flag = found.get("--n-shared-experts") or found.get("--num-shared-experts")
    width = found.get("--moe-ffn-hidden-size") or found.get("--ffn-hidden-size")
    name = "--moe-shared-expert-intermediate-size"
    if flag is None or width is None or name in found:
        return
    if all(one.text.isdigit() and len(one.text) < 8 for one in (flag, width)) and int(flag.text):
        found[name] = _made(flag, name, str(int(flag.text) * int(width.text)))


def _dense_layers(found: dict[str, GivenFlag]) -> None:
    """Leading layers without experts (MindSpeed-LLM)."""
    flag, layers, name = found.get("--first-k-dense-replace"), found.get("--num-layers"), "--moe-layer-freq"
    if flag is None or layers is None or not re.fullmatch(r"[0-9]{1,5}", layers.text):
        return
    listed = dense_layers(flag.text, found[name].text if name in found else None, int(layers.text))
    if listed is not None:
        found[name] = _made(flag, name, listed)
