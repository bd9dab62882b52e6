"""YAML that all parsers read in the same way: versions 1.1 and 1.2, and Kubernetes' parsers."""

from __future__ import annotations

import re
from typing import Any

import yaml

_AMBIGUOUS = re.compile(
    r"[-+.]?[0-9].*|[-+]?\.(inf|nan)|y|n|yes|no|on|off|true|false|null|~|=|<<", re.IGNORECASE
)
"""Unquoted texts that some parser reads as a number, a date, a truth value or null."""


class Dumper(yaml.SafeDumper):
    """A YAML writer without references. It quotes texts that parsers read differently."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    style = "|" if "\n" in text else '"' if _AMBIGUOUS.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


def _number(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    return dumper.represent_scalar("tag:yaml.org,2002:float", text)


Dumper.add_representer(str, _text)
Dumper.add_representer(float, _number)
