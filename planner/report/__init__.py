"""A report page on a plan and on a run of it. `planner.report(plan)` writes the page."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.plan import Plan


def report(plan: Plan | str | Path, out: str | Path = "report.html") -> Path:
    """Write the page about a plan, or about a plan file: ranking, time, memory, pipeline, devices.

    The page is one file that needs no network; its path is returned. Raises `InputError` where plotly is
    missing or the page cannot be written.
    """
    from planner.plan import Plan
    from planner.report.contents import gather
    from planner.report.page import write_page

    write_page(gather(plan if isinstance(plan, Plan) else Plan.load(plan)), out)
    return Path(out)


class _Function(ModuleType):
    """The package as a callable module: `planner.report` names both the package and the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Path:
        return report(*args, **kwargs)


sys.modules[__name__].__class__ = _Function
