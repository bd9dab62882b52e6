"""Jobs of verl: the actor, which trains with Megatron-LM or FSDP, and the trainer for supervised fine-tuning
(SFT)."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from planner.formats.facts.definitions import with_definitions
from planner.formats.facts.entries import Entries, Entry
from planner.formats.facts.key_table import key_table
from planner.formats.facts.keyed import Keyed, known_keys
from planner.formats.facts.launcher import Launch, commands
from planner.formats.facts.launcher import world_size as launched
from planner.formats.facts.layout_fields import Places, build_layout, degrees_of_world
from planner.formats.facts.reading import Problems, Reading
from planner.formats.facts.roles import name_others
from planner.formats.facts.source import Source, Surroundings
from planner.formats.hugging_face.adapters import with_adapters
from planner.formats.megatron.reader import read_command
from planner.formats.on_megatron.flags import as_flags, renamed
from planner.formats.shell.text import Word
from planner.inputs.huggingface.script_names import model_of
from planner.inputs.model import with_seq

ACTOR, SFT = key_table("verl").fields, key_table("verl-sft").fields
FLAGS = {key: flag for flag, key in key_table("verl").flags.items()}
"""Flags of Megatron-LM by keys of the actor."""

ACTORS = "actor_rollout_ref.actor."

DEFAULTS = {"prompt": 512, "answer": 512, "global_batch_size": 256, "nodes": 1, "devices": 8, "answers": 1}
"""Default numbers from verl's own files (trainer/config/ppo_trainer.yaml, data/legacy_data.yaml,
actor/actor.yaml)."""

SFT_DEFAULTS = {"seq": 1024, "global_batch_size": 256, "micro_batch_size": 4, "nodes": 1, "devices": 8}
"""Default numbers from trainer/config/sft_trainer.yaml."""


def is_verl(entries: Entries) -> bool:
    """Return whether keys are those of verl's actor."""
    return any(path.startswith(ACTORS) for path in entries)


def is_verl_sft(entries: Entries) -> bool:
    """Return whether keys are those of verl's SFT trainer."""
    return SFT["model"] in entries


def read_verl(source: Source, around: Surroundings) -> Reading:
    """The actor of a verl job, which is the trained model. `ref` and `rollout` are other programs of the
    job."""
    problems = Problems(source.file)
    entries = with_definitions(source.entries, around.define, known_keys("verl"))
    keys = Keyed(entries, "verl", source.file, problems)
    numbers = {name: keys.count(ACTOR[name]) or number for name, number in DEFAULTS.items()}
    world = around.world_size or numbers["nodes"] * numbers["devices"]
    local = around.local_world_size or numbers["devices"]
    # Each prompt of a mini batch has several answers (trainer/ppo/ray_trainer.py).
    batch = numbers["global_batch_size"] * numbers["answers"]
    seq = numbers["prompt"] + numbers["answer"]
    model = _model(keys, ACTOR, around, seq)
    micro = _micro_batch(keys, ACTOR)
    strategy = keys.text(ACTOR["strategy"]) or ""
    theirs = any(name.startswith(f"{ACTORS}megatron.") for name in entries) or "megatron" in _config(source)
    if "megatron" in strategy or (not strategy and theirs):
        reading = _read_megatron(keys, model, batch, seq, micro, world, local)
    elif strategy in ("", "fsdp", "fsdp2"):
        reading = _read_fsdp(keys, ACTOR, "verl", model, batch, micro, world, local)
    else:
        text = f"the actor trains under {strategy}, which is not read"
        keys.add("unknown", text, ACTOR["strategy"])
        reading = Reading("verl", "fsdp", keys.file, model, None, world_size=world, local_world_size=local)
    flags = tuple(flag for flag in keys.flags() if flag.line)
    return dataclasses.replace(reading, flags=flags, problems=(*problems.found, *reading.problems))


def _config(source: Source) -> str:
    """The file of defaults that a command names."""
    named = re.search(r"--config-name[= ]+[\"']?([\w.-]+)", source.text)
    return named[1] if named else ""


def read_verl_sft(source: Source, around: Surroundings) -> Reading:
    """The job of verl's SFT trainer."""
    problems = Problems(source.file)
    entries = with_definitions(source.entries, around.define, known_keys("verl-sft"))
    keys = Keyed(entries, "verl-sft", source.file, problems)
    numbers = {name: keys.count(SFT[name]) or number for name, number in SFT_DEFAULTS.items()}
    marks = f"{SFT['model']}="
    launch = next(
        (
            one
            for one in commands(source.text, dict(around.define), around.beside)
            if any(word.text.lstrip("+").startswith(marks) for word in one.arguments)
        ),
        None,
    )
    world = around.world_size or (
        numbers["nodes"] * numbers["devices"] if launch is None else launched(launch)
    )
    if world is None:
        problems.add("unknown", "the number of devices is not known", "", None, "give --world-size")
    model = _model(keys, SFT, around, numbers["seq"])
    batch = numbers["global_batch_size"]
    local = around.local_world_size or (numbers["devices"] if launch is None else None)
    reading = _read_fsdp(keys, SFT, "verl-sft", model, batch, numbers["micro_batch_size"], world, local)
    keys.name_unread()
    others = [flag for flag in keys.flags() if flag.line]
    name_others(others, problems, "is no key of verl that is known here")
    program = "sft_trainer" if launch is None else launch.program
    found = (*problems.found, *reading.problems)
    return dataclasses.replace(reading, framework="verl", program=program, problems=found)


def _model(keys: Keyed, table: Mapping[str, str], around: Surroundings, seq: int) -> ModelSpec | None:
    name = keys.text(table["model"])
    model = around.model or (None if name is None else model_of(name))
    if model is None:
        keys.add("unknown", f"the model {name or ''} is not known", table["model"], "give --model")
        return None
    rank = keys.count(table["lora_rank"], least=0)
    model = with_seq(model, seq)
    return model if not rank else _with_lora(keys, table, model)


def _with_lora(keys: Keyed, table: Mapping[str, str], model: ModelSpec) -> ModelSpec:
    """The model with its adapters, from keys translated to flags of trainers."""
    given = {"--use_peft": Entry("--use_peft", "true", 0)}
    for flag, field, usual in (
        ("--lora_r", "lora_rank", ""),
        ("--lora_alpha", "lora_alpha", "16"),
        ("--lora_target_modules", "lora_targets", "all-linear"),
    ):
        entry = keys.first(table[field]) or Entry(flag, usual, 0)
        given[flag] = dataclasses.replace(entry, path=flag)
    return with_adapters(model, Keyed(given, "transformers", keys.file, keys.problems), "verl")


def _micro_batch(keys: Keyed, table: Mapping[str, str]) -> int:
    """Sequences of a microbatch; unknown where a number of tokens decides, or where no key gives it."""
    micro = keys.count(table["micro_batch_size"])
    if keys.switch(table["dynamic"]):
        text = "microbatches have as many samples as a number of tokens holds"
        path = table["dynamic"]
        keys.add("unknown", text, path, f"give --define {path}=false for microbatches of a number of samples")
    elif micro is None:
        path = table["micro_batch_size"]
        keys.add("unknown", "no key says the microbatch", path, f"give --define {path}=N")
    return micro or 1


def _read_megatron(
    keys: Keyed, model: ModelSpec | None, batch: int, seq: int, micro: int, world: int, local: int
) -> Reading:
    entries = keys.entries
    if keys.count(ACTOR["megatron_lora_rank"], least=0):
        keys.add("unknown", "adapters of Megatron-Bridge are not priced", ACTOR["megatron_lora_rank"])
    if model is None:
        return Reading("verl", "megatron", keys.file, None, None, world_size=world, local_world_size=local)
    pairs = {flag: entries[key] for key, flag in FLAGS.items() if key in entries}
    made = Entry("", "true", 0)
    usual = {"--bf16": "true", "--use-distributed-optimizer": "true", "--seq-length": str(seq)}
    degree = pairs.get("--tensor-model-parallel-size", Entry("", "1", 0))
    if degree.text == "1":
        pairs.pop("--sequence-parallel", None)
    else:
        usual["--sequence-parallel"] = "true"
    if "--recompute-granularity" not in pairs or pairs["--recompute-granularity"].null:
        pairs = {flag: entry for flag, entry in pairs.items() if not flag.startswith("--recompute")}
    elif pairs["--recompute-granularity"].text == "full":
        pairs.pop("--recompute-modules", None)
    for flag, field, number in (
        ("--micro-batch-size", "micro_batch_size", micro),
        ("--global-batch-size", "global_batch_size", batch),
    ):
        pairs[flag] = Entry(ACTOR[field], str(number), keys.line(ACTOR[field]) or 0)
    pairs = {flag: dataclasses.replace(made, text=text) for flag, text in usual.items()} | pairs
    if not model.tied:
        pairs["--untie-embeddings-and-output-weights"] = made
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
    names = {flag: key for key, flag in FLAGS.items()}
    names |= {
        "--micro-batch-size": ACTOR["micro_batch_size"],
        "--global-batch-size": ACTOR["global_batch_size"],
    }
    return renamed(reading, names, "verl", "megatron")


def _read_fsdp(
    keys: Keyed,
    table: Mapping[str, str],
    software: str,
    model: ModelSpec | None,
    batch: int,
    micro: int,
    world: int | None,
    local: int | None,
) -> Reading:
    """A job under FSDP, with fp32 weights and bf16 computation (workers/fsdp_workers.py)."""
    assumed = []
    if (keys.text(table["weights"]) or "fp32") not in ("fp32", "float32"):
        keys.add("unknown", "weights of another format than fp32 are not priced", table["weights"])
    if table["recompute"] not in keys:
        assumed.append(f"layers are recomputed (the default of {table['recompute']})")
    layout = None
    if model is not None and world is not None:
        layout = _fsdp_layout(keys, table, model, batch, micro, world)
    split = layout is not None and layout.context_parallel > 1
    return Reading(
        framework=software,
        engine="torchtitan" if split else "fsdp",
        file=keys.file,
        model=model,
        layout=layout,
        precision="bf16",
        world_size=world,
        local_world_size=local,
        global_batch_size=batch,
        flags=tuple(flag for flag in keys.flags() if flag.line),
        names=table,
        assumed=tuple(assumed),
    )


def _fsdp_layout(
    keys: Keyed, table: Mapping[str, str], model: ModelSpec, batch: int, micro: int, world: int
) -> Layout | None:
    places = Places(table, {path: entry.line for path, entry in keys.entries.items()})
    degrees: dict[str, Any] = {"context_parallel": keys.count(table["context_parallel"]) or 1}
    if degrees["context_parallel"] > 1:
        degrees["context_parallel_form"] = "all_to_all"
    whole = degrees_of_world(degrees, world, places, keys.problems)
    if whole is None:
        return None
    unit = micro * whole["data_parallel"]
    if batch % unit:
        ranks = whole["data_parallel"]
        text = f"{batch} samples are not a multiple of microbatch {micro} x {ranks} data-parallel ranks"
        keys.add("illegal", text, table["global_batch_size"], f"use a multiple of {unit}")
        return None
    shards = keys.entries.get(table["shards"])
    size = (
        None if shards is None or shards.null or shards.text.startswith("-") else keys.count(table["shards"])
    )
    whole |= {
        "layers_per_stage": (model.layers,),
        "precision": "bf16",
        "micro_batch_size": micro,
        "global_batch_size": batch,
        "zero_stage": 3 if keys.switch(table["zero_stage"], default=True) else 2,
        "recompute": "full" if keys.switch(table["recompute"], default=True) else "none",
        "offload_activations": keys.switch(table["offload_activations"]),
        "offload_optimizer": keys.switch(table["offload_optimizer"]),
    }
    if size and size < world and world % size == 0:
        whole["zero_replicas"] = world // size
    return build_layout(whole, places, keys.problems)
