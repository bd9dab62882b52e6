"""Writing of files that must be on disk before other files refer to them."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Wait until the entries of a folder are on disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError:
        # Some network file systems cannot, and need not.
        pass
    finally:
        os.close(number)
