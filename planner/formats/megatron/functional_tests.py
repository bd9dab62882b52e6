"""Cases of Megatron-LM's functional tests: `MODEL_ARGS` and `ENV_VARS` in YAML.

tests/functional_tests/shell_test_utils/_run_training.sh makes a command of them: a key with `true` is a
switch, and `MODEL_ARGS_N` replaces `MODEL_ARGS` in run N.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from costmodels.errors import InputError
from planner.formats.facts.entries import Entries, Entry
from planner.formats.facts.flag_catalogue import GivenFlag, given_flags
from planner.formats.facts.inherited import with_variables
from planner.formats.facts.launcher import Launch, world_size
from planner.formats.facts.reading import Problems, Reading
from planner.formats.facts.source import Source, Surroundings
from planner.formats.megatron.names import DEGREE_FLAGS
from planner.formats.megatron.reader import read_command
from planner.formats.shell.text import Word

ARGUMENTS = "MODEL_ARGS"
RUN, NODES, DEVICES = "RUN_NUMBER", "NUM_NODES", "GPUS_PER_NODE"
"""Environment variables of the tests' script."""

LOCAL = "8"
"""The default of `GPUS_PER_NODE`."""


def recognises(entries: Entries) -> bool:
    """Return whether keys are those of a functional test whose arguments are flags of Megatron-LM."""
    return any(path.startswith(f"{ARGUMENTS}.--") for path in entries)


def of_other_software(entries: Entries) -> Entries:
    """The keys of a NeMo test, taken from its arguments; keys of any other file are unchanged."""
    start = f"{ARGUMENTS}."
    inner = {path.removeprefix(start): entry for path, entry in entries.items() if path.startswith(start)}
    if not inner or any(path.startswith("--") for path in inner):
        return entries
    return {path: dataclasses.replace(entry, path=path) for path, entry in inner.items()}


def read_functional_test(source: Source, around: Surroundings) -> Reading:
    """The job of one run of a functional test; raises `InputError` for one that does not train."""
    entries = source.entries
    mode = entries.get("MODE", Entry("", "pretraining", 0)).text
    if mode not in ("pretraining", "rl"):
        raise InputError(f"file {source.file} is a test of {mode}, which does not train")
    run = around.define.get(RUN, "1")
    section = (
        f"{ARGUMENTS}_{run}" if any(path.startswith(f"{ARGUMENTS}_{run}.") for path in entries) else ARGUMENTS
    )
    words = [
        word
        for path, entry in entries.items()
        if path.startswith(f"{section}.")
        for word in _words(path.removeprefix(f"{section}."), entry, around.define)
    ]
    flags, loose = given_flags(words)
    connections = entries.get("ENV_VARS.CUDA_DEVICE_MAX_CONNECTIONS")
    nodes, local, assumed = _devices(entries, section, around.define)
    launch = Launch(
        "functional test",
        (),
        nodes,
        local,
        None,
        None if connections is None else Word(connections.text, connections.line),
    )
    if not _fills(flags, world_size(launch) or 0):
        launch, assumed = dataclasses.replace(launch, nodes=None, per_node=None), ()
    reading = read_command(
        flags,
        loose,
        launch,
        source.file,
        world_size=around.world_size,
        local_world_size=around.local_world_size,
        described=around.described,
        defined=around.define,
    )
    problems = Problems(source.file)
    if mode == "rl":
        line = entries["MODE"].line
        text = "rollouts share the devices with training, and are not priced: memory and time are not known"
        problems.add("unknown", text, "MODE", line, "give the training alone as a script of Megatron-LM")
    return dataclasses.replace(
        reading,
        assumed=(*(assumed if around.world_size is None else ()), *reading.assumed),
        problems=(*problems.found, *reading.problems),
    )


_VARIABLE = re.compile(r"\$\{?(\w+)")


def _words(name: str, entry: Entry, define: Mapping[str, str]) -> Iterator[Word]:
    """The words of a command that the tests' script makes of a key."""
    texts = [entry.text] if entry.items is None else list(entry.items)
    if entry.null or texts == [""]:
        return
    yield Word(name, entry.line)
    if texts == ["true"]:
        return
    if len(texts) == 1 and re.fullmatch(r"\[[^\]]+\]", texts[0].strip()):
        texts = texts[0].strip()[1:-1].replace(",", " ").split()
    for text in texts:
        whole = with_variables(text, define)
        yield Word(whole, entry.line, tuple(_VARIABLE.findall(whole)))


def _devices(entries: Entries, section: str, define: Mapping[str, str]) -> tuple[Word, Word, tuple[str, ...]]:
    """Numbers of nodes and of devices per node, and a note on values that are the script's defaults."""
    said = entries.get(f"MODEL_ENV_VARS.{section}.{DEVICES}")
    local = Word(define[DEVICES], 0) if DEVICES in define else None
    if local is None and said is not None:
        local = Word(said.text, said.line)
    nodes = Word(define.get(NODES, "1"), 0)
    if local is not None:
        return nodes, local, ()
    return nodes, Word(LOCAL, 0), (f"{LOCAL} devices of a node, as the tests' script has it ({DEVICES})",)


def _fills(flags: Sequence[GivenFlag], world: int) -> bool:
    """Return whether the job can run on a number of devices; the number of nodes is in other files."""
    given = {flag.name: flag.text for flag in flags}

    def product(*names: str) -> int:
        texts = [given.get(DEGREE_FLAGS[name], "1") for name in names]
        return prod(int(text) if text.isdigit() else world + 1 for text in texts)

    dense = product("tensor_parallel", "pipeline_parallel", "context_parallel")
    experts = product("expert_parallel", "expert_tensor_parallel", "pipeline_parallel")
    return world % dense == 0 and world % experts == 0
