"""`planner tapes`: records what units of models allocate and free, for plans priced without PyTorch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

from cli.interrupts import exit_on_ctrl_c
from cli.status import Status
from costmodels.catalogue import model_names
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.layout import fp8_conflict
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import MultiTokenPrediction
from costmodels.tapes import store
from costmodels.tapes.coverage import structures_of_model
from costmodels.tapes.structure import Structure
from planner.inputs.model import resolve_model, with_mtp
from planner.options.flags import flag, flag_groups
from planner.options.limits import AT_LEAST_1
from runtime.dryrun.preflight import check_torch

AT_ONCE = 20
"""Tapes between two writes of their file."""

LAYERS = {"compiled": (True,), "eager": (False,), "both": (True, False)}


@dataclass(frozen=True)
class TapesOptions:
    """Whose units are recorded, and where tapes are kept."""

    model: str | None = flag(
        None,
        "Catalogue name, or path of a Hugging Face config.json or a YAML file; all of the catalogue without.",
    )
    layers: Literal["compiled", "eager", "both"] = flag(
        "compiled", "Whether layers are compiled, as all are but those of schedules that split backward."
    )
    precision: Literal["fp32", "tf32", "fp16", "bf16", "fp8"] = flag(
        "bf16", "Number format; fp16 has the tapes of bf16."
    )
    fp8_recipe: Literal["rowwise", "tensorwise", "rowwise_with_gw_hp"] | None = flag(
        None, "Scales of fp8; rowwise unless given."
    )
    most: int = flag(
        40,
        "Tapes of each model at most: of parallelism and recomputation, the usual ones first.",
        within=AT_LEAST_1,
    )
    mtp_num_layers: int | None = flag(
        None, "Record modules that predict this many further tokens too.", within=AT_LEAST_1
    )
    file: str | None = flag(None, "Keep tapes in this file instead of the user's cache.", metavar="FILE")
    again: bool = flag(False, "Record tapes anew that are there.")

    def structures(self) -> Iterator[Structure]:
        """The structures whose tapes there are to be, some of them more than once."""
        names = [self.model] if self.model else model_names()
        for model in map(self._model, names):
            for compiled in LAYERS[self.layers]:
                recipe = self.fp8_recipe or "default"
                yield from islice(structures_of_model(model, compiled, self.precision, recipe), self.most)

    def _model(self, name: str) -> ModelSpec:
        spec, depths = resolve_model(name), self.mtp_num_layers
        return spec if depths is None else with_mtp(spec, MultiTokenPrediction(depths=depths))


@flag_groups(options=TapesOptions)
def tapes(options: TapesOptions) -> None:
    """Record what the units of models allocate and free, under the PyTorch that is installed.

    Tapes of the catalogue's models come with the package; others let suggest know the exact memory of a
    model of one's own.
    """
    check_torch("planner tapes runs the layers of a model", options.precision)
    conflict = fp8_conflict(options.precision, options.fp8_recipe or "default", gathers=False)
    if conflict is not None:
        raise InputError(conflict)
    wanted = dict.fromkeys(options.structures())
    version = store.default_version()
    path = Path(options.file) if options.file else store.cache_path(version)
    there = set[str]()
    if not options.again:
        there = set(store.structure_names(path)) if options.file else store.known_structures(version)
    missing = [structure for structure in wanted if structure.name not in there]
    try:
        refused = _record(missing, path) if missing else []
    except OSError as error:
        raise InputError(
            f"tapes cannot be written to {path}: {error.strerror}; name another --file"
        ) from None
    print(f"{len(missing) - len(refused)} tapes recorded in {path}, {len(wanted) - len(missing)} were there")
    for line in refused:
        print(f"planner: note: {line}")


def _record(structures: list[Structure], path: Path) -> list[str]:
    """Record tapes into a file; returns why some were not."""
    with Status() as status:
        status.tell("loading PyTorch")
        with exit_on_ctrl_c():
            from runtime.dryrun.tape_recorder import record_tapes

        def tell(number: int, structure: Structure) -> None:
            status.show(f"recording {number} of {len(structures)}: {structure.unit}")

        return record_tapes(structures, path, AT_ONCE, tell)
