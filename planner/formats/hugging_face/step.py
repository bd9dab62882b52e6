"""Batches, number formats and recomputation of a job of Hugging Face's trainer."""

from __future__ import annotations

from typing import Any

from costmodels.spec.model import ModelSpec
from planner.formats.hugging_face import deepspeed_config
from planner.formats.hugging_face.engine_constants import LIGER, has_liger
from planner.formats.hugging_face.job import Job
from planner.formats.hugging_face.names import ACCELERATE_KEYS, MICRO, STEPS

_MICRO_BATCHES = {"ms-swift": 1, "axolotl": 1}
"""Default sequences of a microbatch, for trainers with another default than TrainingArguments.

swift/trainers/arguments.py and axolotl/utils/schemas/training.py.
"""

SWIFT_BATCH = 16
"""Sequences of a step to which ms-swift accumulates by default."""


def batch_of(job: Job, ranks: int, assumed: list[str]) -> dict[str, Any]:
    """Microbatch and global batch; DeepSpeed fills in the one of three numbers that is missing."""
    keys = job.deepspeed
    micro = deepspeed_config.count(keys, "train_micro_batch_size_per_gpu") or job.command.count(MICRO)
    steps = deepspeed_config.count(keys, "gradient_accumulation_steps") or job.command.count(STEPS)
    steps = steps or job.accelerate.count("deepspeed_config.gradient_accumulation_steps")
    total = deepspeed_config.count(keys, "train_batch_size")
    if total is not None and micro is not None and steps is None and total % (micro * ranks) == 0:
        steps = total // (micro * ranks)
    if total is not None and micro is None and total % ((steps or 1) * ranks) == 0:
        micro = total // ((steps or 1) * ranks)
    if micro is None and job.alone:
        path = "train_micro_batch_size_per_gpu" if keys.entries else MICRO
        text = "the batch is the training script's, which is not given"
        keys.add("unknown", text, path, "give that script too, or --define per_device_train_batch_size=N")
        micro = 1
    if micro is None:
        micro = _MICRO_BATCHES.get(job.software, 8)
        whose = job.software if job.software in _MICRO_BATCHES else "TrainingArguments"
        assumed.append(f"{MICRO} {micro} (the default of {whose})")
    if steps is None and job.software == "ms-swift":
        steps = -(-SWIFT_BATCH // (micro * ranks))
        assumed.append(f"{STEPS} {steps} (ms-swift's default: {SWIFT_BATCH} sequences a step)")
    whole = micro * (steps or 1) * ranks
    if total is not None and total != whole:
        text = f"{total} is not microbatch {micro} x {steps or 1} steps x {ranks} ranks = {whole}"
        keys.add("illegal", text, "train_batch_size", f"use {whole}, or auto")
    return {"micro_batch_size": micro, "global_batch_size": whole}


def precision_of(job: Job) -> str:
    fixed = deepspeed_config.precision(job.deepspeed) if job.deepspeed.entries else None
    if fixed not in (None, "fp32"):
        return str(fixed)
    said = job.accelerate.text("mixed_precision") or any(
        f"--{name}" in job.command for name in ("bf16", "fp16")
    )
    if fixed is None and job.deepspeed.entries and job.alone and not said:
        path = "bf16.enabled" if "bf16.enabled" in job.deepspeed else "fp16.enabled"
        text = "auto: the number format is the trainer's, whose command is not given"
        job.deepspeed.add("unknown", text, path, "give that command too, or --define bf16=true")
    if job.software == "ms-swift" and not any(f"--{name}" in job.command for name in ("bf16", "fp16")):
        # The number format of the weights, which is that of config.json unless it is given.
        kind = (job.command.text("--torch_dtype") or "bfloat16").lower()
        return {"bfloat16": "bf16", "float16": "fp16"}.get(kind, "fp32")
    for name in ("bf16", "fp16"):
        if job.command.switch(f"--{name}") or job.command.text("--mixed_precision") == name:
            return name
    if job.software == "trl" and not said:
        return "bf16"  # Its own default (trl/trainer/base_config.py).
    if job.software == "open-instruct" and not said:
        text = "the number format is that of accelerate launch, which is not given"
        job.command.add("unknown", text, "--mixed_precision", "give --define mixed_precision=bf16")
    mixed = job.accelerate.text("mixed_precision")
    return mixed if mixed in ("bf16", "fp16", "fp8") else "fp32"


def recomputes(job: Job) -> bool:
    flags = ("--gradient_checkpointing", "--gradient_checkpointing_enable", "--activation_checkpointing")
    said = job.command.first(*flags)
    if said is not None and said.text.lower() in OFFLOADED_INPUTS:
        return True
    usual = job.software in _RECOMPUTE and not job.command.switch("--disable_gradient_checkpointing")
    return job.command.switch(*flags, default=usual) or job.accelerate.switch(ACCELERATE_KEYS["recompute"])


_RECOMPUTE = ("ms-swift", "llama-factory", "trl")
"""Trainers that recompute by default.

swift/trainers/arguments.py, llamafactory/hparams/model_args.py, and trl/trainer/base_config.py of 2026.
"""


def keeps_less(job: Job) -> bool:
    """Return whether a device keeps fewer parameters than the estimates assume."""
    own = job.command.text("--deepspeed") == "zero3_offload" and job.software == "ms-swift"
    files = (job.deepspeed, "zero_optimization.offload_param.device"), (job.accelerate, _PARAMETERS)
    return own or any((keys.text(path) or "none") != "none" for keys, path in files)


def keeps_fewer_activations(job: Job, model: ModelSpec | None) -> bool:
    """Return whether a device keeps fewer activations or logits than the estimates assume, or may do so.

    Samples that are not packed are as long as they are; the longest ones of a microbatch decide.
    """
    if (job.command.text("--gradient_checkpointing") or "").lower() in OFFLOADED_INPUTS:
        return True
    for name in LESS if has_liger(job, model) else (*LESS, *LIGER):
        if (job.command.text(name) or "false").lower() in ("false", "no", "none", "0"):
            continue
        if name in LIGER:
            text = "the kernels that Liger has for this model are not known here, and are not priced"
            job.command.add("note", text, name)
        return True
    return not packs_samples(job)


def packs_samples(job: Job) -> bool:
    """Return whether a microbatch is as long as the flags say: samples are packed, or how they are joined is
    the script's own affair."""
    if job.software == "llama-factory":
        pretrains = job.command.text("--stage") == "pt"
        return job.command.switch("--neat_packing") or job.command.switch("--packing", default=pretrains)
    switch = {"ms-swift": "--packing", "trl": "--packing", "axolotl": "--sample_packing"}.get(job.software)
    return switch is None or job.command.switch(switch)


SHORTER = (
    "samples are as long as is allowed (without packing a microbatch is as long as its longest sample, and "
    "may take less time and memory)"
)


def trains_in_16_bits(job: Job) -> bool:
    """Return whether all weights, gradients and states of the optimizer are in bf16.

    A model that is loaded in bf16 stays so unless FSDP or DeepSpeed keeps an fp32 copy
    (axolotl/loaders/model.py, swift/model/utils.py, `torch_dtype` of `from_pretrained`). axolotl's own
    FSDP2 keeps none (monkeypatch/accelerate/fsdp2.py).
    """
    if job.uses_deepspeed or job.deepspeed.entries or job.software == "llama-factory":
        return False
    own = job.software == "axolotl" and job.accelerate.text("fsdp_config.fsdp_version") == "2"
    if job.is_under_fsdp and not own:
        return False
    if job.software == "axolotl":
        entry = job.command.first("--bf16")
        return entry is not None and entry.text.lower() in ("auto", "true", "full")
    entry = job.command.first("--torch_dtype", "--dtype")
    said = "" if entry is None else entry.text.rpartition(".")[2].lower()
    return said == "bfloat16" or (not said and job.software == "ms-swift")


LESS = ("--activation_offloading", "--tiled_mlp", "--liger_cross_entropy", "--chunked_cross_entropy")
"""Switches with which a device keeps fewer activations or logits than the estimates assume.

Kept inputs are moved to host memory (TRL, axolotl), an MLP runs on parts of the sequence, or the loss on
parts of the logits.
"""

_PARAMETERS = "deepspeed_config.offload_param_device"

OFFLOADED_INPUTS = ("offload", "offload_disk", "unsloth")
"""Values of axolotl for recomputation with kept inputs in host memory (utils/schemas/config.py)."""
