"""Flags of torchtitan 0.3 and later as keys of its files, such as `--parallelism.tensor_parallel_degree 2`.

A command starts `torchtitan.train`, or torchtitan's own script (`run_train.sh`), which reads variables.
torchtitan/config/manager.py: tyro accepts `--section.key VALUE`, `--section.no-key` for a disabled switch,
and `activation-checkpoint:full`; `--module` and `--config` name the model.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from planner.formats.facts.entries import Entries, Entry
from planner.formats.facts.launcher import Launch, commands, count_of, flag_values, world_size
from planner.formats.shell.text import Word
from planner.formats.torchtitan.names import KEYS, MODELS

CONFIG = "config"
"""The key that names a function of a `config_registry.py`, which has all values without flags."""

CONFIG_FILE = "job.config_file"
"""The key of releases up to 0.2 that names a file, which has all values without flags."""

STARTER = "run_train.sh"
"""torchtitan's own script: `MODULE=llama3 CONFIG=llama3_8b ./run_train.sh FLAGS`."""

STARTERS_OWN = {"NGPU": "8", "MODULE": "llama3", "CONFIG": "llama3_debugmodel"}
"""Default values of that script's variables."""

_FLAG = re.compile(r"([a-z_]+)\.(no_)?([a-z_]+(?:\.[a-z_]+)*)")
_CHECKPOINTING = re.compile(r"activation[-_]checkpoint:(none|full|selective|memory[-_]budget)")

_SECTIONS = ("parallelism", "training")
"""Sections whose flags identify a torchtitan command."""


class Command(NamedTuple):
    """A command that starts torchtitan."""

    entries: Entries
    """Values of the command's flags and variables, as keys."""
    world_size: int | None
    local_world_size: int | None


def find_command(text: str, define: Mapping[str, str], beside: Mapping[str, str]) -> Command | None:
    """The torchtitan command of a script, or of a list of arguments: the one with the most keys."""
    best: Command | None = None
    for launch in commands(text, dict(define), beside):
        found = _command(launch)
        if found is not None and (best is None or len(found.entries) > len(best.entries)):
            best = found
    return best


def _command(launch: Launch) -> Command | None:
    given: Entries = {}
    names: Entries = {}
    for name, values, line in flag_values(launch.arguments):
        match = _FLAG.fullmatch(name)
        # A switch takes no value, and the word behind it may be that of a subcommand.
        said = [value for value in values if not _CHECKPOINTING.fullmatch(value)]
        text = said[0] if said else "true"
        if match is not None:
            section, off, key = match.groups()
            given[f"{section}.{key}"] = Entry(f"{section}.{key}", "false" if off else text, line)
        elif name in ("module", CONFIG):
            names[name] = Entry(name, text, line)
    for word in launch.arguments:
        mode = _CHECKPOINTING.fullmatch(word.text)
        if mode is not None:
            path = KEYS["recompute"]
            given[path] = Entry(path, mode[1].replace("-", "_"), word.line)
    own = any(word.text.rpartition("/")[2] == STARTER for word in (*launch.launcher, *_program(launch)))
    if own:
        _add_variables(launch, names, given)
    sections = all(any(path.startswith(f"{section}.") for path in given) for section in _SECTIONS)
    ours = own or re.fullmatch(r"torchtitan[./]train(\.py)?", launch.program)
    if not (ours or sections or CONFIG_FILE in given):
        return None
    entries = {**_model(names), **given}
    world, per_node = world_size(launch), count_of(launch.per_node)
    if own:
        per_node = count_of(launch.environment.get("NGPU", Word(STARTERS_OWN["NGPU"], 0)))
        world = per_node
    return Command(entries, world, per_node) if entries else None


def _program(launch: Launch) -> tuple[Word, ...]:
    return Word(launch.program, 0), *launch.arguments[:1]


def _add_variables(launch: Launch, names: Entries, given: Entries) -> None:
    """Add the values of variables of torchtitan's own script, if no flag gives them."""
    variables = launch.environment
    if "CONFIG_FILE" in variables:
        word = variables["CONFIG_FILE"]
        given.setdefault(CONFIG_FILE, Entry(CONFIG_FILE, word.text, word.line))
    elif CONFIG_FILE not in given:
        for name in ("MODULE", "CONFIG"):
            word = variables.get(name, Word(STARTERS_OWN[name], 0))
            names.setdefault(name.lower(), Entry(name.lower(), word.text, word.line))


def _model(names: Entries) -> Entries:
    """The family and the flavor of a model, from `--module` and `--config`."""
    if "config" not in names:
        return {}
    config = names["config"]
    known = {name: (module, flavor) for module, name, flavor in MODELS.values()}
    family, flavor = known.get(config.text, ("", ""))
    if not family:
        family = names["module"].text if "module" in names else config.text.partition("_")[0]
        flavor = "debugmodel" if config.text.endswith("debugmodel") else config.text
    entries = (("model.name", family), ("model.flavor", flavor), (CONFIG, config.text))
    return {path: Entry(path, text, config.line) for path, text in entries}


def without_names(entries: Entries) -> Entries:
    """The keys of a command without those that name its configuration, which decide the model."""
    named = {"model.name", "model.flavor"} if CONFIG in entries else set()
    return {path: entry for path, entry in entries.items() if path not in named | {CONFIG, CONFIG_FILE}}
