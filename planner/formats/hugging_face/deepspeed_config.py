"""Reading of batches, ZeRO and number formats in DeepSpeed's JSON (deepspeed/runtime/config.py)."""

from __future__ import annotations

from costmodels.errors import InputError
from planner.formats.facts.entries import PARSERS, Entries
from planner.formats.facts.keyed import Keyed
from planner.formats.facts.launcher import Launch
from planner.formats.facts.source import Source
from planner.formats.hugging_face.names import DEEPSPEED_KEYS

AUTO = "auto"
"""Value of keys that the trainer fills in."""

ZERO = "zero_optimization"


def recognises(entries: Entries) -> bool:
    """Return whether keys are those of DeepSpeed."""
    return any(
        path == name or path.startswith(f"{name}.")
        for path in entries
        for name in (ZERO, "train_micro_batch_size_per_gpu", "train_batch_size")
    )


def written_by(launch: Launch, name: str, file: str) -> Source | None:
    """The configuration that a script writes into the file `name` before the start; None where it writes
    none."""
    text = launch.files.get(name)
    if text is None:
        return None
    try:
        entries = PARSERS[".json"](text.text, f"file {file}")
    except InputError:
        return None
    return Source(file, text.text, entries) if recognises(entries) else None


def count(keys: Keyed, path: str) -> int | None:
    """The whole number of a key; None where it is missing or `auto`."""
    return None if keys.text(path) in (None, AUTO) else keys.count(path)


def zero_stage(keys: Keyed) -> int:
    """The ZeRO stage; 0 where the file has none."""
    path = DEEPSPEED_KEYS["zero_stage"]
    stage = keys.count(path, least=0) or 0
    if stage > 3:
        keys.add("illegal", f"{stage} is not one of 0 to 3", path)
        return 0
    offload = f"{ZERO}.offload_param.device"
    if stage < 3 and (keys.text(offload) or "none") != "none":
        keys.add("illegal", f"parameters are offloaded with stage 3 alone, not {stage}", offload)
    if stage == 0 and offloads_optimizer(keys):
        keys.add(
            "illegal", "the optimizer is offloaded with stages 1 to 3", DEEPSPEED_KEYS["offload_optimizer"]
        )
    return stage


def offloads_optimizer(keys: Keyed) -> bool:
    """Return whether the optimizer's states are in host memory or on NVMe."""
    device = keys.text(DEEPSPEED_KEYS["offload_optimizer"]) or "none"
    if device == "nvme":
        keys.add("note", "is priced as the host's memory", DEEPSPEED_KEYS["offload_optimizer"])
    return device in ("cpu", "nvme") or keys.switch(f"{ZERO}.cpu_offload")


def precision(keys: Keyed) -> str | None:
    """The number format in the file; None where the trainer decides it."""
    on = {}
    for name, section in (("bf16", "bf16"), ("bf16", "bfloat16"), ("fp16", "fp16")):
        path = f"{section}.enabled"
        if keys.text(path) not in (None, AUTO) and keys.switch(path):
            on[name] = path
    if len(on) == 2:
        keys.add("illegal", "and bf16.enabled are both true", "fp16.enabled", "switch one off")
    if on:
        return next(iter(on))
    return None if AUTO in (keys.text("bf16.enabled"), keys.text("fp16.enabled")) else "fp32"
