"""Commands of NeMo and Megatron-Bridge whose arguments are keys: `model.tensor_model_parallel_size=4`.

Hydra's grammar (hydra.cc, override_grammar/basic): `key=value` sets, `+key=value` and `++key=value` add.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from planner.formats.facts.entries import Entries, Entry
from planner.formats.facts.launcher import commands
from planner.formats.nemo.reader import recognises
from planner.formats.on_megatron.verl import is_verl, is_verl_sft

_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_]\w*(?:\.\w+)+)=(.*)", re.DOTALL)

FEWEST = 3
"""Least number of keys of a training command."""


def override_entries(text: str, define: Mapping[str, str], beside: Mapping[str, str]) -> Entries:
    """The keys that a script passes to a training program; empty where no command passes NeMo's keys."""
    best: Entries = {}
    for launch in commands(text, dict(define), beside):
        found: Entries = {}
        for word in launch.arguments:
            match = _OVERRIDE.fullmatch(word.text)
            if match is not None:
                path, value = match.groups()
                items = None
                if value.startswith("[") and value.endswith("]"):
                    items = tuple(part.strip(" '\"") for part in value[1:-1].split(",") if part.strip())
                found[path] = Entry(path, value.strip("'\""), word.line, items)
        if (
            len(found) >= FEWEST
            and len(found) > len(best)
            and any(one(found) for one in (recognises, is_verl, is_verl_sft))
        ):
            best = found
    return best
