"""Flags of `planner calibrate`, and of the ranks that it starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from costmodels.errors import InputError
from costmodels.spec.model import ModelSpec
from planner.inputs.model import resolve_model
from planner.inputs.trained_here import check_model
from planner.options.flags import flag
from planner.options.limits import Bounds

DEFAULT_MODEL = {"cpu": "gpt2-nano", "gpu": "gpt2-small"}
"""Default model whose shapes are measured, by the kind of device."""


@dataclass(frozen=True)
class CalibrateOptions:
    """The flags of `planner calibrate`: models, seconds, and the device file to write."""

    SECTIONS: ClassVar[dict[str, str]] = {"model": "Calibration"}

    model: list[str] = flag(
        [],
        "Model whose shapes are measured: a catalogue name, a config.json or a YAML file. Repeatable; "
        f"{DEFAULT_MODEL['cpu']} on a CPU, {DEFAULT_MODEL['gpu']} elsewhere.",
        metavar="MODEL",
    )
    seconds: float = flag(
        75.0,
        "Seconds of measuring in total, over all numbers of ranks.",
        within=Bounds("from 1 to 3600 seconds", 1, 3600),
    )
    save: str | None = flag(
        None,
        "File to write; this machine's own, which other commands use by themselves, unless given.",
        metavar="FILE",
    )
    cpu: bool = flag(False, "Measure the CPU of a machine with GPUs.")

    def specs(self, kind: str) -> list[ModelSpec]:
        """The models; `InputError` for one that the runtime cannot train."""
        names = self.model or [DEFAULT_MODEL[kind]]
        found = [resolve_model(name) for name in names]
        for spec in found:
            check_model(spec)
        if self.save is not None and not self.save.lower().endswith(".json"):
            raise InputError(f"--save {self.save}: a device file ends in .json")
        return found

    def arguments(self) -> list[str]:
        """These options as flags."""
        words = [word for name in self.model for word in ("--model", name)]
        words += ["--seconds", str(self.seconds)]
        words += [] if self.save is None else ["--save", self.save]
        return words + (["--cpu"] if self.cpu else [])
