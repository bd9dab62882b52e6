"""`Rule`: one reason why a layout is illegal."""

from __future__ import annotations

import math
from collections.abc import Callable, Set

from costmodels.dataclass import dataclass
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Bools, LayoutTable


@dataclass(frozen=True)
class Rule:
    """One reason why a layout is illegal."""

    name: str
    broken: Callable[[ModelSpec, LayoutTable], Bools]
    """True where the rule is broken; the shape broadcasts to that of the grid."""
    message: Callable[[ModelSpec, LayoutTable], str]
    """The error of one layout, with its numbers and legal values."""
    redundant: bool = False
    """True if the layout would run, but another layout of the search is at least as good."""
    of_mesh: bool = False
    """True if the rule depends on mesh and schedule only. Such a rule of an engine or a job is evaluated
    before the rules of all layouts."""
    reserve: bool = False
    """True if layouts that break the rule are examined when they could be among the first
    (`planner.solve.further`)."""
    lifted_by: tuple[tuple[str, ...], ...] = ()
    """Groups of degrees; if all degrees of a group are pinned, the user wants the redundant layout."""

    def is_lifted(self, pinned: Set[str]) -> bool:
        """Return whether pins of the degrees `pinned` ask for layouts that the rule forbids."""
        return any(pinned >= set(group) for group in self.lifted_by)


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]
