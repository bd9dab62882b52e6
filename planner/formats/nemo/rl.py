"""Configurations of NeMo-RL: the policy, which trains with Megatron-LM or with FSDP2 (DTensor).

A file inherits from the files in `defaults`. All values are in YAML, so a value that no file gives is
unknown.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from planner.formats.facts.definitions import with_definitions
from planner.formats.facts.entries import Entries, Entry
from planner.formats.facts.flag_catalogue import known_flags
from planner.formats.facts.inherited import inherit
from planner.formats.facts.keyed import Keyed, known_keys, resolved_value
from planner.formats.facts.launcher import Launch
from planner.formats.facts.layout_fields import Places, build_layout, degrees_of_world
from planner.formats.facts.reading import Problems, Reading
from planner.formats.facts.roles import name_others
from planner.formats.facts.source import Source, Surroundings
from planner.formats.hugging_face.adapters import with_adapters
from planner.formats.megatron.reader import read_command
from planner.formats.nemo.rl_names import (
    DTENSOR,
    FLAGS,
    FORMATS,
    KEYS,
    LORA,
    MEGATRON,
    MEGATRON_FLAGS,
    OFF,
    PARTS,
    POLICY,
    RECOMPUTATION,
)
from planner.formats.on_megatron.flags import as_flags, renamed
from planner.formats.shell.text import Word
from planner.inputs.huggingface.script_names import model_of
from planner.inputs.model import with_seq

NEEDED = ("micro_batch_size", "global_batch_size", "seq", "precision")
"""Fields that every job gives, with either backend."""


def recognises(entries: Entries) -> bool:
    """Return whether keys are those of NeMo-RL."""
    if any(path.startswith((f"{MEGATRON}.", f"{DTENSOR}.")) for path in entries):
        return True
    return "defaults" in entries and any(path.startswith((f"{POLICY}.", "cluster.")) for path in entries)


def read_nemo_rl(source: Source, around: Surroundings) -> Reading:
    """The policy of a NeMo-RL job, which is the trained model."""
    whole = inherit(source.entries, source.file, "defaults", around.beside)
    problems = Problems(source.file)
    keys = Keyed(
        with_definitions(whole.entries, around.define, known_keys("nemo-rl")),
        "nemo-rl",
        source.file,
        problems,
    )
    for file, entry in whole.missing:
        text = f"{entry.text} is not given, from which it starts"
        problems.add("unknown", text, "defaults", entry.line, "give that file too", file)
    _name_others_that_count(keys)
    missing = [KEYS[name] for name in NEEDED if KEYS[name] not in keys]
    for path in [] if whole.missing else missing:
        keys.add(
            "unknown", "no file says it, and NeMo-RL has no default for it", path, f"give --define {path}="
        )
    model = _model(keys, around)
    megatron, dtensor = (keys.switch(f"{section}.enabled") for section in (MEGATRON, DTENSOR))
    world, local = _devices(keys, around)
    if megatron == dtensor and not whole.missing:
        text = "and its neighbour are both " + ("on" if megatron else "off")
        keys.add("unknown", f"{text}: the backend that trains the policy is not known", f"{MEGATRON}.enabled")
    if missing or megatron == dtensor:
        model_only = Reading("nemo-rl", "megatron", source.file, model, None, world_size=world)
        reading = dataclasses.replace(model_only, problems=tuple(problems.found))
    elif megatron:
        reading = _read_megatron(keys, around, model, world, local)
    else:
        reading = _read_dtensor(keys, model, world, local)
    keys.name_unread()
    others = [flag for flag in keys.flags() if flag.line and _counts(flag.name, megatron)]
    others = [flag for flag in others if flag.known.role != "unpriced" or flag.text.lower() not in _OFF]
    name_others(others, problems, "is no key of NeMo-RL that is known here")
    found = (*problems.found, *(one for one in reading.problems if one not in problems.found))
    return dataclasses.replace(
        reading,
        flags=tuple(others),
        files=whole.files,
        problems=tuple(dataclasses.replace(one, file=whole.files.get(one.flag, one.file)) for one in found),
    )


def _counts(path: str, megatron: bool) -> bool:
    """Return whether a key belongs to the training backend and is not a flag of Megatron-LM."""
    other = DTENSOR if megatron else MEGATRON
    return not path.startswith(f"{other}.") and not (
        path.startswith(MEGATRON) and _flag(path) in known_flags()
    )


def _flag(path: str) -> str:
    """The flag for a key of `policy.megatron_cfg`; it may be an unknown flag."""
    leaf = path.rpartition(".")[2]
    return OFF.get(leaf) or MEGATRON_FLAGS.get(leaf, f"--{leaf.replace('_', '-')}")


_OFF = ("false", "none", "null", "", "0")


def _name_others_that_count(keys: Keyed) -> None:
    if keys.switch(f"{POLICY}.draft.enabled"):
        text = "a model for drafts trains besides, and is not priced"
        keys.add("unknown", text, f"{POLICY}.draft.enabled")
    for section in ("sequence_packing", "dynamic_batching"):
        path = f"{POLICY}.{section}.enabled"
        if keys.switch(path):
            text = "the number of microbatches of a step depends on the lengths of its samples"
            keys.add("unknown", text, path, f"give --define {path}=false for samples of the full length")


def _model(keys: Keyed, around: Surroundings) -> ModelSpec | None:
    path = f"{POLICY}.model_name"
    changed = next((one for one in keys.entries if one.startswith(f"{POLICY}.hf_config_overrides.")), None)
    seq = keys.count(KEYS["seq"])
    if around.model is not None:
        return with_seq(around.model, seq) if seq else around.model
    name = keys.text(path)
    model = None if name is None else model_of(name)
    if model is None:
        text = f"the model {name} is not in the catalogue" if name else "no file names the model"
        keys.add("unknown", text, path, "give its config.json beside it, or --model")
        return None
    if changed is not None:
        keys.add("unknown", f"changes the model {model.name}", changed, "give --model")
    return with_seq(model, seq) if seq else model


def _devices(keys: Keyed, around: Surroundings) -> tuple[int | None, int | None]:
    """Devices of the policy, and of each node; generation may have some of its own."""
    local = around.local_world_size or keys.count("cluster.gpus_per_node")
    nodes = keys.count("cluster.num_nodes")
    if around.world_size is not None or local is None or nodes is None:
        return around.world_size, local
    at = f"{POLICY}.generation.colocated"
    if keys.switch(f"{at}.enabled", default=True):
        return nodes * local, local
    own_nodes = keys.count(f"{at}.resources.num_nodes") or 0
    own = keys.count(f"{at}.resources.gpus_per_node") or local
    return nodes * local - (own_nodes * own if own_nodes and nodes > 1 else own), local


def _pairs(keys: Keyed) -> Iterator[tuple[str, Entry]]:
    """Keys of `policy` and of `policy.megatron_cfg` as flags of Megatron-LM."""
    known = known_flags()
    recomputes = keys.switch(f"{MEGATRON}.activation_checkpointing")
    narrow = keys.switch(f"{MEGATRON}.fp8_cfg.enabled")
    for path, entry in keys.entries.items():
        section, _, leaf = path.rpartition(".")
        text = resolved_value(entry, keys.entries)
        given = dataclasses.replace(entry, text=text)
        if section == POLICY and leaf in FLAGS:
            yield FLAGS[leaf], given
        inner = section.removeprefix(MEGATRON).lstrip(".")
        if not section.startswith(MEGATRON) or (inner and inner not in PARTS) or entry.null:
            continue
        if (leaf in RECOMPUTATION and not recomputes) or (inner == "fp8_cfg" and not narrow):
            continue
        name = _flag(path)
        if leaf in OFF:
            if text.lower() == "false":
                yield name, dataclasses.replace(given, text="true")
        elif name in known and text != "none" and not (leaf == "mtp_num_layers" and text == "0"):
            yield name, given
    if recomputes:
        entry = keys.entries[f"{MEGATRON}.activation_checkpointing"]
        granularity = keys.text(f"{MEGATRON}.recompute_granularity") or "full"
        yield "--recompute-granularity", dataclasses.replace(entry, text=granularity)
        if granularity == "full":
            yield "--recompute-method", dataclasses.replace(entry, text="uniform")
            yield "--recompute-num-layers", dataclasses.replace(entry, text="1")
    precision = keys.entries[KEYS["precision"]]
    if precision.text in ("bfloat16", "float16"):
        yield (
            "--bf16" if precision.text == "bfloat16" else "--fp16",
            dataclasses.replace(precision, text="true"),
        )


def _read_megatron(
    keys: Keyed, around: Surroundings, model: ModelSpec | None, world: int | None, local: int | None
) -> Reading:
    pairs = dict(_pairs(keys))
    names = {flag: entry.path for flag, entry in pairs.items() if entry.path}
    if keys.switch(f"{MEGATRON}.peft.enabled"):
        keys.add("unknown", "adapters of Megatron-Bridge are not priced", f"{MEGATRON}.peft.enabled")
    if model is None:
        return Reading("nemo-rl", "megatron", keys.file, None, None, world_size=world)
    if not model.tied:
        pairs["--untie-embeddings-and-output-weights"] = Entry("", "true", 0)  # As its checkpoint is.
    reading = read_command(
        as_flags(pairs.items()),
        [],
        Launch("", (), None, None, None, Word("1", 0)),
        keys.file,
        world_size=world,
        local_world_size=local,
        model=model,
        framework="megatron",
    )
    return renamed(reading, names, "nemo-rl", "megatron")


def _read_dtensor(keys: Keyed, model: ModelSpec | None, world: int | None, local: int | None) -> Reading:
    places = Places(KEYS, {path: entry.line for path, entry in keys.entries.items()})
    precision = FORMATS.get(keys.text(KEYS["precision"]) or "", "")
    if not precision:
        keys.add(
            "unknown", f"{keys.text(KEYS['precision'])} is no format that is known here", KEYS["precision"]
        )
    for name in ("custom_parallel_plan", "expert_parallel_size"):
        if keys.text(f"{DTENSOR}.{name}") not in (None, "1"):
            keys.add("unknown", "is not priced", f"{DTENSOR}.{name}", "give --define of it without a value")
    if model is not None and keys.switch(f"{DTENSOR}.lora_cfg.enabled"):
        model = _with_lora(keys, model)
    if world is None:
        keys.add("unknown", "the number of devices is not known", "cluster.num_nodes", "give --world-size")
    layout = None
    if model is not None and world is not None and precision:
        layout = _dtensor_layout(keys, model, world, precision, places)
    split = layout is not None and (layout.tensor_parallel > 1 or layout.context_parallel > 1)
    return Reading(
        framework="nemo-rl",
        engine="torchtitan" if split else "fsdp",
        file=keys.file,
        model=model,
        layout=layout,
        precision=precision or None,
        world_size=world,
        local_world_size=local,
        global_batch_size=keys.count(KEYS["global_batch_size"]),
        names=KEYS,
    )


def _with_lora(keys: Keyed, model: ModelSpec) -> ModelSpec:
    """The model with its adapters, from keys translated to flags of trainers."""
    at = f"{DTENSOR}.lora_cfg"
    given = {"--use_peft": Entry("--use_peft", "true", keys.line(f"{at}.enabled") or 0)}
    every = keys.switch(f"{at}.match_all_linear", default=True)
    for key, flag in LORA.items():
        entry = keys.entries.get(f"{at}.{key}")
        if entry is not None and not (key == "target_modules" and every):
            given[flag] = dataclasses.replace(entry, path=flag)
    if every:
        given["--lora_target_linear"] = Entry("--lora_target_linear", "true", 0)
    return with_adapters(model, Keyed(given, "transformers", keys.file, keys.problems), "nemo-rl")


def _dtensor_layout(
    keys: Keyed, model: ModelSpec, world: int, precision: str, places: Places
) -> Layout | None:
    degrees: dict[str, Any] = {
        name: keys.count(KEYS[name]) or 1 for name in ("tensor_parallel", "context_parallel")
    }
    degrees["sequence_parallel"] = keys.switch(KEYS["sequence_parallel"])
    if degrees["context_parallel"] > 1:
        degrees["context_parallel_form"] = "ring"
    whole = degrees_of_world(degrees, world, places, keys.problems)
    micro, batch = keys.count(KEYS["micro_batch_size"]), keys.count(KEYS["global_batch_size"])
    if whole is None or micro is None or batch is None:
        return None
    unit = micro * whole["data_parallel"]
    if batch % unit:
        text = (
            f"{batch} is not a multiple of microbatch {micro} x {whole['data_parallel']} data-parallel ranks"
        )
        keys.add("illegal", text, KEYS["global_batch_size"], f"use a multiple of {unit}")
        return None
    replicas = keys.count(KEYS["zero_replicas"]) or 1
    whole |= {
        "layers_per_stage": (model.layers,),
        "precision": precision,
        "micro_batch_size": micro,
        "global_batch_size": batch,
        "zero_stage": 3,
        "recompute": "full" if keys.switch(KEYS["recompute"]) else "none",
    }
    if replicas > 1:
        whole["zero_replicas"] = replicas
    if keys.switch(KEYS["offload_optimizer"]):
        whole["offload_optimizer"] = True
    return build_layout(whole, places, keys.problems)
