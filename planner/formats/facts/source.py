"""The text of a file, and the rest of the job: facts from the caller and from other files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from costmodels.dataclass import dataclass
from costmodels.spec.model import ModelSpec
from planner.formats.facts.entries import Entries


@dataclass(frozen=True)
class Source:
    """One file to read."""

    file: str
    text: str
    entries: Entries = field(default_factory=dict)
    """The file's keys, if it is a file of keys."""
    page: bool = False
    """True if the file is a web page with a configuration."""
    world_size: int | None = None
    """Devices on which a script starts its job, if the script's flags are read as keys."""
    local_world_size: int | None = None
    """Devices of a node."""
    others: tuple[tuple[str, str], ...] = ()
    """Names and texts of further program files of the same job."""


@dataclass(frozen=True)
class Surroundings:
    """The rest of the job beside one file."""

    world_size: int | None = None
    local_world_size: int | None = None
    described: str | None = None
    """The file that describes the model."""
    model: ModelSpec | None = None
    """The model named by the user."""
    define: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, str] = field(default_factory=dict)
    """Texts of the files that a script sources, by name."""
    files: tuple[str, ...] = ()
    """The names of all files of the job."""
