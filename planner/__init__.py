"""The parallelism planner: it ranks every legal parallel layout of a training job. It never imports torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.argv[:1] == ["-m"] and sys.path[0] == str(Path.cwd()) != str(Path(__file__).resolve().parents[1]):
    # `python -m planner`: modules are not to come from the folder in which it is typed.
    del sys.path[0]

from costmodels.exports import on_demand

if TYPE_CHECKING:
    from costmodels.errors import InputError, NoLayoutFits
    from planner.api import evaluate, search, suggest
    from planner.budget.goodput import Failures
    from planner.catalogues import devices, engines, models
    from planner.explanation.comparison import Comparison, compare
    from planner.explanation.explanation import Explanation, explain
    from planner.formats.check import Check, check
    from planner.formats.conversion import Conversion, convert_config
    from planner.formats.targets import export
    from planner.formats.writing.export import Export
    from planner.plan import Plan, load
    from planner.ranking.result import SearchResult
    from planner.report import report
    from planner.report.figures import plan_figures
    from planner.world_sizes import Size, Sizes, sizes

    __version__: str

__all__ = [
    "Check",
    "Comparison",
    "Conversion",
    "Explanation",
    "Export",
    "Failures",
    "InputError",
    "NoLayoutFits",
    "Plan",
    "SearchResult",
    "Size",
    "Sizes",
    "__version__",
    "check",
    "compare",
    "convert_config",
    "devices",
    "engines",
    "evaluate",
    "explain",
    "export",
    "load",
    "models",
    "plan_figures",
    "report",
    "search",
    "sizes",
    "suggest",
]

_NAMES = {
    "costmodels.errors": ("InputError", "NoLayoutFits"),
    "planner.api": ("evaluate", "search", "suggest"),
    "planner.catalogues": ("devices", "engines", "models"),
    "planner.budget.goodput": ("Failures",),
    "planner.world_sizes": ("Size", "Sizes", "sizes"),
    "planner.explanation.comparison": ("Comparison", "compare"),
    "planner.explanation.explanation": ("Explanation", "explain"),
    "planner.formats.check": ("Check", "check"),
    "planner.formats.conversion": ("Conversion", "convert_config"),
    "planner.formats.writing.export": ("Export",),
    "planner.formats.targets": ("export",),
    "planner.plan": ("Plan", "load"),
    "planner.ranking.result": ("SearchResult",),
    "planner.report.figures": ("plan_figures",),
}

_exported = on_demand(__name__, {name: home for home, names in _NAMES.items() for name in names})


def __getattr__(name: str) -> Any:
    if name == "report":
        import planner.report  # The package of the page, which is also the function that writes it.

        return planner.report
    if name == "__version__":
        from planner.version import version  # To look for it among what is installed takes some time.

        return version() or "0+unknown"
    return _exported(name)


def __dir__() -> list[str]:
    return sorted(__all__)
