"""`Rule`: one reason why a layout is not considered."""

from __future__ import annotations

import math
from collections.abc import Callable, Set

from costmodels.dataclass import dataclass
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import Bools, LayoutTable


@dataclass(frozen=True)
class Rule:
    """One reason why a layout is not considered further."""

    name: str
    broken: Callable[[ModelSpec, LayoutTable], Bools]
    """True where the rule is broken; the shape broadcasts to that of the grid."""
    message: Callable[[ModelSpec, LayoutTable], str]
    """The error of one layout: its numbers, and values that would be legal."""
    redundant: bool = False
    """The layout would run, but the search covers one that is at least as good."""
    of_mesh: bool = False
    """The rule looks at the mesh and the schedule alone; it is asked before the rules of all layouts where it
    is about an engine or a job."""
    reserve: bool = False
    """Layouts that break the rule are looked at where they could be among the first
    (`planner.solve.further`)."""
    lifted_by: tuple[tuple[str, ...], ...] = ()
    """Groups of degrees: pins of all of any one group say that the user wants the redundant layout."""

    def is_lifted(self, pinned: Set[str]) -> bool:
        """Return whether pins of the degrees `pinned` ask for layouts that the rule forbids."""
        return any(pinned >= set(group) for group in self.lifted_by)


def divisors(number: int) -> list[int]:
    """All divisors of `number`, ascending."""
    low = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return low + [number // d for d in reversed(low) if d * d != number]
