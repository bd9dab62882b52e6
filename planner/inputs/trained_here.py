"""Models that the runtime of this package can train, as far as a question can name others."""

from __future__ import annotations

from costmodels.errors import InputError
from costmodels.spec.model import ModelSpec
from costmodels.spec.untrained import untrained_parts

PRECISIONS = ("fp32", "bf16", "fp16", "fp8", "mxfp8")
"""Number formats that the runtime computes in."""


def check_model(spec: ModelSpec) -> None:
    """Raise `InputError` when `spec` needs what the runtime does not build."""
    missing = untrained_parts(spec)
    if missing:
        raise InputError(
            f"model {spec.name} can be planned, not trained here: the runtime does not compute "
            f"{', '.join(missing)}"
        )
