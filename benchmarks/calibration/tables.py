"""Facts about published measurements, and the fits of constants to them: the YAML files of this package."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from costmodels.catalogue.parsed_files import parsed_file
from costmodels.catalogue.yaml_files import parse


@cache
def table(name: str) -> dict[str, Any]:
    """The content of a file of this package. All callers share the returned object and must not change it."""
    return parsed_file(Path(__file__).parent / name, parse)
