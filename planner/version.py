"""The version of this package that is installed."""

from __future__ import annotations

from importlib import metadata


def version() -> str | None:
    """The version of the installed package; None for a source tree that is not installed."""
    try:
        return metadata.version("llm-parallelism-planner")
    except metadata.PackageNotFoundError:
        return None
