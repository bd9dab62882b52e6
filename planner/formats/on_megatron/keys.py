"""Software whose keys stand for flags of Megatron-LM: GPT-NeoX, `megatron sft` of ms-swift, verl's actor."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

from costmodels.spec.model import ModelSpec
from planner.formats.facts.definitions import with_definitions
from planner.formats.facts.entries import Entries, Entry
from planner.formats.facts.flag_catalogue import GivenFlag, KnownFlag, known_flags
from planner.formats.facts.hub_models import model_of
from planner.formats.facts.keyed import Keyed, known_keys
from planner.formats.facts.launcher import Launch, commands
from planner.formats.facts.reading import Problems, Reading
from planner.formats.facts.roles import name_others
from planner.formats.facts.source import Source, Surroundings
from planner.formats.megatron.names import DEGREE_FLAGS
from planner.formats.megatron.reader import read_command
from planner.formats.shell.text import Word

NEOX = {
    "pipe_parallel_size": "--pipeline-model-parallel-size",
    "model_parallel_size": "--tensor-model-parallel-size",
    "context_parallel_size": "--context-parallel-size",
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "intermediate_size": "--ffn-hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "num_kv_heads": "--num-query-groups",
    "seq_length": "--seq-length",
    "max_position_embeddings": "--max-position-embeddings",
    "pos_emb": "--position-embedding-type",
    "rotary_pct": "--rotary-percent",
    "norm": "--normalization",
    "checkpoint_num_layers": "--recompute-num-layers",
    "train_micro_batch_size_per_gpu": "--micro-batch-size",
    "train_batch_size": "--global-batch-size",
    "zero_optimization.stage": "--zero-stage",
    "fp16.enabled": "--fp16",
    "bf16.enabled": "--bf16",
    "no_weight_tying": "--untie-embeddings-and-output-weights",
    "sequence_parallel": "--sequence-parallel",
    "checkpoint_activations": "--checkpoint-activations",
    "moe_num_experts": "--num-experts",
    "moe_top_k": "--moe-router-topk",
    "tokenizer_type": "--tokenizer-type",
    "vocab_file": "--tokenizer-model",
    "padded_vocab_size": "--vocab-size",
}
"""Flags by the keys of GPT-NeoX (megatron/neox_arguments/neox_args.py)."""

SWIFT = {
    "max_length": "--seq-length",
    "pipeline_model_parallel_layout": "--pipeline-model-parallel-layout",
    "decoder_first_pipeline_num_layers": "--decoder-first-pipeline-num-layers",
    "decoder_last_pipeline_num_layers": "--decoder-last-pipeline-num-layers",
}
"""Flags by those of ms-swift's `megatron` commands that are called otherwise."""

SWIFT_DEFAULTS = {
    "--micro-batch-size": "1",
    "--global-batch-size": "16",
    "--use-distributed-optimizer": "",
    "--expert-tensor-parallel-size": "1",
}
"""swift/megatron/arguments/megatron_args.py."""

SWIFT_COMMANDS = ("sft", "pt", "rlhf")

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


def is_neox(entries: Entries) -> bool:
    """Whether keys are those of GPT-NeoX, which writes hyphens too."""
    names = {path.replace("-", "_") for path in entries}
    return "pipe_parallel_size" in names or {"model_parallel_size", "num_attention_heads"} <= names


def is_verl(entries: Entries) -> bool:
    """Whether keys are those of verl."""
    return any(path.startswith(f"{ACTOR}.") for path in entries)


def _flags(pairs: Iterable[tuple[str, Entry]]) -> list[GivenFlag]:
    """Keys as flags; a switch is given where its key is true."""
    known = known_flags()
    found = []
    for name, entry in pairs:
        flag = known[name]
        if entry.null or (not flag.words and entry.text.lower() in ("false", "0", "")):
            continue
        unknown = (entry.text.strip("${}"),) if "${" in entry.text else ()
        words = (Word(entry.text, entry.line, unknown),) if flag.words else ()
        found.append(GivenFlag(name, words, entry.line, flag))
    return found


def _renamed(reading: Reading, names: Mapping[str, str], framework: str, engine: str) -> Reading:
    """A reading of flags, with the keys that these stand for in their places."""
    problems = []
    for problem in reading.problems:
        name = names.get(problem.flag, problem.flag)
        text, remedy = problem.text, problem.remedy
        for flag, key in sorted(names.items(), key=lambda pair: -len(pair[0])):
            text, remedy = text.replace(flag, key), remedy.replace(flag, key)
        problems.append(
            dataclasses.replace(problem, flag=name, text=text, remedy=remedy, line=problem.line or None)
        )
    return dataclasses.replace(
        reading,
        framework=framework,
        engine=engine,
        flags=tuple(
            dataclasses.replace(flag, name=names.get(flag.name, flag.name)) for flag in reading.flags
        ),
        names={field: names.get(flag, flag) for field, flag in DEGREE_FLAGS.items()},
        problems=tuple(problems),
    )


def read_neox(source: Source, around: Surroundings) -> Reading:
    """The job that a configuration of GPT-NeoX describes."""
    plain = {path.replace("-", "_"): entry for path, entry in source.entries.items()}
    entries = with_definitions(plain, around.define, NEOX)
    problems = Problems(source.file)
    keys = Keyed(entries, "gpt-neox", source.file, problems)
    pairs = [(flag, entries[path]) for path, flag in NEOX.items() if path in entries]
    made: list[tuple[str, Entry]] = [("--deepspeed", Entry("", "true", 0))]
    if (keys.text("precision") or "") == "bfloat16":
        made.append(("--bf16", entries["precision"]))
    if (keys.text("activation") or "").lower() in ("swiglu", "geglu"):
        made.append(("--swiglu", entries["activation"]))
    if "num_kv_heads" in entries:
        made.append(("--group-query-attention", entries["num_kv_heads"]))
    if "zero_optimization.stage" not in entries:
        made.append(("--zero-stage", Entry("", "0", 0)))
    flags = [
        dataclasses.replace(flag, values=(Word("1", flag.line),))
        if flag.text == "0" and flag.name == DEGREE_FLAGS["pipeline_parallel"]
        else flag
        for flag in _flags([*pairs, *made])
    ]
    batch = _neox_batch(keys, around)
    if batch is not None and "train_batch_size" not in entries:
        flags += _flags([("--global-batch-size", batch)])
    launch = Launch("gpt-neox", (), None, None, None)
    reading = read_command(
        flags,
        [],
        launch,
        source.file,
        world_size=around.world_size,
        local_world_size=around.local_world_size,
        described=around.described,
        framework="megatron-deepspeed",
    )
    rest = [flag for flag in keys.flags() if flag.name not in NEOX and flag.line]
    name_others(rest, problems, "is no key of GPT-NeoX that is known here")
    reading = dataclasses.replace(reading, problems=(*problems.found, *reading.problems))
    return _renamed(reading, {flag: path for path, flag in NEOX.items()}, "gpt-neox", "megatron-deepspeed")


def _neox_batch(keys: Keyed, around: Surroundings) -> Entry | None:
    """The global batch that micro batches and steps make on all devices."""
    micro, steps = (
        keys.count("train_micro_batch_size_per_gpu"),
        keys.count("gradient_accumulation_steps") or 1,
    )
    shards = 1
    for name in ("pipe_parallel_size", "model_parallel_size", "context_parallel_size"):
        shards *= max(keys.count(name, least=0) or 1, 1)
    if micro is None or around.world_size is None or around.world_size % shards:
        return None
    line = keys.line("gradient_accumulation_steps") or 0
    return Entry("gradient_accumulation_steps", str(micro * steps * (around.world_size // shards)), line)


def swift_command(text: str, around: Surroundings) -> tuple[Launch, Entries] | None:
    """The command of ms-swift that trains with Megatron-LM, and its flags; None where there is none."""
    for launch in commands(text, dict(around.define), around.beside):
        names = [word.text.rpartition("/")[2] for word in launch.launcher]
        if "megatron" in names and launch.program in SWIFT_COMMANDS:
            return launch, command_entries(launch)
    return None


def command_entries(launch: Launch) -> Entries:
    """Flags of a command with their values as keys with underscores."""
    found: Entries = {}
    words = launch.arguments
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if not word.text.startswith("--"):
            continue
        name, equals, value = word.text[2:].partition("=")
        values = [value] if equals else []
        while at < len(words) and not words[at].text.startswith("--") and not equals:
            values.append(words[at].text)
            at += 1
        path = name.replace("-", "_")
        found[path] = Entry(path, " ".join(values) if values else "true", word.line)
    return found


def read_swift(source: Source, around: Surroundings) -> Reading:
    """The job of a script with `megatron sft` or `megatron pt` of ms-swift."""
    command = swift_command(source.text, around)
    assert command is not None
    launch, given = command
    known = known_flags()
    flag_of = {path: SWIFT.get(path, f"--{path.replace('_', '-')}") for path in given}
    entries = with_definitions(given, around.define, {name[2:].replace("-", "_") for name in known})
    problems = Problems(source.file)
    keys = Keyed(entries, "transformers", source.file, problems)
    pairs = []
    for path, entry in entries.items():
        name = flag_of.get(path, SWIFT.get(path, f"--{path.replace('_', '-')}"))
        if name in known and known[name].role != "harmless":
            pairs.append((name, entry))
    said = {name for name, _ in pairs}
    made = Entry("", "true", 0)
    if not said & {"--bf16", "--fp16"} and (keys.text("torch_dtype") or "bfloat16") == "bfloat16":
        pairs.append(("--bf16", made))
    pairs += [
        (name, dataclasses.replace(made, text=text or "true"))
        for name, text in SWIFT_DEFAULTS.items()
        if name not in said
    ]
    if keys.text("train_type", "tuner_type") not in (None, "full"):
        text = "adapters under ms-swift's Megatron are not priced"
        keys.add("unknown", text, "train_type" if "train_type" in entries else "tuner_type")
    model = _swift_model(keys, around, problems)
    reading = read_command(
        _flags(pairs),
        [],
        launch,
        source.file,
        world_size=around.world_size,
        local_world_size=around.local_world_size,
        model=model,
        framework="megatron",
    )
    if model is None:
        return dataclasses.replace(reading, framework="ms-swift", problems=tuple(problems.found), layout=None)
    if "--seq-length" not in said:
        keys.add(
            "unknown", "no flag says the length of sequences", "--max_length", "give --define max_length=N"
        )
    rest = [flag for flag in keys.flags() if flag_of.get(flag.name, "") not in said and flag.line]
    others = [dataclasses.replace(flag, known=_trainers_flag(flag)) for flag in rest]
    name_others(others, problems, "is no flag of ms-swift that is known here")
    reading = dataclasses.replace(reading, problems=(*problems.found, *reading.problems))
    return _renamed(reading, {flag: f"--{path}" for path, flag in flag_of.items()}, "ms-swift", "megatron")


_SWIFT_ASIDE = (
    "load_safetensors",
    "save_safetensors",
    "model",
    "packing",
    "torch_dtype",
    "model_type",
    "sequence_parallel",
)


def _trainers_flag(flag: GivenFlag) -> KnownFlag:
    role = known_keys("transformers").get(f"--{flag.name}")
    if flag.name in _SWIFT_ASIDE or f"--{flag.name.replace('_', '-')}" in known_flags():
        role = "harmless"
    return dataclasses.replace(flag.known, role=role or flag.known.role)


def _swift_model(keys: Keyed, around: Surroundings, problems: Problems) -> ModelSpec | None:
    if around.model is not None:
        return around.model
    entry = keys.first("model", "load", "mcore_model")
    model = None if entry is None else model_of(entry.text)
    if model is None:
        text = f"the model {entry.text if entry else ''} is not in the catalogue".replace("  ", " ")
        keys.add("unknown", text, entry.path if entry else "model", "give --model")
    return model


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
        _flags(pairs),
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
    return _renamed(reading, names, "verl", "megatron")
