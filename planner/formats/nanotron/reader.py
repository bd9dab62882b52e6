"""Reader of nanotron's configurations. Defaults are those of nanotron/config."""

from __future__ import annotations

from typing import Any

from costmodels.catalogue.yaml_files import build
from costmodels.errors import InputError, on_one_line
from costmodels.spec.layout import Layout, even_split
from costmodels.spec.model import MOST_LAYERS, ModelSpec
from planner.formats.facts.entries import Entries
from planner.formats.facts.keyed import Keyed, defined, todays
from planner.formats.facts.layout_fields import Places, build_layout, degrees_of_world
from planner.formats.facts.optimizers import optimizer_named
from planner.formats.facts.reading import Problems, Reading, in_own_words
from planner.formats.facts.roles import name_others
from planner.formats.facts.source import Source, Surroundings
from planner.formats.nanotron.names import FORMATS, KEYS, REQUIRED, TP_MODES

AT = "model.model_config"


def recognises(entries: Entries) -> bool:
    """Return whether keys are those of nanotron."""
    return {KEYS["tensor_parallel"], KEYS["data_parallel"]} <= entries.keys()


def read_nanotron(source: Source, around: Surroundings) -> Reading:
    """The job that a configuration of nanotron describes."""
    problems = Problems(source.file)
    assumed: list[str] = []
    entries, own = todays(source.entries, "nanotron")
    entries, _ = todays(defined(entries, around.define, "nanotron"), "nanotron")
    keys = Keyed(entries, "nanotron", source.file, problems)
    flags = tuple(flag for flag in keys.flags() if flag.line)
    places = Places(KEYS, {path: entry.line for path, entry in keys.entries.items()})
    model = around.model or _model(keys, places)
    degrees: dict[str, Any] = {
        name: keys.count(KEYS[name]) or 1
        for name in ("data_parallel", "tensor_parallel", "pipeline_parallel", "context_parallel")
    }
    # Ranks of experts are data-parallel ranks of everything else (nanotron/parallel/context.py).
    ep = keys.count(KEYS["expert_parallel"]) or 1
    degrees["data_parallel"] *= ep
    if model is not None and model.experts:
        degrees |= {"expert_parallel": ep}  # Each expert is whole (nn/moe.py, GroupedMLP).
    elif ep > 1:
        keys.add("illegal", "there are no experts to spread", KEYS["expert_parallel"])
    for path in REQUIRED:
        if path not in keys:
            keys.add(
                "unknown", "is not given, and nanotron has no default for it", path, f"give --define {path}=N"
            )
    product = degrees["tensor_parallel"] * degrees["pipeline_parallel"] * degrees["context_parallel"]
    world = around.world_size or int(degrees["data_parallel"] * product)
    layout = None if model is None else _layout(keys, model, degrees, world, places)
    keys.name_unread()
    name_others(flags, problems, "is no key of nanotron that is known here")
    reading = Reading(
        framework="nanotron",
        engine="nanotron",
        file=source.file,
        model=model,
        layout=layout,
        precision=_precision(keys),
        world_size=world,
        local_world_size=around.local_world_size,
        global_batch_size=None if layout is None else layout.global_batch_size,
        flags=flags,
        names=KEYS,
        training=_training(keys),
        assumed=tuple(assumed),
        problems=tuple(problems.found),
    )
    return in_own_words(reading, own)


def _precision(keys: Keyed) -> str:
    return FORMATS.get(keys.text(KEYS["precision"]) or "bfloat16", "bf16")


def _model(keys: Keyed, places: Places) -> ModelSpec | None:
    before = len(keys.problems.found)
    names = ("layers", "hidden", "heads", "ffn", "vocab", "seq")
    sizes = {name: keys.count(KEYS[name]) for name in names}
    missing = [KEYS[name] for name in names if not sizes[name]]
    if len(keys.problems.found) > before:
        return None
    if missing:
        keys.problems.add("unknown", f"no {', '.join(missing)}: the model is not known", missing[0])
        return None
    qwen = keys.switch(KEYS["qwen2"]) or keys.switch(KEYS["qwen2_moe"])
    fields: dict[str, Any] = dict(sizes) | {
        "name": (keys.text("general.run") or "model")[:60].strip() or "model",
        "kv_heads": keys.count(KEYS["kv_heads"]) or sizes["heads"],
        "max_positions": max(keys.count(KEYS["max_positions"]) or 0, sizes["seq"] or 0),
        "gated": True,
        "activation": "silu",
        "norm": "rmsnorm",
        "norm_eps": keys.number(KEYS["norm_eps"]) or 1e-6,
        "position": "rope",
        "rope_theta": keys.number(KEYS["rope_theta"]) or 10000.0,
        "tied": keys.switch(KEYS["tied"]),
        "linear_bias": False,
        "qkv_bias": qwen and keys.switch(KEYS["qkv_bias"]),
    }
    experts = keys.count(KEYS["experts"])
    if experts and experts > 1:
        width = keys.count(KEYS["expert_ffn"]) or 1408
        shared = keys.count(KEYS["shared_expert_ffn"]) or 5632
        fields |= {
            "experts": experts,
            "top_k": keys.count(KEYS["top_k"]) or 2,
            "expert_ffn": width,
            "shared_expert_ffn": shared if keys.switch(KEYS["shared_expert"]) else 0,
        }
        mixed = _layers_with_experts(keys, int(sizes["layers"] or 0))
        if mixed is not None:
            fields["mlp_pattern"] = mixed
    try:
        return build(ModelSpec, fields, f"{AT} of {keys.file}")
    except InputError as error:
        message = on_one_line(error)
        keys.problems.add("illegal", message, *places.blamed(message))
        return None


def _layers_with_experts(keys: Keyed, layers: int) -> tuple[str, ...] | None:
    """Kinds of MLP of all layers if `moe_config.layers` lists the layers with experts; None for all layers
    ([-1])."""
    entry = keys.entries.get(KEYS["layers_with_experts"])
    items = [] if entry is None or entry.items is None else list(entry.items)
    if not items or items == ["-1"] or layers > MOST_LAYERS:
        return None
    if not all(item.isdigit() and len(item) < 6 and int(item) < layers for item in items):
        keys.add("illegal", f"are not layers from 0 to {layers - 1}", KEYS["layers_with_experts"])
        return None
    listed = {int(item) for item in items}
    return tuple("experts" if layer in listed else "dense" for layer in range(layers))


def _layout(
    keys: Keyed, model: ModelSpec, degrees: dict[str, Any], world: int, places: Places
) -> Layout | None:
    pipeline = degrees["pipeline_parallel"]
    if pipeline > model.layers:
        text = f"{pipeline} stages are more than the {model.layers} layers"
        keys.add("illegal", text, KEYS["pipeline_parallel"])
        return None
    whole = degrees_of_world(degrees, world, places, keys.problems)
    if whole is None:
        return None
    if not keys.switch(KEYS["gathers_again"], default=True):
        text = "not priced: gathered inputs are kept, and estimates gather them again"
        keys.add("note", text, KEYS["gathers_again"])
    mode = (keys.text(KEYS["sequence_parallel"]) or "ALL_REDUCE").upper()
    if mode not in TP_MODES:
        keys.add("illegal", f"{mode} is not one of {', '.join(TP_MODES)}", KEYS["sequence_parallel"])
    engine = (keys.text(KEYS["schedule"]) or "afab").lower()
    if engine not in ("1f1b", "afab"):
        keys.add("illegal", f"{engine!r} is neither 1f1b nor afab", KEYS["schedule"])
    elif engine == "afab" and pipeline > 1:
        text = "afab keeps all microbatches; it is priced as 1f1b, which keeps those of the stages alone"
        keys.add("note", text, KEYS["schedule"])
    stage = keys.count(KEYS["zero_stage"], least=0) or 0
    if stage > 1:
        keys.add("illegal", f"{stage} is not one of 0 and 1", KEYS["zero_stage"])
        return None
    micro = keys.count(KEYS["micro_batch_size"]) or 1
    batches = keys.count(KEYS["micro_batches"]) or 1
    if engine == "1f1b" and batches < pipeline - 1:
        # nanotron/parallel/pipeline_parallel/engine.py, OneForwardOneBackwardPipelineEngine.
        text = f"{batches} microbatches: 1f1b asserts at least {pipeline - 1} for {pipeline} stages"
        keys.add("illegal", text, KEYS["micro_batches"], f"use {pipeline - 1}, fewer stages, or afab")
    whole |= {
        "sequence_parallel": TP_MODES.get(mode, False),
        # It balances layers with embedding and head by their cost; this is as even as can be.
        "layers_per_stage": even_split(model.layers, pipeline),
        "micro_batch_size": micro,
        "global_batch_size": micro * batches * whole["data_parallel"],
        "zero_stage": stage,
        "precision": _precision(keys),
    }
    if keys.switch(KEYS["recompute"]):
        whole["recompute"] = "full"
    if not keys.switch(KEYS["gradient_reduction"], default=True):
        whole["gradient_reduction"] = "bf16"
    path = KEYS["optimizer"]
    whole["optimizer"] = optimizer_named(keys.text(path), keys.problems, path, keys.line(path))
    return build_layout(whole, places, keys.problems)


def _training(keys: Keyed) -> dict[str, str]:
    """The settings of training, as flags of Megatron-LM."""
    found = keys.training()
    if found.get("--lr-decay-style") not in ("linear", "cosine"):
        found.pop("--lr-decay-style", None)
    return found
