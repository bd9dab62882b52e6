"""A cache of the values of the package's own YAML files, so that each is parsed once.

The cache is in the folder of compiled modules, and is valid while the file's size and time are unchanged.
Where Python writes no compiled modules, nothing is written.
"""

from __future__ import annotations

import contextlib
import marshal
import sys
import zlib
from collections.abc import Callable
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from costmodels.cache_files import read_cached, write_cached
from costmodels.files import MIB

LARGEST = 64 * MIB

DIGEST_BYTES = 4


def parsed_file(file: Path, parse: Callable[[str, str], dict[str, Any]]) -> dict[str, Any]:
    """The value that `parse` returns for a file's text and name, kept beside the file for the next call."""
    status = file.stat()
    key = status.st_size, status.st_mtime_ns
    kept = Path(cache_from_source(str(file))).with_suffix(file.suffix)
    found = read_cached(kept, LARGEST, _loaded)
    if found is not None and found[0] == key:
        return found[1]
    content = parse(file.read_text(encoding="utf-8"), file.name)
    if not sys.dont_write_bytecode:
        # A value that is not plain, such as a date, is parsed each time.
        with contextlib.suppress(ValueError):
            values = marshal.dumps((key, content))
            write_cached(kept, _digest(values) + values, quietly=True)
    return content


def _loaded(data: bytes) -> tuple[tuple[int, int], dict[str, Any]]:
    """The key and the content of a cache file; raises `ValueError` for a damaged file.

    The check is needed because `marshal` may crash the process on damaged bytes.
    """
    digest, values = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if digest != _digest(values):
        raise ValueError("its checksum is another one")
    known, content = marshal.loads(values)
    return known, content


def _digest(values: bytes) -> bytes:
    return zlib.crc32(values).to_bytes(DIGEST_BYTES, "little")
