"""`planner tapes`: records what units of models allocate and free, for plans priced without PyTorch."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from cli.interrupts import exit_on_ctrl_c
from cli.status import Status
from costmodels.catalogue import load_model, model_names
from costmodels.tapes import store
from costmodels.tapes.coverage import structures_of_model
from costmodels.tapes.structure import Structure
from planner.options.flags import flag, flag_groups

SAVE_PERIOD = 20
"""Tapes that an interrupted recording loses at most."""


@dataclasses.dataclass(frozen=True)
class TapesOptions:
    """Whose units are recorded, and where tapes are kept."""

    model: str | None = flag(None, "Model of the catalogue or file of one; all of the catalogue without.")
    layers: Literal["compiled", "eager"] = flag("compiled", "Whether layers are compiled.")
    all_recomputation: bool = flag(False, "Record every selection of modules that recompute.")
    context_parallel: bool = flag(False, "Record context parallelism too.")
    file: str | None = flag(None, "Keep tapes in this file instead of the user's cache.", metavar="FILE")
    again: bool = flag(False, "Record tapes anew that are there.")


@flag_groups(options=TapesOptions)
def tapes(options: TapesOptions) -> None:
    """Record what the units of models allocate and free, under the PyTorch that is installed.

    Tapes of the catalogue's models come with the package; others let suggest know the exact memory of a
    model of one's own.
    """
    models = [load_model(options.model)] if options.model else [load_model(name) for name in model_names()]
    compiled = options.layers == "compiled"
    wanted = dict.fromkeys(
        structure
        for model in models
        for structure in structures_of_model(
            model, compiled, options.all_recomputation, options.context_parallel
        )
    )
    version = store.installed_version()
    path = Path(options.file) if options.file else store.cache_path(version)
    there = set() if options.again else set(store.structure_names(path))
    if not options.file and not options.again:
        there |= set(store.structure_names(store.path_of(version)))
    missing = [structure for structure in wanted if structure.name not in there]
    refused = _record(missing, path)
    print(f"{len(missing) - len(refused)} tapes recorded in {path}, {len(wanted) - len(missing)} were there")
    for line in refused:
        print(f"planner: note: {line}")


def _record(structures: list[Structure], path: Path) -> list[str]:
    """Record tapes into a file; returns why some were not."""
    found, refused = {}, []
    with Status() as status:
        status.tell("loading PyTorch")
        with exit_on_ctrl_c():
            from runtime.dryrun.symbols import UnknownSizeError
            from runtime.dryrun.tape_recorder import recorded_tape
            from runtime.dryrun.unit_recorder import UnlikeError
        for number, structure in enumerate(structures, start=1):
            status.tell(f"recording {number} of {len(structures)}: {structure.unit}")
            try:
                found[structure] = recorded_tape(structure)
            except (UnknownSizeError, UnlikeError, ValueError) as error:
                refused.append(f"{structure.name}: {error}")
            if len(found) == SAVE_PERIOD:
                store.write_tapes(found, path)
                found.clear()
        store.write_tapes(found, path)
    return refused
