"""`planner schema`: JSON schemas of the records of an answer."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def schema(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Plan, Layout, Estimate or SearchResult.")
    ] = "Plan",
) -> None:
    """Print the JSON schema of a record: each field with its description, and numbers with their unit."""
    from planner.schema import schema as of_record  # It reads the source of the records.

    print(json.dumps(of_record(name), indent=2))
