"""Played tapes against peaks that PyTorch's allocator counted on a real GPU.

python -m benchmarks.memory_h100 --rows bundled_h100.csv [--json]

Rows are steps of this package's runtime, in the columns of `costmodels.calibration.measurements`: a catalogue
model cut to some layers, on one device. What is played is that of the PyTorch with which a row was measured;
units without a tape are recorded where that is the installed one, and rows that lack some are named.

The rows were measured before the output matrix and the loss became one operation over chunks of tokens, and
before layers with experts became one graph. What both did then is played here in the place of what they do
now: the former was recorded (`whole_logits.json`), and layers of two graphs are those that FSDP2 wraps.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from costmodels import Layout, ModelSpec
from costmodels.catalogue import load_device, load_engine, load_model
from costmodels.errors import InputError
from costmodels.spec.record import GIB
from costmodels.tapes import player, store
from costmodels.tapes.player.heap import OPTIMIZER
from costmodels.tapes.player.stage_units import structures_of_stage
from costmodels.tapes.structure import structure_of
from costmodels.tapes.text import parsed_tape
from planner.options.flags import run
from tests.support.played_memory import UnknownError, record

WITHIN = 0.005
"""How far a played peak may be from the measured one."""


WHOLE_LOGITS = Path(__file__).with_name("whole_logits.json")
"""Tapes of output matrix and loss together under PyTorch 2.11, by precision, norm and padding."""


class Row(NamedTuple):
    """One measured step."""

    model: ModelSpec
    layout: Layout
    device: str
    version: str
    """Of PyTorch, such as "2.11"."""
    allocated: float
    """Bytes of tensors at the peak."""

    @property
    def skips(self) -> bool:
        """The measured steps updated nothing, so that the optimizer had no state.

        A loss scale from 2^32 on, as the runtime had it in fp16 then, makes the first 19 steps overflow.
        """
        return self.layout.precision == "fp16"


def row_of(raw: Mapping[str, str]) -> Row:
    """A row of the table."""
    layers = int(raw["layers"])
    model = load_model(raw["model_name"]).model_copy(update={"layers": layers, "seq": int(raw["seq"])})
    version = re.search(r"torch (\d+\.\d+)", raw["source_ref"])
    if version is None:
        raise InputError(f"row of {raw['model_name']}: source_ref names no version of PyTorch")
    flags = {name: f"{name}=1" in raw["notes"] for name in ("offload_activations", "offload_optimizer")}
    fields: dict[str, Any] = {
        "layers_per_stage": (layers,),
        "micro_batch_size": int(raw["mbs"]),
        "global_batch_size": int(raw["gbs"]),
        "recompute": raw["recompute"],
        "zero_stage": int(raw["zero_stage"]),
        "precision": raw["precision"],
        "optimizer": raw["optimizer"],
        **flags,
    }
    return Row(
        model,
        Layout.model_validate(fields),
        raw["gpu"].partition("-")[0].lower(),
        version[1],
        float(raw["peak_mem_gib"]) * GIB,
    )


def remember_whole_logits(row: Row) -> None:
    """Let the head of a row be what it was when the row was measured."""
    head = structure_of(row.model, row.layout, "head", compiled=True)
    key = f"{head.precision},{head.norm}{',pads_vocabulary' * head.pads_vocabulary}"
    tapes = json.loads(WHOLE_LOGITS.read_text(encoding="utf-8"))
    if key in tapes:
        store.remember_tapes({head: parsed_tape(tapes[key])}, row.version)


def remember_parts(row: Row) -> None:
    """Let layers with experts be what they were when the row was measured."""
    for one in structures_of_stage(row.model, row.layout, 0, compiled=True):
        if not one.structure.whole:
            continue
        parts = one.structure._replace(whole=False)
        tape = store.tape_of(parts, row.version)
        if tape is None and store.installed_version() == row.version:
            from runtime.dryrun.tape_recorder import recorded_tape

            tape = recorded_tape(parts)
        if tape is not None:
            store.remember_tapes({one.structure: tape}, row.version)


def played_bytes(row: Row) -> int:
    """Bytes of tensors at the peak of a step of the row, with the libraries' workspaces.

    Raises:
        UnknownError: units of it have no tape.
    """
    remember_whole_logits(row)
    remember_parts(row)
    if player.missing(row.model, row.layout, True, row.version):
        if store.installed_version() != row.version:
            raise UnknownError(f"not all units are recorded under PyTorch {row.version}: run this with it")
        record(row.model, row.layout, compiled=True)
    moments = player.rank_moments(row.model, row.layout, 0, True, row.version)
    peak = max(moment.total - row.skips * moment.composition[OPTIMIZER] for moment in moments)
    engine = load_engine("bundled").for_device(load_device(row.device))
    return round(peak + engine.allocator.workspace_bytes)


def memory_h100(
    rows: Annotated[Path, typer.Option(help="CSV file of measured steps of the runtime.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare played peaks with measured ones."""
    try:
        with rows.open(encoding="utf-8") as file:
            every = [row_of(raw) for raw in csv.DictReader(file)]
    except OSError as error:
        raise InputError(f"--rows {rows}: {error.strerror}") from None
    except KeyError as error:
        raise InputError(f"--rows {rows}: no column {error.args[0]}") from None
    found, errors = [], []
    for row in every:
        one: dict[str, Any] = {
            "model": f"{row.model.name}, {row.model.layers} layers, seq {row.model.seq}",
            "layout": f"{row.layout.describe()} {row.layout.precision} {row.layout.optimizer}",
            "torch": row.version,
            "skips_updates": row.skips,
            "allocated": row.allocated,
            "played": None,
        }
        try:
            one["played"] = played_bytes(row)
        except UnknownError as error:
            one["unknown"] = str(error)
        else:
            errors.append(abs(one["played"] / row.allocated - 1))
        found.append(one)
        if not as_json:
            print(line(one), flush=True)
    within = sum(error <= WITHIN for error in errors)
    if as_json:
        print(json.dumps({"rows": found, "within": within}, indent=2))
        return
    worst = f"; at most {max(errors):.2%} off" if errors else ""
    print(f"{within} of {len(found)} rows within {WITHIN:.1%}, {len(found) - len(errors)} unknown{worst}")


def line(one: Mapping[str, Any]) -> str:
    """A row as text."""
    name = f"{one['model']}: {one['layout']}: measured {one['allocated'] / GIB:.3f} GiB"
    name += " (steps that updated nothing)" * one["skips_updates"]
    if one["played"] is None:
        return f"{name}, unknown: {one['unknown']}"
    more = one["played"] - one["allocated"]
    return (
        f"{name}, played {one['played'] / GIB:.3f}, {more / 2**20:+.0f} MiB, {more / one['allocated']:+.2%}"
    )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(memory_h100)
    run(app, "benchmarks.memory_h100")
