"""Where tapes are: a file for each minor version of PyTorch in the package, and one of those recorded here.

A file is a zip archive with a member for each structure, in JSON (`costmodels.tapes.text`). Files of the
package are of the runtime that it comes with; those recorded here are of one version of the code, so that
nobody plays what a runtime did before it was changed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from costmodels.cache_files import discard_cached, read_cached
from costmodels.paths import home_of, is_visible
from costmodels.pytorch import installed_version as installed_version
from costmodels.tapes.loops import unrolled
from costmodels.tapes.structure import Structure
from costmodels.tapes.tape import Tape
from costmodels.tapes.text import as_json, parsed_tape

PACKAGED = Path(__file__).parent / "data"

LARGEST = 1 << 30
"""Bytes of a file of tapes."""

EPOCH = (1980, 1, 1, 0, 0, 0)
"""The time of all members: equal tapes make equal files."""


@cache
def packaged_versions() -> tuple[str, ...]:
    """Minor versions of PyTorch whose tapes are in the package, oldest first."""
    stems = (path.stem.removeprefix("torch-") for path in PACKAGED.glob("torch-*.zip"))
    return tuple(sorted(stems, key=lambda stem: tuple(map(int, stem.split(".")))))


MOSTLY = {"2.13": "2.14", "2.15": "2.14"}
"""Versions whose tapes are those of another, but for those that they have themselves: recorded under both,
and compared."""


def default_version() -> str:
    """The version of the installed PyTorch; without one, the newest whose tapes are in the package."""
    return installed_version() or packaged_versions()[-1]


def path_of(version: str) -> Path:
    """The file of a version in the package."""
    return PACKAGED / f"torch-{version}.zip"


RECORDED = ("model", "parallel", "train", "dryrun")
"""Packages of the runtime whose code decides what is recorded."""

DIGITS = 12
"""Of the digest of that code."""


def cache_folder() -> Path:
    """The folder of the tapes that were recorded on this machine."""
    return home_of("XDG_CACHE_HOME", ".cache") / "planner" / "tapes"


def cache_path(version: str) -> Path:
    """The file of the tapes that were recorded on this machine of the runtime as it is."""
    return cache_folder() / f"torch-{version}-{code_digest()}.zip"


@cache
def code_digest() -> str:
    """A digest of the code that is recorded and that records."""
    # Found, not imported: that would load PyTorch.
    runtime = find_spec("runtime")
    roots = () if runtime is None else runtime.submodule_search_locations or ()
    folders = [Path(__file__).parent, *(Path(root) / name for root in roots for name in RECORDED)]
    found = hashlib.sha256()
    for folder in folders:
        for path in sorted(folder.glob("*.py")):
            found.update(path.name.encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:DIGITS]


_recorded: dict[tuple[str, str], Tape] = {}
"""Tapes of this process alone, by version and by the name of their structure."""


def remember_tapes(tapes: Mapping[Structure, Tape], version: str) -> None:
    """Know tapes for as long as this process lasts, without writing them to a file."""
    _recorded.update({(version, structure.name): tape for structure, tape in tapes.items()})
    tape_of.cache_clear()
    tape_of_steps.cache_clear()


@cache
def tape_of(structure: Structure, version: str) -> Tape | None:
    """The tape of a structure under a version of PyTorch; None where nobody has recorded it."""
    if (version, structure.name) in _recorded:
        return _recorded[version, structure.name]
    for path in _paths(version):
        name, archive = _members(path).get(structure.name), _archive(path)
        if name is not None and archive is not None:
            tape = _tape_in(archive, name, path)
            if tape is not None:
                return tape
    return None


def _tape_in(archive: zipfile.ZipFile, name: str, path: Path) -> Tape | None:
    """The tape of a member; None of one recorded here that is damaged, whose file is removed."""
    if path.parent == PACKAGED:
        return parsed_tape(json.loads(archive.read(name)))
    try:
        return parsed_tape(json.loads(archive.read(name)))
    except Exception as error:
        discard_cached(path, error)
        _members.cache_clear()
        _archive.cache_clear()
        return None


@cache
def tape_of_steps(structure: Structure, version: str, steps: int) -> Tape:
    """The tape of a structure that has one, with so many steps."""
    tape = tape_of(structure, version)
    assert tape is not None
    return unrolled(tape, steps)


def _paths(version: str) -> Iterator[Path]:
    """The files that may have tapes of a version, those that count first."""
    yield path_of(version)
    # Most have recorded nothing, and need no digest. A folder that nobody may look into holds nothing either.
    if is_visible(cache_folder()):
        yield cache_path(version)
    if version in MOSTLY:
        yield path_of(MOSTLY[version])


def known_structures(version: str) -> set[str]:
    """The names of structures whose tapes a version has, in the package or recorded on this machine."""
    return {name for path in _paths(version) for name in _members(path)}


@cache
def _archive(path: Path) -> zipfile.ZipFile | None:
    """A file in memory, so that its list of members is read once; None for one that cannot be read."""
    return read_cached(path, LARGEST, lambda data: zipfile.ZipFile(io.BytesIO(data)))


@cache
def _members(path: Path) -> dict[str, str]:
    """Members of a file by the structures they are named after; none of a file that cannot be read."""
    archive = _archive(path)
    return {} if archive is None else {name.removesuffix(".json"): name for name in archive.namelist()}


def structure_names(path: Path) -> list[str]:
    """The structures whose tapes a file has."""
    return list(_members(path))


def write_tapes(tapes: Mapping[Structure, Tape], path: Path) -> None:
    """Put tapes into a file, instead of those that it has of the same structures."""
    kept = read_cached(path, LARGEST, _contents) or {}
    for structure, tape in tapes.items():
        kept[f"{structure.name}.json"] = json.dumps(as_json(tape), separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Others may write the same file: whoever is last has it.
    partial = path.with_suffix(f".{os.getpid()}")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name in sorted(kept):
            archive.writestr(zipfile.ZipInfo(name, EPOCH), kept[name], zipfile.ZIP_DEFLATED, 9)
    partial.replace(path)
    clear_caches()


def _contents(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def clear_caches() -> None:
    """Read files anew."""
    tape_of.cache_clear()
    tape_of_steps.cache_clear()
    _members.cache_clear()
    _archive.cache_clear()
    packaged_versions.cache_clear()


def has_tapes(structures: Iterable[Structure], version: str) -> bool:
    """Whether every structure has a tape."""
    return all(
        any(structure.name in _members(path) for path in _paths(version))
        or (version, structure.name) in _recorded
        for structure in structures
    )
