"""The text that is read and the rest of the job: the facts that the caller and other files give."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from costmodels.dataclass import dataclass
from costmodels.spec.model import ModelSpec
from planner.formats.facts.entries import Entries


@dataclass(frozen=True)
class Source:
    """One file."""

    file: str
    text: str
    entries: Entries = field(default_factory=dict)
    """The file's keys, where it is made of keys."""
    page: bool = False
    """The file is a page on which a configuration stands."""
    world_size: int | None = None
    """Devices on which a script starts its job, where the script's flags stand for keys."""
    local_world_size: int | None = None
    """Devices of a node."""
    others: tuple[tuple[str, str], ...] = ()
    """Names and texts of further files, of programs that are given together."""


@dataclass(frozen=True)
class Surroundings:
    """The rest of the job."""

    world_size: int | None = None
    local_world_size: int | None = None
    described: str | None = None
    """The file that describes the model."""
    model: ModelSpec | None = None
    """The model that the user names."""
    define: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)
    """Texts of the files that a script reads commands from, by their names."""
    files: tuple[str, ...] = ()
    """The files that are read."""
