"""Flags of torchtitan 0.3 and later as keys of its files, such as `--parallelism.tensor_parallel_degree 2`.

torchtitan/config/manager.py: tyro takes `--section.key VALUE`, `--section.no-key` for what is off, and
`activation-checkpoint:full`; `--module` and `--config` name the model.
"""

from __future__ import annotations

import re

from planner.formats.facts.entries import Entries, Entry
from planner.formats.torchtitan.names import KEYS, MODELS

CONFIG = "config"
"""The key that names a function of a `config_registry.py`, which says all that no flag does."""

_FLAG = re.compile(r"--([a-z_]+)\.((?:no-)?[a-z_]+(?:\.[a-z_]+)*)(?:[ =]+(?!--)([^\s\\]+))?")
_MODEL = re.compile(r"--(module|config)[ =]+([A-Za-z0-9_.]+)")
_CHECKPOINTING = re.compile(r"\bactivation[-_]checkpoint:(none|full|selective|memory-budget)\b")

_SECTIONS = ("parallelism", "training")
"""Sections whose flags make a command one of torchtitan."""


def flag_entries(text: str) -> Entries:
    """The keys that flags in a script or a list of arguments give; none where they are not torchtitan's."""
    found: Entries = {}
    names: dict[str, Entry] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#"):
            continue
        for section, key, value in _FLAG.findall(line):
            off = key.startswith("no-")
            path = f"{section}.{key.removeprefix('no-')}"
            found[path] = Entry(path, "false" if off else value or "true", number)
        for name, value in _MODEL.findall(line):
            names[name] = Entry(name, value, number)
        for mode in _CHECKPOINTING.findall(line):
            path = KEYS["recompute"]
            found[path] = Entry(path, mode.replace("-", "_"), number)
    sections = all(any(path.startswith(f"{section}.") for path in found) for section in _SECTIONS)
    if not sections and not ({"module", CONFIG} <= names.keys() and "torchtitan" in text):
        return {}
    return {**_model(names), **found}


def _model(names: dict[str, Entry]) -> Entries:
    """`--module` and `--config` as the family and flavor of files."""
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
