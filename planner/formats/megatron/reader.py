"""Command lines of Megatron-LM, MindSpeed and PAI's llmacc, read into a model and a layout.

The rules are those of Megatron-LM's `validate_args` (megatron/training/arguments.py) and of
`TransformerConfig.__post_init__` (megatron/core/transformer/transformer_config.py), and of MindSpeed's
features (mindspeed/features_manager).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from costmodels.errors import InputError, on_one_line
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from planner.formats.facts.definitions import is_mentioned
from planner.formats.facts.flag_catalogue import GivenFlag, given_flags, known_flags
from planner.formats.facts.keyed import DECIDING
from planner.formats.facts.launcher import Launch, count_of, find_launch, sizes_on_page
from planner.formats.facts.launcher import world_size as launched
from planner.formats.facts.open_words import deciding_names, name_open_words
from planner.formats.facts.reading import Problems, Reading
from planner.formats.facts.roles import name_others
from planner.formats.facts.source import Source
from planner.formats.hugging_face import deepspeed_config
from planner.formats.megatron.aliases import with_todays_names
from planner.formats.megatron.dispatch import dispatch_constants
from planner.formats.megatron.job import Job
from planner.formats.megatron.layout import layout_of
from planner.formats.megatron.model import Given, last_of_each, read_model, unset
from planner.formats.megatron.names import (
    DEGREE_FLAGS,
)
from planner.formats.shell.text import Word
from planner.inputs.model import with_seq

DEVICES = {"mindspeed": "ascend-910b", "llmacc": "a100-80g"}
"""The device for which a software is made, if its scripts do not name it: Ascend's, and that of PAI's
machines."""


def read_megatron(
    source: str,
    file: str,
    defined: dict[str, str],
    world_size: int | None = None,
    local_world_size: int | None = None,
    described: str | None = None,
    deepspeed: Source | None = None,
    beside: Mapping[str, str] | None = None,
) -> Reading | None:
    """The job that a script or a list of arguments starts; None where it starts no such job.

    Args:
        defined: environment variables of the script.
        world_size: devices of the job; overrides the script.
        described: the file that describes the model, if the script does not.
        deepspeed: the DeepSpeed configuration that a script of Megatron-DeepSpeed names.
        beside: texts of the files that the script sources, by name.
    """
    launch = find_launch(source, defined, beside)
    if launch is None:
        return None
    flags, loose = given_flags(launch.arguments)
    for flag in flags:
        if deepspeed is None and flag.name in _DEEPSPEEDS:
            deepspeed = deepspeed_config.written_by(launch, flag.text, file)
    return read_command(
        flags,
        loose,
        launch,
        file,
        world_size=world_size,
        local_world_size=local_world_size,
        described=described,
        deepspeed=deepspeed,
        sizes=sizes_on_page(source),
        defined={name: value for name, value in defined.items() if not is_mentioned(name, source)},
        conditional=deciding_names(source, launch, _decides),
    )


_DEEPSPEEDS = ("--deepspeed_config", "--deepspeed-config")


def _decides(flag: str) -> bool:
    known = known_flags().get(flag)
    return known is None or known.role not in ("harmless", "training")


def read_command(
    flags: list[GivenFlag],
    loose: list[Word],
    launch: Launch,
    file: str,
    *,
    world_size: int | None = None,
    local_world_size: int | None = None,
    described: str | None = None,
    deepspeed: Source | None = None,
    model: ModelSpec | None = None,
    framework: str | None = None,
    sizes: tuple[int | None, int | None] = (None, None),
    defined: Mapping[str, str] | None = None,
    conditional: Collection[str] = (),
) -> Reading:
    """The job that flags describe.

    Args:
        loose: words of the command that belong to no flag.
        model: the model, if known; flags then only give its sequence length.
        framework: the software of the flags, if known.
        sizes: nodes and devices per node that a page gives beside the command.
        defined: values of flags by name, which override the given flags.
        conditional: variables that the script sets, perhaps only under a condition.
    """
    problems, assumed = Problems(file), list[str]()
    flags = with_defined(flags, defined or {})
    named = last_of_each(tuple(flags), problems)
    given = with_todays_names(named, problems)
    if world_size is not None:
        given = {name: flag for name, flag in given.items() if name != "--world-size"}
    framework = framework or _framework(launch, given)
    name_others(named.values(), problems, "is no flag of Megatron-LM or MindSpeed that is known here")
    loose = _one_number_of_experts(given, loose, framework, problems)
    _name_loose(loose, problems, conditional)
    _name_unread_values(given, deepspeed is not None, problems)
    if model is None:
        model = read_model(given, problems, assumed, described, framework)
    else:
        model = _with_sequences(given, model, problems)
    job = Job(given, problems, framework, model, deepspeed)
    of_page = sizes if framework == "llmacc" else (None, None)
    world, per_node = _devices(job, launch, world_size, local_world_size, of_page)
    chooses = framework != "llmacc" or DEGREE_FLAGS["tensor_parallel"] in given
    layout = layout_of(job, world, launch) if chooses and model is not None else None
    exact, most = _batches(job, layout, chooses)
    _name_missing_sources(launch, problems)
    engine = _engine(framework, given)
    dispatches = model is not None and model.experts and engine == "megatron" and framework != "llmacc"
    return Reading(
        framework=framework,
        engine=engine,
        engine_constants=dispatch_constants(given) if dispatches else {},
        file=file,
        model=model,
        layout=layout,
        program=launch.program,
        chooses_layout=chooses,
        precision=job.precision() if chooses or job.names_precision() else None,
        world_size=world,
        local_world_size=per_node,
        device=DEVICES.get(framework),
        global_batch_size=exact,
        max_global_batch_size=most,
        flags=tuple(flags),
        names=DEGREE_FLAGS,
        training=_training(given),
        assumed=tuple(assumed),
        problems=tuple(problems.found),
        memory_is_bound=job.memory_is_bound,
    )


def _name_unread_values(given: Given, has_deepspeed: bool, problems: Problems) -> None:
    """Add problems for flags that affect the job and have unknown values: variables, and files of flags."""
    for flag in given.values():
        if flag.name in _DEEPSPEEDS and has_deepspeed:
            continue  # The file is given, or the script writes it, under whatever name.
        if flag.unknown and flag.known.role in DECIDING:
            problems.add(*unset(flag))
        elif flag.name == "--yaml-cfg":
            text = "says the job, and is not read"
            problems.add("unknown", f"{flag.text} {text}", flag.name, flag.line, "give its keys as flags")


def _devices(
    job: Job,
    launch: Launch,
    world_size: int | None,
    local_world_size: int | None,
    of_page: tuple[int | None, int | None],
) -> tuple[int | None, int | None]:
    """Devices of a job and of each node: from the caller, then a flag, the launcher, and the page."""
    nodes, on_page = of_page
    per_node = local_world_size or job.count("--local-world-size") or count_of(launch.per_node) or on_page
    world = world_size or job.count("--world-size") or launched(launch, nodes, per_node)
    if world is None:
        _unknown_world(launch, job.problems)
    return world, per_node


def _batches(job: Job, layout: Layout | None, chooses: bool) -> tuple[int | None, int | None]:
    """The exact and the maximum global batch of a job, in sequences; a searching job has only one of the
    two."""
    flag = "--max-global-batch-size"
    exact = layout.global_batch_size if layout is not None else job.batch()
    most = job.count(flag)
    if chooses:
        return exact, None
    if not (exact or most):
        job.problems.add("unknown", f"no --global-batch-size or {flag}", flag)
    return (None if most else exact), most


def _name_missing_sources(launch: Launch, problems: Problems) -> None:
    """Add problems for sourced files that are not given, if a fact is unknown."""
    if any(problem.severity == "unknown" for problem in problems.found):
        for word in launch.not_sourced:
            text = f"{word.text} is not given, and the variables that it sets are not known"
            problems.add("note", text, "source", word.line, "give that file too")


def _with_sequences(given: Given, model: ModelSpec, problems: Problems) -> ModelSpec:
    """A known model with the sequence length that a flag gives."""
    flag = given.get("--seq-length")
    if flag is None or not re.fullmatch(r"[1-9][0-9]{0,8}", flag.text):
        return model
    try:
        return with_seq(model, int(flag.text))
    except InputError as error:
        problems.add("illegal", on_one_line(error), flag.name, flag.line)
        return model


def _training(given: Given) -> dict[str, str]:
    """Flags of training and data that the runtime also accepts."""
    roles = ("training", "harmless")
    return {
        flag.name: flag.text
        for flag in given.values()
        if flag.known.role in roles and flag.known.framework == "megatron" and not flag.unknown
    }


def _framework(launch: Launch, given: Given) -> str:
    if launch.program.startswith("llmacc"):
        return "llmacc"
    if "--deepspeed" in given:
        return "megatron-deepspeed"
    named = [flag for flag in given.values() if flag.known.framework == "mindspeed"]
    return "mindspeed" if named else "megatron"


def _engine(framework: str, given: Given) -> str:
    """The engine that prices the flags of a software."""
    if framework == "megatron-deepspeed" and any(name in given for name in FLASH):
        return "megatron-deepspeed-flash"
    return framework if framework in ("mindspeed", "megatron-deepspeed") else "megatron"


FLASH = ("--use-flash-attn", "--use-flash-attn-v1", "--use-flash-attn-v2", "--use-flash-attn-triton")
"""Switches of Megatron-DeepSpeed for flash attention."""


def with_defined(flags: list[GivenFlag], defined: Mapping[str, str]) -> list[GivenFlag]:
    """The flags with the caller's flags replaced or added; an empty value removes a flag."""
    known = known_flags()
    found = list(flags)
    for name, text in defined.items():
        flag = next(
            (one for one in _spelled(name) if one in known or any(one == had.name for had in flags)), None
        )
        if flag is None:
            continue
        line = next((had.line for had in flags if had.name == flag), 0)
        of = next((had.known for had in flags if had.name == flag), known.get(flag))
        assert of is not None
        found = [had for had in found if had.name != flag]
        off = text == "" or (not of.words and text.lower() in ("false", "0", "no"))
        if not off:
            words = (Word(text, line),) if of.words else ()
            found.append(GivenFlag(flag, words, line, of))
    return found


def _spelled(name: str) -> tuple[str, ...]:
    bare = name.lstrip("-")
    return f"--{bare}", f"--{bare.replace('_', '-')}"


def _one_number_of_experts(given: Given, loose: list[Word], framework: str, problems: Problems) -> list[Word]:
    """The loose words without those of a list of experts per layer.

    Megatron-DeepSpeed accepts a list (`--num-experts 32 32 64`); a list of equal numbers is read as that
    number.
    """
    flag = given.get("--num-experts")
    if flag is None or framework != "megatron-deepspeed" or not flag.values:
        return loose
    line = flag.values[0].line
    others = [word for word in loose if word.line == line and word.text.isdigit()]
    if {word.text for word in others} - {flag.text}:
        text = "layers with different numbers of experts are not priced"
        problems.add("unknown", text, flag.name, flag.line, "give --define num_experts=N for one number")
    return [word for word in loose if word not in others]


def _name_loose(loose: list[Any], problems: Problems, conditional: Collection[str]) -> None:
    """Add problems for words of the command that no flag takes; words that may be flags make the job
    unknown."""
    named = name_open_words(loose, conditional, problems)
    for word in loose:
        if word not in named and not word.unknown and word.text not in ("\\", ""):
            problems.add("note", f"the word {word.text[:40]!r} belongs to no flag", line=word.line)


def _unknown_world(launch: Launch, problems: Problems) -> None:
    words = [word for word in (launch.nodes, launch.per_node) if word is not None and count_of(word) is None]
    said = f": {', '.join(word.text for word in words)} is not set in the file" if words else ""
    line = words[0].line if words else None
    text = f"the number of devices is not known{said}"
    problems.add("unknown", text, "--nnodes" if words else "", line, "give --world-size")
