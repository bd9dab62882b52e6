"""The version of PyTorch that is installed, read without importing it."""

from __future__ import annotations

import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

Version = tuple[int, int]
"""A minor version as numbers."""


@cache
def full_version() -> str:
    """The version of the PyTorch that is installed, such as "2.14.1+cpu"; "" without one."""
    # Found, not imported: reading this one line takes a tenth of the time of `importlib.metadata`.
    torch = find_spec("torch")
    if torch is None or torch.origin is None:
        return ""
    try:
        text = Path(torch.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return ""
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", text, re.MULTILINE)
    return found[1] if found else ""


def installed_version() -> str:
    """The minor version of the PyTorch that is installed, such as "2.14"; "" without one."""
    found = re.match(r"\d+\.\d+", full_version())
    return found[0] if found else ""


def is_at_least(version: str) -> bool:
    """Return whether the installed PyTorch is of this minor version or a later one."""
    found = installed_version()
    return bool(found) and parsed_version(found) >= parsed_version(version)


def parsed_version(text: str) -> Version:
    """A minor version, such as "2.14", as numbers."""
    major, minor = map(int, text.split("."))
    return major, minor
