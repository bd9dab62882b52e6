"""A corpus that every Python installation has: the source of its standard library.

A first job can train on real text without a download. Documents are ordered by a hash of the file name, so
training and validation splits have similar text.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import platform
import shutil
import sysconfig
import tempfile
from pathlib import Path

from costmodels.cache_files import discard_cached
from costmodels.errors import InputError
from costmodels.paths import home_of
from runtime.data.indexed_dataset import IndexedDataset
from runtime.data.preparation import prepare
from runtime.data.tokenizers import Tokenizer

# Some installations leave tests out or add packages to the same folder: without either, corpora are alike.
_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_MOST_BYTES = 16 * 2**20
_NAME = "stdlib"


def stdlib_corpus(
    tokenizer: Tokenizer, cache_dir: str | Path | None = None, stdlib: str | Path | None = None
) -> Path:
    """The prefix of token files with the standard library's sources, prepared at the first call.

    Each file is one document; the text has at most 16 MiB. The files are kept in `cache_dir`
    (`$XDG_CACHE_HOME/llm-parallelism-planner` by default), which several processes may fill at once. If it
    cannot be written, a temporary folder is used until the process ends. `stdlib` is the folder to read
    instead.

    Raises InputError if this Python has no sources.
    """
    folder = Path(stdlib or sysconfig.get_path("stdlib"))
    sources = _sources(folder)
    if not sources:
        raise InputError(
            f"--data-path: none given, and this Python carries no .py files in {folder} to train on instead: "
            "give --data-path PREFIX of files that `planner data prepare` wrote"
        )
    digest = hashlib.sha256(repr([(name, size) for name, _, size in sources]).encode()).hexdigest()[:12]
    name = f"python-{platform.python_version()}-{tokenizer.name}-{digest}"
    files = [path for _, path, _ in sources]
    cache = Path(cache_dir) if cache_dir else _default_cache()
    try:
        return _cached(files, tokenizer, cache, name)
    except OSError:
        temporary = Path(tempfile.mkdtemp(prefix="llm-parallelism-planner-"))
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return _cached(files, tokenizer, temporary, name)


def stdlib_files(stdlib: str | Path | None = None) -> list[Path]:
    """The files of the default corpus, in its order."""
    return [path for _, path, _ in _sources(Path(stdlib or sysconfig.get_path("stdlib"))) if _is_utf8(path)]


def _default_cache() -> Path:
    return home_of("XDG_CACHE_HOME", ".cache") / "llm-parallelism-planner"


def _sources(folder: Path) -> list[tuple[str, Path, int]]:
    """(name relative to the folder, path, bytes) of the sources, shuffled by a hash of the name, up to the
    size limit."""
    found = []
    for parent, below, names in os.walk(folder):
        below[:] = set(below) - _EXCLUDED
        for name in names:
            if name.endswith(".py"):
                path = Path(parent, name)
                found.append((path.relative_to(folder).as_posix(), path, path.stat().st_size))
    found.sort(key=lambda source: hashlib.sha256(source[0].encode()).digest())
    chosen, total = [], 0
    for source in found:
        total += source[2]
        if total > _MOST_BYTES:
            break
        chosen.append(source)
    return chosen


def _is_utf8(path: Path) -> bool:
    try:
        path.read_text("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _cached(files: list[Path], tokenizer: Tokenizer, cache: Path, name: str) -> Path:
    """Prepare the files in a private folder and move it into place, so that a reader sees all of it or
    nothing."""
    target = cache / name
    prefix = target / f"{_NAME}_text_document"
    if _fault(prefix) is None:
        return prefix
    cache.mkdir(parents=True, exist_ok=True)
    own = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=cache))
    try:
        prepare([path for path in files if _is_utf8(path)], own / _NAME, tokenizer, workers=1, form="text")
        try:
            own.rename(target)
        except OSError:
            # Another process was first, or what lies there is damaged.
            wrong = _fault(prefix)
            if wrong is not None:
                discard_cached(target, wrong)
                own.rename(target)
    finally:
        shutil.rmtree(own, ignore_errors=True)
    return prefix


def _fault(prefix: Path) -> InputError | None:
    """The error of token files that cannot be read; None for readable ones."""
    try:
        IndexedDataset(prefix)
    except InputError as error:
        return error
    return None
