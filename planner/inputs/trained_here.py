"""A check that this package's runtime can train a model."""

from __future__ import annotations

from costmodels.errors import InputError
from costmodels.spec.model import ModelSpec
from costmodels.spec.untrained import untrained_parts

PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "mxfp8")
"""Number formats in which the runtime computes."""


def check_model(spec: ModelSpec) -> None:
    """Raise `InputError` when `spec` has a feature that the runtime does not support."""
    missing = untrained_parts(spec)
    if missing:
        raise InputError(
            f"model {spec.name} can be planned, not trained here: the runtime does not compute "
            f"{', '.join(missing)}"
        )
