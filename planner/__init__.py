"""How to train: ranks every legal parallel layout of a job. Never imports torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.argv[:1] == ["-m"] and sys.path[0] == str(Path.cwd()) != str(Path(__file__).resolve().parents[1]):
    # `python -m planner`: modules are not to come from the folder in which it is typed.
    del sys.path[0]

from costmodels.errors import InputError, NoLayoutFits
from planner.plan import Plan
from planner.ranking import SearchResult
from planner.search import evaluate, search, suggest
from planner.sizes import Size, Sizes, sizes

if TYPE_CHECKING:
    from planner.explanation import Explanation, explain

    __version__: str

__all__ = [
    "Explanation",
    "InputError",
    "NoLayoutFits",
    "Plan",
    "SearchResult",
    "Size",
    "Sizes",
    "__version__",
    "evaluate",
    "explain",
    "search",
    "sizes",
    "suggest",
]


def __getattr__(name: str) -> Any:
    if name in ("Explanation", "explain"):
        from planner import explanation  # Only few runs ask why.

        return getattr(explanation, name)
    if name == "__version__":
        from planner.version import version  # To look for it among what is installed takes some time.

        return version() or "0+unknown"
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
