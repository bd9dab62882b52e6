"""Scripts of slime (THUDM): the actor, whose flags are Megatron-LM's flags and flags of rollouts.
slime/utils/arguments.py has its own flags. backends/megatron_utils/arguments.py sets some of Megatron-LM's:
the distributed optimizer, bf16, and sequences of variable length.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from fnmatch import fnmatchcase

from costmodels.spec.model import ModelSpec
from planner.formats.facts.definitions import is_mentioned
from planner.formats.facts.flag_catalogue import GivenFlag, KnownFlag, given_flags, known_flags
from planner.formats.facts.keyed import DECIDING, known_keys
from planner.formats.facts.launcher import Launch, commands
from planner.formats.facts.reading import Problems, Reading
from planner.formats.facts.source import Source, Surroundings
from planner.formats.megatron.reader import read_command, with_defined
from planner.formats.shell.text import Word
from planner.inputs.huggingface.script_names import model_of

NODES, DEVICES = "--actor-num-nodes", "--actor-num-gpus-per-node"
MARKS = {NODES, DEVICES, "--rollout-num-gpus", "--rollout-function-path", "--rollout-batch-size"}

DEFAULTS = {NODES: "1", DEVICES: "8"}
"""Default numbers of the actor's devices."""

DYNAMIC = "--use-dynamic-batch-size"


def find_slime(text: str, define: Mapping[str, str], beside: Mapping[str, str]) -> Launch | None:
    """The command of a script that starts slime; None where there is none."""
    for launch in commands(text, dict(define), beside):
        if len(MARKS & {word.text.partition("=")[0] for word in launch.arguments}) > 1:
            return launch
    return None


SWITCHES = (
    *("--colocate", "--offload*", "--use-*", "--balance-*", "--apply-chat-template", "--*-shuffle"),
    *("--group-rm", "--partial-rollout", "--disable-*", "--keep-old-actor", "--release-train", "--debug-*"),
    *("--normalize-advantages", "--skip-eval-before-train", "--enable-mtp-training", "--allgather-cp"),
    "--get-mismatch-metrics",
)
"""Slime's own flags without a value."""


def _own(name: str) -> KnownFlag | None:
    """A flag of slime itself; None for flags of Megatron-LM and for others.

    Patterns such as `--disable-*` do not match flags of Megatron-LM's model or layout.
    """
    roles = known_keys("slime")
    of_megatron = name in known_flags() and known_flags()[name].role in DECIDING
    role = roles.get(name) or next(
        (
            role
            for pattern, role in roles.items()
            if "*" in pattern and fnmatchcase(name, pattern) and not (of_megatron and role == "training")
        ),
        None,
    )
    words = "" if any(fnmatchcase(name, pattern) for pattern in SWITCHES) else "*"
    return None if role is None else KnownFlag(name, role, words, "slime")


def read_slime(source: Source, around: Surroundings) -> Reading:
    """The job of slime's actor, which is the trained model."""
    launch = find_slime(source.text, around.define, around.beside)
    assert launch is not None
    outside = {name: value for name, value in around.define.items() if not is_mentioned(name, source.text)}
    flags, loose = given_flags(launch.arguments, _own)
    flags = with_defined(flags, outside)
    problems, assumed = Problems(source.file), list[str]()
    by_name = {flag.name: flag for flag in flags}
    model = _model(by_name, around, problems, assumed)
    unknown_model = problems.fatal
    steps = _global_batch(by_name)
    made = {"--use-distributed-optimizer": ""}
    made |= {"--seq-length": "4096", "--micro-batch-size": "1"}
    made |= {} if "--fp16" in by_name else {"--bf16": ""}
    checkpoint = by_name.get("--hf-checkpoint")
    if checkpoint is not None and not {"--tokenizer-model", "--tokenizer-type"} & by_name.keys():
        made |= {"--tokenizer-type": "HuggingFaceTokenizer", "--tokenizer-model": checkpoint.text}
    made |= {} if steps is None else {"--global-batch-size": steps}
    known = known_flags()
    flags += [
        GivenFlag(name, (Word(text, 0),) if text else (), 0, known[name])
        for name, text in made.items()
        if name not in by_name
    ]
    nodes, local = (
        by_name[name].values[0] if name in by_name and by_name[name].values else Word(text, 0)
        for name, text in DEFAULTS.items()
    )
    reading = read_command(
        flags,
        loose,
        dataclasses.replace(launch, nodes=nodes, per_node=local, total=None, cuda_connections=Word("1", 0)),
        source.file,
        world_size=around.world_size,
        local_world_size=around.local_world_size,
        described=around.described if model is None or around.model is not None else None,
        model=model,
        framework="megatron",
        conditional=set(re.findall(r"([A-Za-z_]\w*)\+?=", source.text)),
    )
    if steps is None and "--global-batch-size" not in by_name:
        text = "no flag says how many samples a step has, for which slime has no default"
        problems.add("unknown", text, "--global-batch-size", None, "give --define global_batch_size=N")
    _name_lengths(by_name, problems)
    if "--colocate" in by_name:
        flag = by_name["--colocate"]
        text = "rollouts share the devices with the actor and are not priced: time and memory are not known"
        problems.add("unknown", text, flag.name, flag.line, "give --define colocate= for the actor alone")
    found = [
        dataclasses.replace(problem, flag=DEVICES) if problem.flag == "--nnodes" else problem
        for problem in reading.problems
        if problem.flag not in ("--num-layers", "--vocab-size") or not unknown_model
    ]
    return dataclasses.replace(
        reading,
        framework="slime",
        flags=tuple(flag for flag in reading.flags if flag.line),
        assumed=(*assumed, *reading.assumed),
        problems=(*problems.found, *found),
    )


def _global_batch(given: Mapping[str, GivenFlag]) -> str | None:
    """Samples of a step; if no batch is given, from a rollout's samples and its steps."""
    names = ("--rollout-batch-size", "--n-samples-per-prompt", "--num-steps-per-rollout")
    texts = [given[name].text if name in given else "1" for name in names]
    if names[0] not in given or names[2] not in given or not all(text.isdigit() for text in texts):
        return None
    prompts, samples, steps = map(int, texts)
    return str(prompts * samples // steps) if steps else None


def _model(
    given: Mapping[str, GivenFlag], around: Surroundings, problems: Problems, assumed: list[str]
) -> ModelSpec | None:
    """The model: from the caller, or from the checkpoint if no flag describes it; None where flags do."""
    if around.model is not None:
        return around.model
    if "--num-layers" in given:
        return None
    checkpoint = given.get("--hf-checkpoint")
    model = None if checkpoint is None or checkpoint.unknown else model_of(checkpoint.text)
    if model is None:
        text = "no flag says the model: its MODEL_ARGS stand in a file that is not given"
        name, line = ("--num-layers", None) if checkpoint is None else (checkpoint.name, checkpoint.line)
        problems.add("unknown", text, name, line, "give that file (models/*.sh) too, or --model")
    else:
        assumed.append(f"the model is {model.name} of the catalogue")
    return model


def _name_lengths(given: Mapping[str, GivenFlag], problems: Problems) -> None:
    """Add problems for sequences of variable length: flags do not give the length and number of a
    microbatch's sequences."""
    dynamic = given.get(DYNAMIC)
    if dynamic is not None:
        most = given.get("--max-tokens-per-gpu")
        text = f"microbatches have as many samples as {most.text if most else 'a number of'} tokens hold"
        remedy = "give --define use_dynamic_batch_size= for microbatches of --micro-batch-size samples"
        problems.add("unknown", text, DYNAMIC, dynamic.line, remedy)
    if "--seq-length" not in given:
        longest = given.get("--rollout-max-response-len")
        text = "samples have any length" + (f", answers of at most {longest.text} tokens" if longest else "")
        line = longest.line if longest else None
        problems.add("unknown", text, "--seq-length", line, "give --define seq_length=N")
