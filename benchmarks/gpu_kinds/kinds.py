"""The kinds of jobs, their models, and their losses on a CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from costmodels.catalogue.yaml_files import parse
from costmodels.errors import InputError
from costmodels.spec.record import Record

FOLDER = Path(__file__).parent

MODELS, EXPECTED = FOLDER / "models.json", FOLDER / "expected.json"


class Kind(Record):
    """One kind of job, as kinds.yaml describes it."""

    name: str
    do: tuple[str, ...]
    like: str = ""
    gpu: str = ""
    capability: tuple[int, int] = (0, 0)
    loss: float = 0.01
    norm: float = 0.1

    @property
    def folder(self) -> str:
        """The name of the folder of its files."""
        return "".join(letter if letter.isalnum() else "_" for letter in self.name).replace("__", "_")

    @property
    def is_planned(self) -> bool:
        """True if the kind runs the layout of its plan."""
        return not any(command.startswith("alone ") for command in self.do)

    def missing(self, capability: tuple[int, int] | None) -> str:
        """The feature that a device lacks for this kind; '' if none.

        Args:
            capability: compute capability of the GPU; None for a CPU.
        """
        if capability is None:
            return f"needs a GPU ({self.gpu})" if self.gpu else ""
        if capability < self.capability:
            return f"needs a GPU of compute capability {self.capability[0]}.{self.capability[1]} ({self.gpu})"
        return ""


def read_kinds() -> tuple[str, list[Kind]]:
    """The flags of all training commands, and all kinds."""
    content = parse((FOLDER / "kinds.yaml").read_text(encoding="utf-8"), "kinds.yaml")
    return content["train"], [Kind.model_validate(kind) for kind in content["kinds"]]


def chosen(kinds: list[Kind], only: list[str]) -> list[Kind]:
    """The kinds whose names contain one of the texts; all without a text."""
    for text in only:
        if not any(text in kind.name for kind in kinds):
            names = ", ".join(kind.name for kind in kinds)
            raise InputError(f"--only {text}: no kind has it; kinds are {names}")
    return [kind for kind in kinds if not only or any(text in kind.name for text in only)]


def read_expected() -> dict[str, dict[str, list[float]]]:
    """The losses and gradient norms of each kind's steps on a CPU, by its name."""
    if not EXPECTED.is_file():
        return {}
    found: dict[str, dict[str, list[float]]] = json.loads(EXPECTED.read_text(encoding="utf-8"))["kinds"]
    return found


def write_expected(found: dict[str, dict[str, list[float]]], torch_version: str) -> None:
    """Write the losses and norms of a CPU; those of kinds that did not run now are kept."""
    kinds = read_expected() | {
        name: {key: [round(value, 5) for value in values] for key, values in one.items()}
        for name, one in found.items()
    }
    lines = [f"  {json.dumps(name)}: {json.dumps(kinds[name])}" for name in sorted(kinds)]
    text = f'{{\n "torch": {json.dumps(torch_version)},\n "kinds": {{\n' + ",\n".join(lines) + "\n }\n}\n"
    EXPECTED.write_text(text, encoding="utf-8")


def read_models() -> dict[str, dict[str, Any]]:
    """Configurations of small models as Hugging Face writes them, by name."""
    found: dict[str, dict[str, Any]] = json.loads(MODELS.read_text(encoding="utf-8"))
    return found
