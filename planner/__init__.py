"""How to train: ranks every legal parallel layout of a job. Never imports torch."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if sys.argv[:1] == ["-m"] and sys.path[0] == str(Path.cwd()) != str(Path(__file__).resolve().parents[1]):
    # `python -m planner`: modules are not to come from the folder in which it is typed.
    del sys.path[0]

from planner.plan import Plan
from planner.ranking import SearchResult
from planner.search import evaluate, search, suggest
from planner.sizes import Size, Sizes, sizes

if TYPE_CHECKING:
    from planner.explanation import Explanation, explain

__all__ = [
    "Explanation",
    "Plan",
    "SearchResult",
    "Size",
    "Sizes",
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
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
