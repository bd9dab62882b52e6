"""run.json: the description of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from costmodels import ModelSpec
from costmodels.errors import InputError
from costmodels.files import read_at_most
from runtime.checkpoint.manifest import damage_error
from runtime.settings.adapter_base import Base

RUN_FILE = "run.json"
"""The file with model, iteration, optimizer state, loss scale, and the arguments of `save`."""

LARGEST_RUN_FILE = 1 << 24
"""Most bytes of a run.json."""

Count = Annotated[int, Field(ge=0, le=2**62)]


class LossScaleState(BaseModel):
    """The state of fp16's loss scale."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    value: Annotated[float, Field(gt=0)]
    good_steps: Count
    overflows_left: int


class RunFile(BaseModel):
    """The contents of run.json; further fields are the arguments of `save`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    iteration: Count
    model: ModelSpec
    skipped_iterations: Count = 0
    """Number of skipped iterations, which schedules and the optimizer do not count."""
    optimizer_state: list[str] = []
    """Slots of the optimizer's state, such as exp_avg; empty where only weights are stored."""
    loss_scale: LossScaleState | None = None
    base: Base | None = None
    """The base of the adapters of `model.lora`; None without adapters."""
    consumed_samples: Count = 0
    """Number of samples of the training data that were trained on."""

    @model_validator(mode="after")
    def _skips_what_was_run(self) -> RunFile:
        if self.skipped_iterations > self.iteration:
            raise ValueError("skipped_iterations exceed iteration")
        if (self.model.lora is None) != (self.base is None):
            raise ValueError("adapters and their base go together")
        return self

    def run_state(self) -> dict[str, Any]:
        """The state of the run that `save` was given."""
        return {"consumed_samples": self.consumed_samples, **(self.model_extra or {})}


def run_text(run: Mapping[str, Any]) -> str:
    """The text of a run.json; raises `pydantic.ValidationError` for values that could not be read again."""
    RunFile.model_validate(run)
    return json.dumps(run, indent=1)


def read_run(folder: str | Path) -> RunFile:
    """The contents of run.json in `folder`, the checkpoint of one iteration.

    Raises:
        InputError: run.json is missing or damaged.
    """
    path = Path(folder) / RUN_FILE
    try:
        text = read_at_most(path, LARGEST_RUN_FILE)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    try:
        return RunFile.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise damage_error(path, f"says nothing valid: {where or 'JSON'}: {first['msg'].lower()}") from None


def check_same_model(source: Path, run: RunFile, spec: ModelSpec) -> None:
    """Raise `InputError` where the checkpoint in `source` is not of the model `spec`."""
    different = [
        f"{name} {getattr(run.model, name)}"
        for name in ModelSpec.model_fields
        if name not in ("name", "source", "published_parameters")
        and getattr(run.model, name) != getattr(spec, name)
    ]
    if different:
        raise InputError(
            f"checkpoint {source} is of another model ({', '.join(different)}); give the same model"
        )
