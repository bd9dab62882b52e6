"""A table of settings of another software's configuration that this package ignores or treats differently."""

from __future__ import annotations

import sys

from cli.tables import console, table
from runtime.launch.configurations import ConfiguredJob


def print_differences(configured: ConfiguredJob) -> None:
    """Print the differences between the trained job and the job in the files, and the assumptions about the
    files."""
    reading, plan = configured.reading, configured.plan
    if configured.differences:
        print(f"{reading.file} ({reading.framework}): settings that differ here")
        rows = [[one.what, str(one.line or ""), one.here] for one in configured.differences]
        console().print(table(["in the files", "line", "here"], rows, left=("in the files", "here")))
    for text in configured.assumed:
        print(f"planner: assumed: {text}", file=sys.stderr)
    print(f"layout: {plan.layout.describe()}")
