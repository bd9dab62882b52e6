"""Values of the package's own YAML files, kept as Python keeps the code of modules: parsed once.

They lie in the folder of compiled modules, and count while the file has the size and the time of then.
Where Python writes no compiled modules, nothing is written.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import sys
from collections.abc import Callable
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any


def parsed_file(file: Path, parse: Callable[[str, str], dict[str, Any]]) -> dict[str, Any]:
    """What `parse` makes of a file's text and name, or made of it before."""
    status = file.stat()
    key = status.st_size, status.st_mtime_ns
    kept = Path(cache_from_source(str(file))).with_suffix(file.suffix)
    # No such file, or one that was not written to its end.
    with contextlib.suppress(OSError, ValueError, EOFError, TypeError):
        known, content = marshal.loads(kept.read_bytes())
        if known == key and isinstance(content, dict):
            return content
    content = parse(file.read_text(encoding="utf-8"), file.name)
    if not sys.dont_write_bytecode:
        # What is not a plain value, such as a date, is parsed each time.
        with contextlib.suppress(OSError, ValueError):
            written = kept.with_name(f".{kept.name}.{os.getpid()}")
            values = marshal.dumps((key, content))
            kept.parent.mkdir(parents=True, exist_ok=True)
            written.write_bytes(values)
            written.replace(kept)
    return content
