"""Seconds of a step by part, measured and predicted."""

from __future__ import annotations

from pydantic import Field

from costmodels.spec.estimate import StepTime
from costmodels.spec.record import Name, NonNegative, Record


class StepParts(Record):
    """Seconds of the parts of one step on one rank; they add up to the step."""

    products: NonNegative = 0.0
    """Seconds of GEMMs."""
    attention: NonNegative = 0.0
    elementwise: NonNegative = 0.0
    """Seconds of all other kernels: norms, activations, copies, the loss."""
    optimizer: NonNegative = 0.0
    host_gaps: NonNegative = 0.0
    """Seconds that a device idles while the host launches. On a CPU, seconds of Python between operators."""
    collectives: dict[Name, NonNegative] = Field(default_factory=dict)
    """Seconds of communication that no kernel hides, by the kind of collective."""

    @property
    def communication(self) -> float:
        """Seconds of all collectives."""
        return sum(self.collectives.values())

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return sum(self.by_term().values())

    def by_term(self) -> dict[str, float]:
        """Seconds by the name in `TERMS`."""
        return {name: getattr(self, name) for name in TERMS}

    def scaled(self, factor: float) -> StepParts:
        """All seconds times `factor`."""
        own = {name: factor * getattr(self, name) for name in TERMS if name != "communication"}
        kinds = {kind: factor * seconds for kind, seconds in self.collectives.items()}
        return StepParts(**own, collectives=kinds)


TERMS = {
    "products": "GEMMs",
    "attention": "attention",
    "elementwise": "element-wise work",
    "optimizer": "the optimizer",
    "host_gaps": "the host, which the device waits for",
    "communication": "communication and waits for other ranks",
}
"""Parts of a step that are both measured and predicted, with their names in a sentence."""

_WAITS = (
    "tensor_parallel",
    "context_parallel",
    "expert_parallel",
    "pipeline_parallel",
    "bubble",
    "data_parallel",
)


def predicted_parts(time: StepTime) -> dict[str, float]:
    """The seconds of an estimate by the name in `TERMS`, as a profiler would see them.

    Recomputation is divided among the kinds of work in layers.
    """
    kinds = {"products": time.compute, "attention": time.attention, "elementwise": time.elementwise}
    layers = sum(kinds.values())
    again = 1.0 + (time.recompute / layers if layers else 0.0)
    found = {name: again * seconds for name, seconds in kinds.items()}
    found["elementwise"] += time.accumulation
    found["optimizer"] = time.optimizer
    found["host_gaps"] = time.launch + time.offload
    found["communication"] = sum(getattr(time, part) for part in _WAITS)
    return found
