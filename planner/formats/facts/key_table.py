"""The keys of each software, one file for each: their roles, their fields, and their earlier names.

A table has a section for each role. A row of a section is `FIELD: KEY EARLIER-NAME ...`. The field is one of
`Layout` or of `ModelSpec`, an equivalent flag of Megatron-LM, or a word of the reader. `others` lists keys
without a field; `*` in them matches anything. A `!` before a key means that the flag is given where the key
is false. The section `defaults` has the software's default values by flag or field.
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
    """Keys by their field of `Layout` or `ModelSpec`."""
    flags: Mapping[str, str]
    """Keys by the equivalent flag of Megatron-LM."""
    earlier: Mapping[str, str]
    """Keys by their earlier names, or their names in software of the same family."""
    opposite: frozenset[str]
    """Keys, and earlier names, whose flags are given where the key is false."""
    defaults: Mapping[str, str]
    """Default values of flags and fields."""

    @property
    def flag_of(self) -> Mapping[str, str]:
        """The flag of each key, by all names of the key."""
        found = {key: flag for flag, key in self.flags.items()}
        return found | {name: found[key] for name, key in self.earlier.items() if key in found}


@cache
def key_table(software: str) -> KeyTable:
    """The table of a software. All callers share it, so it must not be changed."""
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
