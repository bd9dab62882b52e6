"""The PyTorch that the runtime runs on: FSDP2 keeps other copies of gradients in some versions."""

from __future__ import annotations

import re
from functools import cache
from importlib import metadata


@cache
def is_before(major: int, minor: int) -> bool:
    """Whether the PyTorch installed here is older than a version; without one, none of the old ways count."""
    try:
        # Reading this one line takes a tenth of what `metadata.version` takes.
        text = metadata.distribution("torch").read_text("METADATA") or ""
    except metadata.PackageNotFoundError:
        return False
    found = re.search(r"^Version: (\d+)\.(\d+)", text, re.MULTILINE)
    return found is not None and (int(found[1]), int(found[2])) < (major, minor)
