"""Jobs of verl: the actor, which trains with Megatron-LM."""

from __future__ import annotations

import dataclasses

from planner.formats.facts.definitions import with_definitions
from planner.formats.facts.entries import Entries, Entry
from planner.formats.facts.hub_models import model_of
from planner.formats.facts.keyed import Keyed
from planner.formats.facts.launcher import Launch
from planner.formats.facts.reading import Problems, Reading
from planner.formats.facts.source import Source, Surroundings
from planner.formats.megatron.reader import read_command
from planner.formats.on_megatron.flags import as_flags, renamed
from planner.formats.shell.text import Word

VERL = {
    "tensor_model_parallel_size": "--tensor-model-parallel-size",
    "pipeline_model_parallel_size": "--pipeline-model-parallel-size",
    "virtual_pipeline_model_parallel_size": "--num-virtual-stages-per-pipeline-rank",
    "context_parallel_size": "--context-parallel-size",
    "expert_model_parallel_size": "--expert-model-parallel-size",
    "expert_tensor_parallel_size": "--expert-tensor-parallel-size",
}
"""Flags by keys below `actor_rollout_ref.actor.megatron` of verl (verl/trainer/config/actor)."""

ACTOR = "actor_rollout_ref.actor"


def is_verl(entries: Entries) -> bool:
    """Whether keys are those of verl."""
    return any(path.startswith(f"{ACTOR}.") for path in entries)


def read_verl(source: Source, around: Surroundings) -> Reading:
    """The actor of a job of verl: the model that trains. `ref` and `rollout` are other programs beside it."""
    entries = source.entries
    problems = Problems(source.file)
    keys = Keyed(with_definitions(entries, around.define, ()), "verl", source.file, problems)
    at = f"{ACTOR}.megatron."
    if not any(path.startswith(at) for path in entries):
        text = "the actor trains under FSDP or another engine than Megatron-LM, which is not read"
        problems.add("unknown", text, f"{ACTOR}.strategy", keys.line(f"{ACTOR}.strategy"))
    pairs = [(flag, entries[at + key]) for key, flag in VERL.items() if at + key in entries]
    for path, flag in (
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", "--micro-batch-size"),
        (f"{ACTOR}.ppo_mini_batch_size", "--global-batch-size"),
    ):
        if path in entries:
            pairs.append((flag, entries[path]))
    said = {flag for flag, _ in pairs}
    made = Entry("", "true", 0)
    pairs += [("--bf16", made), ("--use-distributed-optimizer", made)]
    prompt, answer = (
        keys.count("data.max_prompt_length") or 512,
        keys.count("data.max_response_length") or 512,
    )
    pairs.append(("--seq-length", dataclasses.replace(made, text=str(prompt + answer))))
    if "--tensor-model-parallel-size" in said and keys.count(at + "tensor_model_parallel_size") != 1:
        pairs.append(("--sequence-parallel", made))
    nodes, local = keys.count("trainer.nnodes") or 1, keys.count("trainer.n_gpus_per_node") or 8
    name = keys.text("actor_rollout_ref.model.path")
    model = around.model or (None if name is None else model_of(name))
    if model is None:
        path = "actor_rollout_ref.model.path"
        problems.add("unknown", f"the model {name or ''} is not known", path, keys.line(path), "give --model")
    reading = read_command(
        as_flags(pairs),
        [],
        Launch("verl", (), None, None, None, Word("1", 0)),
        source.file,
        world_size=around.world_size or nodes * local,
        local_world_size=around.local_world_size or local,
        model=model or model_of("Qwen/Qwen3-8B"),
        framework="megatron",
    )
    text = (
        "ref and rollout share the devices with the actor and are not priced: memory and time are not known"
    )
    first = next(iter(entries.values()))
    problems.add(
        "unknown", text, "actor_rollout_ref.rollout", first.line, "give the actor as a script of Megatron-LM"
    )
    names = {flag: at + key for key, flag in VERL.items()}
    names |= {"--micro-batch-size": f"{ACTOR}.ppo_micro_batch_size_per_gpu"}
    names |= {"--global-batch-size": f"{ACTOR}.ppo_mini_batch_size"}
    reading = dataclasses.replace(
        reading,
        problems=(*problems.found, *reading.problems),
        model=model,
        layout=None if model is None else reading.layout,
    )
    return renamed(reading, names, "verl", "megatron")
