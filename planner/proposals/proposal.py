"""`Proposal`: a change to a question where nothing fits, with a plan that fits after it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from costmodels.dataclass import dataclass
from costmodels.spec.record import GIB, in_seconds
from planner.plan import Plan
from planner.problem import Problem

Kind = Literal["pin", "optimizer", "adapters", "devices", "sequence", "precision", "device"]


@dataclass(frozen=True)
class Proposal:
    """A change to a question where nothing fits, and a plan that fits after it."""

    kind: Kind
    what: str
    """The change in words, such as `on 16 of them`."""
    flags: tuple[str, ...]
    """Words to add to the command for this change."""
    keywords: Mapping[str, Any]
    """The proposal as keywords of `planner.suggest` that replace the given ones."""
    plan: Plan
    """The first plan of the changed question."""
    is_first: bool = True
    """True if the changed question was searched whole; otherwise a faster plan may exist."""

    @property
    def price(self) -> str:
        """Seconds of a step and GiB of a device, in words."""
        estimate = self.plan.estimate
        most = "" if self.is_first else "at most "
        return f"{most}{in_seconds(estimate.step_time_s)} a step, {estimate.peak_memory_bytes / GIB:.1f} GiB"

    def __str__(self) -> str:
        return f"{self.what} ({' '.join(self.flags)})"

    def lines(self) -> Iterator[str]:
        """Lines for people: the change, its price, its flags, and its layout."""
        yield f"  {self.what}: {self.price}; add {' '.join(self.flags)}"
        yield f"      {self.plan.layout.describe()}"

    def as_json(self) -> dict[str, Any]:
        """The proposal for programs."""
        estimate = self.plan.estimate
        return {
            "kind": self.kind,
            "what": self.what,
            "flags": list(self.flags),
            "is_first": self.is_first,
            "layout": self.plan.layout.model_dump(mode="json"),
            "step_time_s": estimate.step_time_s,
            "tokens_per_s": estimate.tokens_per_s,
            "peak_memory_bytes": estimate.peak_memory_bytes,
        }


@dataclass(frozen=True)
class Changed:
    """A changed question that may fit."""

    kind: Kind
    what: str
    flags: tuple[str, ...]
    keywords: Mapping[str, Any]
    problem: Problem


def proposal_lines(found: Sequence[Proposal]) -> Iterator[str]:
    """Lines on proposals, one or two lines each; empty without proposals."""
    if found:
        yield "changes that would fit, the smallest of each kind:"
    for one in found:
        yield from one.lines()
