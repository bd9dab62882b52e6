"""How to train: ranks every legal parallel layout of a job. Never imports torch."""

from planner.plan import Plan
from planner.ranking import SearchResult
from planner.search import evaluate, search, suggest

__all__ = ["Plan", "SearchResult", "evaluate", "search", "suggest"]
