"""Messages about a plan that was written for other software."""

from __future__ import annotations

import sys

from planner.formats.nearest import differences
from planner.formats.writing.export import Export
from planner.plan import Plan


def print_notes(plan: Plan, export: Export) -> None:
    """Print to standard error the parts of a plan that an export lacks, their cost, and the needs of its
    software."""
    for part in export.inexpressible:
        print(f"planner: not expressible in {export.target}: {part}", file=sys.stderr)
    if export.inexpressible:
        print(f"planner: {differences(plan, export)}", file=sys.stderr)
    for part in export.in_script:
        print(f"planner: left to the training script: {part}", file=sys.stderr)
    if export.environment:
        variables = " ".join(f"{name}={value}" for name, value in export.environment.items())
        print(f"planner: note: the job needs {variables} in its environment", file=sys.stderr)
    for note in export.notes:
        print(f"planner: note: {note}", file=sys.stderr)
