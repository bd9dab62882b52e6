"""The report on each kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.gpu_kinds.attempts import AS_IT_IS, Result
from benchmarks.gpu_kinds.kinds import Kind
from costmodels.spec.record import GIB


@dataclass
class Row:
    """A kind and its attempts."""

    kind: Kind
    results: dict[str, Result] = field(default_factory=dict)
    """Results of the row's attempts, by the name of their form."""
    not_run: str = ""
    """The reason why the kind was not run."""
    left_out: list[str] = field(default_factory=list)
    """Second tries that were not started."""
    expected: Mapping[str, Sequence[float]] | None = None
    """Losses and norms on a CPU."""

    @property
    def first(self) -> Result | None:
        """The result of the original job."""
        return self.results.get(AS_IT_IS.name)

    @property
    def is_right(self) -> bool:
        """True if the job ran with the expected losses, or if this device cannot run it."""
        if self.first is None:
            return self.not_run.startswith("needs")
        return self.first.ran and not self.differs

    @property
    def difference(self) -> tuple[float, float] | None:
        """The largest relative difference of a loss and of a gradient norm; None if nothing is comparable."""
        if self.first is None or not self.first.losses or self.expected is None:
            return None
        loss = largest(self.first.losses, self.expected["losses"])
        return loss, largest(self.first.norms, self.expected["norms"])

    @property
    def differs(self) -> bool:
        """True if losses or norms differ by more than rounding errors."""
        found = self.difference
        # A loss that is not a number is within no tolerance.
        return found is not None and not (found[0] <= self.kind.loss and found[1] <= self.kind.norm)

    def lines(self) -> list[str]:
        """The row as text, a line for each attempt."""
        if self.first is None:
            return [f"{self.kind.name}: {self.not_run}"]
        lines = [f"{self.kind.name}: {self._first_words(self.first)}"]
        for name, result in self.results.items():
            if name != AS_IT_IS.name:
                how = f"ran, {result.seconds:.0f} s" if result.ran else f"FAILED, {result.said}"
                lines.append(f"{self.kind.name}, {name}: {how}")
        return lines + [f"{self.kind.name}, {name}: not run, no time was left" for name in self.left_out]

    def _first_words(self, first: Result) -> str:
        verdict = "DIFFERS" if self.differs else "ran"
        parts = [verdict if first.ran else f"FAILED, {first.said}", f"{first.seconds:.0f} s"]
        if self.difference is not None:
            loss, norm = self.difference
            parts.append(f"off the CPU's: loss {loss:.2%}, gradient norm {norm:.1%}")
        elif first.losses:
            parts.append("no losses of a CPU to compare with")
        return "; ".join([*parts, *memory_words(first)])

    def record(self) -> dict[str, Any]:
        """The row for programs."""
        difference = self.difference
        return {
            "kind": self.kind.name,
            "right": self.is_right,
            "not_run": self.not_run,
            "difference": None if difference is None else {"loss": difference[0], "norm": difference[1]},
            "expected": None if self.expected is None else dict(self.expected),
            "attempts": {name: asdict(result) for name, result in self.results.items()},
        }


def memory_words(result: Result) -> list[str]:
    """Predicted and measured peak bytes as text."""
    parts = []
    if result.predicted is not None:
        parts.append(f"predicted {result.predicted / GIB:.3f}")
    if result.allocated:
        ratio = f" ({result.predicted / result.allocated:.2f})" if result.predicted else ""
        parts.append(f"allocated {result.allocated / GIB:.3f}{ratio}")
    if result.reserved:
        parts.append(f"reserved {result.reserved / GIB:.3f}")
    return [f"peak GiB: {', '.join(parts)}"] if parts else []


def largest(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference over steps that both have; infinite if a value is NaN."""
    ratios = [abs(own / other - 1) for own, other in zip(found, expected, strict=False)]
    return max((math.inf if math.isnan(ratio) else ratio for ratio in ratios), default=math.inf)


def summary(rows: Sequence[Row]) -> str:
    """Counts of all rows by outcome, and the largest difference to the CPU."""
    ran = [row for row in rows if row.first is not None and row.first.ran]
    failed = [row.kind.name for row in rows if row.first is not None and not row.first.ran]
    differ = [row.kind.name for row in ran if row.differs]
    unable = [row.kind.name for row in rows if row.not_run.startswith("needs")]
    late = [row.kind.name for row in rows if row.not_run and not row.not_run.startswith("needs")]
    lines = [f"{len(ran)} of {len(rows)} kinds ran"]
    for what, names in (
        ("failed", failed),
        ("ran with other losses than on a CPU", differ),
        ("not for this device", unable),
        ("not run, no time was left", late),
    ):
        if names:
            lines.append(f"{what}: {', '.join(names)}")
    compared = [(row.difference, row.kind.name) for row in ran if row.difference is not None]
    if compared:
        (difference, name) = max(compared)
        lines.append(f"the largest difference of a loss: {difference[0]:.2%} ({name})")
    return "\n".join(lines)
