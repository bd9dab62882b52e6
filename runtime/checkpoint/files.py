"""Writing of files that must be on the disk before other files name them."""

from __future__ import annotations

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    number = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError:
        # Some network file systems cannot, and need not.
        pass
    finally:
        os.close(number)
