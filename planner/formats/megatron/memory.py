"""Recomputation, offload and optimizer states, as flags of Megatron-LM and MindSpeed set them."""

from __future__ import annotations

from typing import Any, get_args

from costmodels.errors import InputError, on_one_line
from costmodels.spec.layout import MuonMode, RecomputeModule
from costmodels.spec.model import ModelSpec
from planner.formats.facts.optimizers import optimizer_named
from planner.formats.megatron.job import Job
from planner.formats.megatron.model import blame, option_values
from planner.formats.megatron.names import (
    DEGREE_FLAGS,
    UNPRICED_MODULES,
)
from planner.inputs.pins import WherePossible
from planner.options.parallel import ParallelOptions


def memory_degrees(job: Job, model: ModelSpec) -> dict[str, Any]:
    """Fields of the layout for recomputation, offload, the optimizer and its number formats."""
    given, problems = job.given, job.problems
    values = option_values(given, "layout", ParallelOptions, problems)
    names = {"recompute_granularity", "recompute_activations", "recompute_activation_function"}
    names |= {"recompute_modules", "recompute_method", "recompute_num_layers", "swap_attention"}
    names |= {"optimizer_cpu_offload", "num_distributed_optimizer_instances", "grad_reduce_in_bf16"}
    values = {name: value for name, value in values.items() if name in names}
    if job.is_given("--checkpoint-activations") and not values.get("recompute_granularity"):
        values |= {"recompute_granularity": "full", "recompute_method": "uniform"}
    _leave_out_no_layers(job, values)
    if values.get("recompute_method") == "block" and "recompute_num_layers" in values:
        stage = -(-model.layers // (job.count(DEGREE_FLAGS["pipeline_parallel"]) or 1))
        values["recompute_num_layers"] = min(values["recompute_num_layers"], stage)
    _leave_out_activations(job, values)
    _price_modules(job, values)
    _drop_idle(job, values)
    _leave_out_swaps(job, values)
    try:
        options = ParallelOptions(**values)
        pins = options.pins(model)
    except InputError as error:
        message = on_one_line(error)
        flag = blame(message, given)
        problems.add("illegal", message, flag.name if flag else "", flag.line if flag else None)
        return {}
    whole = _recomputes_every_mlp(job, model)
    for text in [] if whole else options.notes():
        name = text.split()[0]
        problems.add(
            "note", text.removeprefix(name).strip(), name, given[name].line if name in given else None
        )
    found: dict[str, Any] = {
        name: value for name, value in pins.items() if not isinstance(value, WherePossible)
    }
    found |= _mindspeeds_memory(job, found)
    if whole:
        found |= {"recompute": "selective", "recompute_modules": ("mlp",)}
    if job.is_given("--swap-optimizer", "--use-cpu-optimizer", "--cpu_torch_adam"):
        found["offload_optimizer"] = True
    if job.is_given("--fine-grained-activation-offloading"):
        found["offload_activations"] = True
    found["precision"] = job.precision()
    found["fp8_recipe"] = job.fp8_recipe()
    found["fp8_param_gather"] = job.gathers_fp8(found["fp8_recipe"])
    _price_states(job)
    _name_less(job)
    optimizer = job.word("--optimizer")
    if optimizer is not None:
        found["optimizer"] = optimizer_named(optimizer.text, problems, optimizer.name, optimizer.line)
    mode = job.word("--muon-tp-mode")
    if mode is not None and found.get("optimizer") == "muon" and mode.text in get_args(MuonMode)[1:]:
        found["muon_mode"] = mode.text
    elif mode is not None and found.get("optimizer") == "muon":
        text = f"{mode.text}: expected one of {', '.join(get_args(MuonMode)[1:])}"
        problems.add("illegal", text, mode.name, mode.line)
    return found


_LESS = (
    *("--checkpoint-in-cpu", "--partition-activations", "--cpu-offloading", "--distribute-saved-activations"),
    *("--distribute-checkpointed-activations", "--moe-layer-recompute", "--moe-paged-stash"),
    *("--mtp-mem-efficient-logits", "--recompute-mla-up-proj", "--mla-swap-core-attn-out"),
    *("--loss-chunk-size", "--remote-device", "--use-bnb-optimizer", "--store-param-remainders"),
    *("--megatron-fsdp-main-grads-dtype", "--megatron-fsdp-main-params-dtype"),
    *("--adaptive-recompute-device-swap", "--adaptive-memory-optimization", "--smart-swap"),
    *("--swap-modules", "--recompute-in-advance", "--moe-zero-memory", "--moe-unperm2-mem-optim"),
    *("--moe-unperm2-mem-optim-swap", "--swap-unperm2", "--mla-zero-memory", "--recompute-module-list"),
    *("--moe-adaptive-recompute-activation", "--compress-activation", "--compress-dense"),
    *("--compress-optimizer", "--quant-states", "--quant-grads", "--swap-layer-input"),
    *("--save-memory-ratio", "--share-kvstates"),
)
"""Flags with which a device keeps less than the estimates, which ignore these flags."""


def _name_less(job: Job) -> None:
    """Make it unknown whether a job fits that is too big without the savings of its flags."""
    given = [job.given[name] for name in _LESS if name in job.given]
    if any(flag.text not in ("fp32", "none", "auto", "disable") for flag in given):
        job.memory_is_bound = True


def _price_states(job: Job) -> None:
    """Add a note on optimizer states that are smaller than the priced ones."""
    for name in ("--exp-avg-dtype", "--exp-avg-sq-dtype", "--main-grads-dtype", "--main-params-dtype"):
        flag = job.word(name)
        if flag is not None and flag.text != "fp32":
            job.memory_is_bound = True
            text = f"{flag.text} is priced as fp32, which takes more memory"
            job.problems.add("note", text, name, flag.line)


def _leave_out_no_layers(job: Job, values: dict[str, Any]) -> None:
    """Remove recomputation of zero layers (`--recompute-num-layers 0`)."""
    if values.get("recompute_num_layers") != 0 or values.get("recompute_method") == "uniform":
        return
    del values["recompute_num_layers"]
    if values.get("recompute_granularity") == "full":
        del values["recompute_granularity"]
        values.pop("recompute_method", None)


def _leave_out_activations(job: Job, values: dict[str, Any]) -> None:
    """Apply MindSpeed's rule: activation functions are recomputed only in layers without full
    recomputation."""
    block = values.get("recompute_method") == "block" and values.get("recompute_granularity") == "full"
    name = "--recompute-activation-function"
    if job.framework != "mindspeed" or not block or not values.pop("recompute_activation_function", None):
        return
    job.memory_is_bound = True
    text = "not priced beside whole layers: less is kept than the estimates say"
    job.problems.add("note", text, name, job.given[name].line)


def _price_modules(job: Job, values: dict[str, Any]) -> None:
    """Remove modules of `--recompute-modules` that estimates do not support, with a note."""
    words = [word.strip() for given in values.get("recompute_modules", ()) for word in given.split(",")]
    left_out = [word for word in words if word in UNPRICED_MODULES]
    if words:
        if "mlp" in words and "moe" not in words and job.model is not None and job.model.experts:
            # `mlp` is an MLP without experts, of which such models have few.
            words.remove("mlp")
            text = "mlp recomputes layers without experts alone (moe those with experts): priced as kept"
            job.problems.add("note", text, "--recompute-modules", job.given["--recompute-modules"].line)
        # An MLP is what recomputes of a layer, be it dense or of experts.
        known = ["mlp" if word == "moe" else word for word in words if word not in left_out]
        values["recompute_modules"] = known
        if not known:
            values.pop("recompute_granularity", None)
    if left_out:
        job.memory_is_bound = True
        text = f"{', '.join(left_out)}: not priced as recomputed, and less is kept than the estimates say"
        job.problems.add("note", text, "--recompute-modules", job.given["--recompute-modules"].line)


def _drop_idle(job: Job, values: dict[str, Any]) -> None:
    """Remove the choice of recomputed layers if nothing is recomputed, as Megatron-LM ignores it then."""
    if job.framework != "megatron" or any(
        values.get(name)
        for name in ("recompute_granularity", "recompute_activations", "recompute_activation_function")
    ):
        return
    for name in ("recompute_method", "recompute_num_layers"):
        if values.pop(name, None) is not None:
            flag = job.given[f"--{name.replace('_', '-')}"]
            text = "has no effect without --recompute-granularity"
            job.problems.add("note", text, flag.name, flag.line)


def _leave_out_swaps(job: Job, values: dict[str, Any]) -> None:
    """Remove `--swap-attention` where every layer is recomputed as a whole and keeps nothing to send."""
    full = values.get("recompute_granularity") == "full" and values.get("recompute_method") != "block"
    if full and values.pop("swap_attention", None):
        flag = job.given["--swap-attention"]
        text = "has no effect: every layer is recomputed as a whole"
        job.problems.add("note", text, flag.name, flag.line)


def _recomputes_every_mlp(job: Job, model: ModelSpec) -> bool:
    """Return whether `--swap-attention --recompute-num-layers N` reaches all layers of a stage.

    Then `--recompute-activation-function`, which is inside the MLP, has no effect (MindSpeed,
    docs/zh/features/swap_attention.md).
    """
    if not job.is_given("--swap-attention") or not job.is_given("--recompute-activation-function"):
        return False
    flag = job.word("--recompute-num-layers")
    layers = None if flag is not None and flag.text == "0" else job.count("--recompute-num-layers")
    return layers is not None and layers >= -(
        -model.layers // (job.count(DEGREE_FLAGS["pipeline_parallel"]) or 1)
    )


def _mindspeeds_memory(job: Job, found: dict[str, Any]) -> dict[str, Any]:
    """Fields for MindSpeed's recomputation of activation functions and norms, in some or all layers."""
    modules = list(found.get("recompute_modules", ()))
    if job.is_given("--recompute-norm"):
        modules.append("norm")
    ordered = tuple(name for name in get_args(RecomputeModule) if name in modules)
    changes: dict[str, Any] = {}
    if modules and found.get("recompute", "selective") == "selective":
        changes = {"recompute": "selective", "recompute_modules": ordered}
    for name in ("--recompute-activation-function-num-layers", "--recompute-norm-num-layers"):
        layers = job.count(name)
        if layers is not None and changes:
            changes |= {"recompute_method": "block", "recompute_num_layers": layers}
    return changes
