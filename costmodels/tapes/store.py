"""Where tapes are: a file for each minor version of PyTorch in the package, and one of those recorded here.

A file is a zip archive with a member for each structure, in JSON (`costmodels.tapes.text`).
"""

from __future__ import annotations

import json
import os
import re
import zipfile
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from costmodels.tapes.structure import Structure
from costmodels.tapes.tape import Tape
from costmodels.tapes.text import as_json, parsed_tape

PACKAGED = Path(__file__).parent / "data"

EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time of all members: equal tapes make equal files."""


@cache
def installed_version() -> str:
    """The minor version of the PyTorch that is installed, such as "2.14"; "" without one."""
    try:
        # Reading this one line takes a tenth of what `metadata.version` takes.
        text = metadata.distribution("torch").read_text("METADATA") or ""
    except metadata.PackageNotFoundError:
        return ""
    found = re.search(r"^Version: (\d+\.\d+)", text, re.MULTILINE)
    return found[1] if found else ""


@cache
def packaged_versions() -> tuple[str, ...]:
    """Minor versions of PyTorch whose tapes are in the package, oldest first."""
    stems = (path.stem.removeprefix("torch-") for path in PACKAGED.glob("torch-*.zip"))
    return tuple(sorted(stems, key=lambda stem: tuple(map(int, stem.split(".")))))


EQUAL = {"2.13": "2.14"}
"""Versions whose tapes are those of another: recorded under both, and compared."""


def default_version() -> str:
    """The version whose tapes are those of the installed PyTorch; without one, the newest in the package."""
    own = installed_version()
    if own:
        return EQUAL.get(own, own)
    return packaged_versions()[-1]


def path_of(version: str) -> Path:
    """The file of a version in the package."""
    return PACKAGED / f"torch-{version}.zip"


def cache_path(version: str) -> Path:
    """The file of the tapes that were recorded on this machine."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "planner" / "tapes" / f"torch-{version}.zip"


_recorded: dict[tuple[str, str], Tape] = {}
"""Tapes of this process alone, by version and by the name of their structure."""


def remember_tapes(tapes: Mapping[Structure, Tape], version: str) -> None:
    """Know tapes for as long as this process lasts, without writing them to a file."""
    _recorded.update({(version, structure.name): tape for structure, tape in tapes.items()})
    tape_of.cache_clear()


@cache
def tape_of(structure: Structure, version: str) -> Tape | None:
    """The tape of a structure under a version of PyTorch; None where nobody has recorded it."""
    if (version, structure.name) in _recorded:
        return _recorded[version, structure.name]
    for path in (path_of(version), cache_path(version)):
        text = _members(path).get(structure.name)
        if text is not None:
            with zipfile.ZipFile(path) as archive:
                return parsed_tape(json.loads(archive.read(text)))
    return None


@cache
def _members(path: Path) -> dict[str, str]:
    """Members of a file by the structures they are named after."""
    if not path.exists():
        return {}
    with zipfile.ZipFile(path) as archive:
        return {name.removesuffix(".json"): name for name in archive.namelist()}


def structure_names(path: Path) -> list[str]:
    """The structures whose tapes a file has."""
    return list(_members(path))


def write_tapes(tapes: Mapping[Structure, Tape], path: Path) -> None:
    """Put tapes into a file, instead of those that it has of the same structures."""
    kept: dict[str, bytes] = {}
    if path.exists():
        with zipfile.ZipFile(path) as archive:
            kept = {name: archive.read(name) for name in archive.namelist()}
    for structure, tape in tapes.items():
        kept[f"{structure.name}.json"] = json.dumps(as_json(tape), separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(kept):
            archive.writestr(zipfile.ZipInfo(name, EPOCH), kept[name], zipfile.ZIP_DEFLATED, 9)
    partial.replace(path)
    clear_caches()


def clear_caches() -> None:
    """Read files anew."""
    tape_of.cache_clear()
    _members.cache_clear()
    packaged_versions.cache_clear()


def has_tapes(structures: Iterable[Structure], version: str) -> bool:
    """Whether every structure has a tape."""
    return all(
        structure.name in _members(path_of(version))
        or structure.name in _members(cache_path(version))
        or (version, structure.name) in _recorded
        for structure in structures
    )
