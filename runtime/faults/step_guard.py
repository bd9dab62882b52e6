"""Steps that must not change the weights: losses or gradients that are NaN or infinite, and spikes."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from costmodels.errors import InputError
from planner.options.flags import one_line
from runtime.faults.fault_options import FaultOptions

NORM_WINDOW = 128
"""Number of gradient norms with which a spike is compared: those of the last steps that changed the
weights."""

FEWEST_NORMS = 16
"""Fewest norms for a comparison with their median."""


class TrainingDiverged(InputError):
    """Error: too many steps in a row were skipped. Exit code 4, as a restart would fail again."""

    exit_code = 4


class GuardState(BaseModel):
    """The state of a guard in a checkpoint."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    norms: list[Annotated[float, Field(ge=0)]] = Field(max_length=NORM_WINDOW)
    in_a_row: int = Field(ge=0, le=2**31)


class StepGuard:
    """A judge of each step by the loss and the gradient norm of all ranks, so that all ranks decide
    equally."""

    def __init__(self, options: FaultOptions) -> None:
        self.checks_numbers = not options.no_check_for_nan_in_loss_and_grad
        self.factor = options.skip_grad_norm_above
        self.most_in_a_row = options.max_skipped_steps
        self.norms: deque[float] = deque(maxlen=NORM_WINDOW)
        self.in_a_row = 0
        self.reason = ""
        """The reason of a skipped last step; empty without one, or where a smaller loss scale mends it."""

    def judge(self, loss: float, norm: float) -> str:
        """The reason to skip the step with this loss and norm; empty when there is none."""
        self.reason = self._reason(loss, norm)
        if self.reason:
            self.in_a_row += 1
        else:
            self.in_a_row = 0
            if self.factor is not None and math.isfinite(norm):
                self.norms.append(norm)
        return self.reason

    def _reason(self, loss: float, norm: float) -> str:
        if self.checks_numbers and not (math.isfinite(loss) and math.isfinite(norm)):
            return f"loss {loss:g}, gradient norm {norm:g}"
        if self.factor is not None and len(self.norms) >= FEWEST_NORMS:
            usual = statistics.median(self.norms)
            if not norm <= self.factor * usual:
                return f"gradient norm {norm:.4g}, usually {usual:.4g}"
        return ""

    def stop_if_hopeless(self, iteration: int) -> None:
        """Raise `TrainingDiverged` once too many steps in a row were skipped; all ranks do so together."""
        if self.in_a_row >= self.most_in_a_row:
            raise TrainingDiverged(
                f"stopped at iteration {iteration}: the last {self.in_a_row} steps were skipped "
                f"({self.reason}), and the weights are those of iteration {iteration - self.in_a_row}; lower "
                "--lr, look at the data, or raise --max-skipped-steps"
            )

    def state(self) -> dict[str, Any]:
        """The state of the guard for a checkpoint."""
        return {"norms": list(self.norms), "in_a_row": self.in_a_row}

    def load(self, state: object) -> None:
        """Continue from the `state` in a checkpoint; raises `InputError` for any other value."""
        try:
            kept = GuardState.model_validate(state)
        except ValidationError as error:
            raise InputError(f"the checkpoint's step_guard is damaged: {one_line(error)}") from None
        self.norms.clear()
        self.norms.extend(kept.norms)
        self.in_a_row = kept.in_a_row
