"""The keys of each software, one table a file: what each does, which field it gives, and its earlier names.

A table has a section for each role. A row of a section is `FIELD: KEY EARLIER-NAME ...`, where the field is
one of `Layout`, of `ModelSpec`, a flag of Megatron-LM that says the same, or a word of the reader.
`others` lists keys that give no field by themselves, in which `*` stands for anything.
A `!` before a key means the opposite of a flag, which is given where the key is false.
The section `defaults` has what a software takes where nothing says it, by flag or field.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

from costmodels.catalogue.yaml_files import parse
from planner.formats.facts.flag_catalogue import Role

FOLDER = Path(__file__).parent.parent / "keys"

OTHERS = "others"

DEFAULTS = "defaults"


class KeyTable(NamedTuple):
    """The keys of a software."""

    roles: Mapping[str, Role]
    """The role of each key, by its present name and by its earlier names."""
    fields: Mapping[str, str]
    """Keys by the field of `Layout` or `ModelSpec` that a key gives."""
    flags: Mapping[str, str]
    """Keys by the flag of Megatron-LM that says the same."""
    earlier: Mapping[str, str]
    """Keys by the names that they had before, or that software of the same family has for them."""
    opposite: frozenset[str]
    """Keys, and earlier names, whose flags are given where they are false."""
    defaults: Mapping[str, str]
    """Values of flags and fields where nothing says them."""

    @property
    def flag_of(self) -> Mapping[str, str]:
        """The flag of each key, by all names of it."""
        found = {key: flag for flag, key in self.flags.items()}
        return found | {name: found[key] for name, key in self.earlier.items() if key in found}


@cache
def key_table(software: str) -> KeyTable:
    """The table of a software. Shared by all callers: not to be changed."""
    path = FOLDER / f"{software}.yaml"
    roles: dict[str, Role] = {}
    fields: dict[str, str] = {}
    earlier: dict[str, str] = {}
    opposite: set[str] = set()
    content = parse(path.read_text(encoding="utf-8"), path.name)
    defaults = {name: str(value) for name, value in content.pop(DEFAULTS, {}).items()}
    for role, section in content.items():
        rows = {OTHERS: section} if isinstance(section, str) else section
        for field, text in rows.items():
            words = str(text).split()
            keys = [word.removeprefix("!") for word in words]
            opposite |= {word[1:] for word in words if word.startswith("!")}
            roles |= dict.fromkeys(keys, cast(Role, role))
            if field != OTHERS:
                fields[field], *names = keys
                earlier |= dict.fromkeys(names, keys[0])
    flags = {flag: key for flag, key in fields.items() if flag.startswith("--")}
    fields = {field: key for field, key in fields.items() if field not in flags}
    return KeyTable(roles, fields, flags, earlier, frozenset(opposite), defaults)
