"""Scripts with ms-swift's commands for training with Megatron-LM (`megatron sft`)."""

from __future__ import annotations

import dataclasses

from costmodels.spec.model import ModelSpec
from planner.formats.facts.definitions import with_definitions
from planner.formats.facts.entries import Entries, Entry
from planner.formats.facts.flag_catalogue import GivenFlag, KnownFlag, known_flags
from planner.formats.facts.key_table import key_table
from planner.formats.facts.keyed import Keyed, known_keys
from planner.formats.facts.launcher import Launch, commands, flag_values
from planner.formats.facts.reading import Problems, Reading
from planner.formats.facts.roles import name_others
from planner.formats.facts.source import Source, Surroundings
from planner.formats.hugging_face.adapters import with_adapters
from planner.formats.hugging_face.step import SHORTER
from planner.formats.megatron.reader import read_command
from planner.formats.on_megatron.flags import as_flags, renamed
from planner.formats.shell.text import Word
from planner.inputs.huggingface.script_names import model_of

SWIFT = key_table("ms-swift")

SWIFT_COMMANDS = ("sft", "pt", "rlhf")


def swift_command(text: str, around: Surroundings) -> tuple[Launch, Entries] | None:
    """The ms-swift command for training with Megatron-LM, and its flags; None where there is none."""
    for launch in commands(text, dict(around.define), around.beside):
        names = [word.text.rpartition("/")[2] for word in launch.launcher]
        if "megatron" in names and launch.program in SWIFT_COMMANDS:
            return launch, _command_entries(launch)
    return None


def _command_entries(launch: Launch) -> Entries:
    """Flags of a command with their values, as keys with underscores."""
    return {
        name: Entry(name, " ".join(values) if values else "true", line)
        for name, values, line in flag_values(launch.arguments)
    }


def read_swift(source: Source, around: Surroundings) -> Reading:
    """The job of a script with `megatron sft` or `megatron pt` of ms-swift."""
    command = swift_command(source.text, around)
    assert command is not None
    launch, given = command
    # swift/cli/_megatron sets it where the environment does not.
    launch = dataclasses.replace(launch, cuda_connections=launch.cuda_connections or Word("1", 0))
    known = known_flags()
    entries = with_definitions(given, around.define, {name[2:].replace("-", "_") for name in known})
    problems = Problems(source.file)
    keys = Keyed(entries, "transformers", source.file, problems)
    flag_of = {path: _flag(path) for path in given}
    pairs = []
    for path, entry in entries.items():
        name = _flag(path)
        if name in known and known[name].role != "harmless":
            pairs.append((name, entry))
    said = {name for name, _ in pairs}
    made = Entry("", "true", 0)
    if not said & {"--bf16", "--fp16"} and (keys.text("torch_dtype") or "bfloat16") == "bfloat16":
        pairs.append(("--bf16", made))
    pairs += [
        (name, dataclasses.replace(made, text=text.lower()))
        for name, text in SWIFT.defaults.items()
        if name not in said
    ]
    model = _swift_model(keys, around, problems)
    if model is not None and keys.text("train_type", "tuner_type") not in (None, "full"):
        dashed = {f"--{path}": entry for path, entry in entries.items()}
        model = with_adapters(model, Keyed(dashed, "transformers", source.file, problems), "ms-swift")
    reading = read_command(
        as_flags(pairs),
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
    elif (keys.text("packing") or "").lower() != "true" and reading.layout is not None:
        reading = dataclasses.replace(
            reading, assumed=(*reading.assumed, SHORTER), activations_are_bound=True
        )
    rest = [flag for flag in keys.flags() if flag_of.get(flag.name, "") not in said and flag.line]
    others = [dataclasses.replace(flag, name=f"--{flag.name}", known=_trainers_flag(flag)) for flag in rest]
    name_others(others, problems, "is no flag of ms-swift that is known here")
    reading = dataclasses.replace(
        reading, flags=(*reading.flags, *others), problems=(*problems.found, *reading.problems)
    )
    return renamed(reading, {flag: f"--{path}" for path, flag in flag_of.items()}, "ms-swift", "megatron")


def _flag(path: str) -> str:
    return SWIFT.flag_of.get(path, f"--{path.replace('_', '-')}")


def _trainers_flag(flag: GivenFlag) -> KnownFlag:
    role = known_keys("transformers").get(f"--{flag.name}")
    if flag.name in SWIFT.roles or f"--{flag.name.replace('_', '-')}" in known_flags():
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
