"""Known names that are similar to an unknown one."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def near_names(name: str, known: Iterable[str], count: int = 1, cutoff: float = 0.6) -> list[str]:
    """Names of `known` that are most similar to `name`, ignoring case, dashes and underscores."""
    spelled: dict[str, str] = {}
    for one in known:
        spelled.setdefault(_plain(one), one)
    wanted = _plain(name)
    if wanted in spelled:
        return [spelled[wanted]]
    return [spelled[one] for one in get_close_matches(wanted, spelled, n=count, cutoff=cutoff)]


def nearest(name: str, known: Iterable[str]) -> str:
    """The text `did you mean X?` with the nearest of `known`; empty where none is near."""
    near = near_names(name, known, cutoff=0.7)
    return f"did you mean {near[0]}?" if near else ""


def or_nearest(name: str, known: Iterable[str]) -> str:
    """A hint at the nearest known name, to be appended to a message that lists the known names."""
    hint = nearest(name, known)
    return f"; {hint}" if hint else ""


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")
