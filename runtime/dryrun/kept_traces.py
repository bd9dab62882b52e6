"""A cache of earlier dry runs, with a file for each rank.

A file belongs to one rank of one job and one state of the code. Its name is a digest of everything on which a
dry run depends, without comments in the code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any

from costmodels import Layout, ModelSpec
from costmodels.cache_files import read_cached, write_cached
from costmodels.paths import home_of
from costmodels.pytorch import full_version
from runtime.dryrun.memory_trace import MemoryTrace, Moment
from runtime.settings.training_options import TrainingOptions

LARGEST = 1 << 20
"""Most bytes of a file."""

MOST = 2000
"""Most cached files; beyond this number the older half is deleted."""

TRACED = (
    *("costmodels/spec", "costmodels/layers"),
    *(f"runtime/{name}" for name in ("model", "parallel", "optimizers", "settings", "train", "dryrun")),
)
"""Folders whose code affects the result of a dry run."""

IDLE_OPTIONS = frozenset(
    (
        *("train_iters", "rampup_batch_size", "seed", "init_method_std"),
        *("lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_wsd_decay_style", "lr_wsd_decay_iters"),
        *("lr_warmup_iters", "lr_warmup_fraction", "lr_warmup_init", "adam_beta1", "adam_beta2", "adam_eps"),
        *("compile", "no_compile"),
    )
)
"""Flags without effect on the cached result, or with an effect that is part of the name in another way
(`compiled`)."""


def kept_trace(name: str) -> MemoryTrace | None:
    """The kept dry run of this name; None if there is none."""
    return read_cached(folder() / f"{name}.json", LARGEST, lambda data: _parsed(json.loads(data)))


def keep_trace(name: str, trace: MemoryTrace) -> None:
    """Keep a dry run under a name."""
    write_cached(folder() / f"{name}.json", json.dumps(asdict(trace)).encode())
    _prune(folder(), MOST)


def folder() -> Path:
    """Folder in which dry runs are kept."""
    return home_of("XDG_CACHE_HOME", ".cache") / "planner" / "dry-runs"


def trace_name(
    spec: ModelSpec, layout: Layout, rank: int, compiled: bool, device: str, options: TrainingOptions
) -> str:
    """The name of the dry run of a rank."""
    own = {key: value for key, value in asdict(options).items() if key not in IDLE_OPTIONS}
    question = {
        "model": spec.model_dump(mode="json", exclude={"name", "source"}),
        "layout": layout.model_dump(mode="json"),
        "rank": rank,
        "compiled": compiled,
        "device": device,
        "options": own,
        "versions": {"python": sys.version, "torch": full_version(), "torchao": _version("torchao")},
        "code": code_digest(),
    }
    return hashlib.sha256(json.dumps(question, sort_keys=True).encode()).hexdigest()[:32]


@cache
def code_digest() -> str:
    """A digest of the code that a dry run runs, independent of comments and spacing."""
    found = hashlib.sha256()
    for path in _files():
        # Python's cached code object is read much faster than the source is parsed.
        code = SourceFileLoader(path.stem, str(path)).get_code(path.stem)
        assert code is not None
        found.update(path.name.encode() + b"\0")
        _add(code, found.update)
    return found.hexdigest()


def _add(code: CodeType, update: Callable[[bytes], None]) -> None:
    """Pass the instructions of compiled code to `update`, without line numbers."""
    update(code.co_code)
    update(repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)).encode())
    for value in code.co_consts:
        if isinstance(value, CodeType):
            _add(value, update)
        elif "__firstlineno__" in code.co_names and value == code.co_firstlineno:
            continue  # Classes know it from Python 3.13 on.
        else:
            update(repr(sorted(map(repr, value)) if isinstance(value, frozenset) else value).encode())


def _files() -> Iterator[Path]:
    for name in TRACED:
        package, _, inside = name.partition("/")
        # Found, not imported: that would load PyTorch.
        found = find_spec(package)
        for root in () if found is None else found.submodule_search_locations or ():
            yield from sorted((Path(root) / inside).rglob("*.py"))


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _parsed(data: dict[str, Any]) -> MemoryTrace:
    if data.keys() != {field.name for field in fields(MemoryTrace)}:
        raise ValueError("it is no dry run")
    moments = {label: Moment(**moment) for label, moment in data["moments"].items()}
    return MemoryTrace(**{**data, "peak": Moment(**data["peak"]), "moments": moments})


def _prune(where: Path, most: int) -> None:
    with contextlib.suppress(OSError):
        files = list(where.iterdir())
        if len(files) > most:
            for path in sorted(files, key=lambda path: path.stat().st_mtime)[: len(files) - most // 2]:
                path.unlink(missing_ok=True)
