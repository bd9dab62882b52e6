"""Writing files so that a reader sees the old one or the new one, never a part."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from costmodels.errors import InputError


def write_whole(what: str, path: str | Path, text: str) -> None:
    """Write `text` to a file, which stays as it is when that fails; links and devices are written through.

    Raises `InputError`, which names `what` and the file, when it cannot be written.
    """
    target = Path(path)
    through = target.is_symlink() or (target.exists() and not target.is_file())
    written = target if through else target.with_name(f".{target.name}.{os.getpid()}")
    try:
        written.write_text(text, encoding="utf-8")
        if written is not target:
            written.replace(target)
    except OSError as error:
        if written is not target:
            with contextlib.suppress(OSError):
                written.unlink(missing_ok=True)
        raise InputError(f"{what} {target}: cannot be written: {error.strerror or error}") from None
