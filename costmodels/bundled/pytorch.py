"""The PyTorch that the runtime runs on: FSDP2 keeps other copies of gradients in some versions."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def is_before(major: int, minor: int) -> bool:
    """Whether the PyTorch installed here is older than a version; without one, none of the old ways count."""
    try:
        found = metadata.version("torch").split(".")
    except metadata.PackageNotFoundError:
        return False
    return (int(found[0]), int(found[1])) < (major, minor)
