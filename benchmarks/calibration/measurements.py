"""Rows of published measurements: model, devices, layout and results of each job.

The columns are those of Megatron's vocabulary in short form (`tp, pp, vpp, dp, cp, ep, sp, mbs, gbs`, ...). A
blank is filled with the value that `measurements.yaml` gives for the whole source. Without one, it stands for
all values that users of the engine commonly choose. A row that lacks more is skipped, and the reason names
the missing column.
"""

from __future__ import annotations

import csv
import io
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.calibration.published_cells import Unusable, count, note_value, number, switch
from benchmarks.calibration.published_devices import published_cluster
from benchmarks.calibration.published_layouts import published_layouts, usual_choices
from benchmarks.calibration.published_memory import has_peak, published_memory, tells_memory_alone
from benchmarks.calibration.published_models import published_model
from benchmarks.calibration.published_networks import cluster_state
from benchmarks.calibration.tables import table
from costmodels.catalogue import engine_names, load_engine
from costmodels.catalogue.yaml_files import is_file_name
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.files import read_text
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.record import GIB
from costmodels.spec.table import shared_fields

SOURCES = "measurements.yaml"
LARGEST_ROWS = 1 << 30


@dataclass(frozen=True)
class Measurement:
    """One usable row."""

    source: str
    sweep: str
    """Name of the sweep of the row; rows of one sweep may be ranked against each other."""
    reference: str
    """Publication of the row; with `line` it identifies the row."""
    line: int
    """Line of the file, the header being 1."""
    model: ModelSpec
    cluster: Cluster
    engine: Engine
    layouts: tuple[Layout, ...]
    """Possible layouts: one, or several if columns are blank."""
    step_time_s: float | None
    """None if the job ran out of memory, or if only its memory is published."""
    oom: bool
    allocated_bytes: float | None
    """Peak of tensors (`torch.cuda.max_memory_allocated`)."""
    reserved_bytes: float | None
    """Peak of memory held by the allocator (`torch.cuda.max_memory_reserved`)."""
    first_rank_only: bool
    """The memory is that of the first pipeline rank, not of the fullest."""
    last_rank_only: bool = False
    """The memory is that of the last pipeline rank, not of the fullest."""
    device_bytes: float | None = None
    """Bytes of the device that the driver said were taken (nvidia-smi)."""
    step_bytes: float | None = None
    """Peak of tensors since the end of the last backward pass."""
    other_engines: tuple[Engine, ...] = ()
    """The engine with other kernels, where it is not published which one ran."""
    file: str = ""
    """Name of the file."""
    taken: tuple[str, ...] = ()
    """Values that were taken for blank columns, such as `vpp 1, 2, 4`."""

    @property
    def certain(self) -> bool:
        """No column was blank that changes the price."""
        return len(self.layouts) == 1 and not self.other_engines


def table_groups(measurements: Sequence[Measurement]) -> Iterable[list[int]]:
    """Places of the rows that one table of layouts can hold."""
    groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, row in enumerate(measurements):
        records = (row.model, row.cluster, row.engine)
        layout = row.layouts[0]
        key = (*(record.model_dump_json() for record in records), *map(str, shared_fields(layout)))
        groups[key].append(place)
    return groups.values()


@cache
def source_notes() -> dict[str, Any]:
    """The contents of `measurements.yaml`."""
    return table(SOURCES)


class SkippedRow(NamedTuple):
    """A row that cannot be used as a measurement."""

    source: str
    reason: str
    file: str
    line: int


EngineLoader = Callable[[str], Engine]
"""A function that finds an engine by its name."""


@cache
def named_engine(name: str) -> Engine:
    """The engine of a name of the catalogue, or of a YAML file."""
    return load_engine(name)


def read_measurements(
    path: str | Path,
    engine: str | None = None,
    fills: Mapping[str, str] | None = None,
    load: EngineLoader = named_engine,
) -> tuple[list[Measurement], list[SkippedRow]]:
    """The usable rows of a CSV file, and those that were skipped.

    A file without the column `source_id` is no table of measurements, and is skipped completely, reported as
    its line 1.

    Args:
        engine: engine of all jobs, instead of the one in the rows.
        fills: contents of blank cells, by column.
        load: finds an engine by its name; that of the catalogue unless given.

    Raises:
        InputError: the file cannot be read.
    """
    try:
        text = read_text(path, LARGEST_ROWS, "utf-8-sig")
        rows = csv.DictReader(io.StringIO(text, newline=""))
        columns = rows.fieldnames
        every = [(rows.line_num, row) for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"rows {path}: cannot read them ({error})") from error
    if not columns:
        return [], []
    file = Path(path).name
    if "source_id" not in columns:
        return [], [SkippedRow(file, NO_TABLE, file, 1)]
    measurements: list[Measurement] = []
    skipped: list[SkippedRow] = []
    for line, row in every:
        source = (row.get("source_id") or "").strip() or "unnamed"
        try:
            measurements.append(replace(measurement_of(row, line, engine, fills, load), file=file))
        except Unusable as reason:
            skipped.append(SkippedRow(source, str(reason), file, line))
    return measurements, skipped


NO_TABLE = "no column source_id: no table of measurements"
"""The reason why a whole file is skipped."""


def measurement_of(
    raw: Mapping[str, str | None],
    line: int = 0,
    engine: str | None = None,
    fills: Mapping[str, str] | None = None,
    load: EngineLoader = named_engine,
) -> Measurement:
    """One row as a `Measurement`; raises `Unusable` with the reason when it cannot be one.

    Arguments are those of `read_measurements`.
    """
    row = {name: (value or "").strip() for name, value in raw.items() if isinstance(name, str)}
    for name, value in (fills or {}).items():
        row[name] = row.get(name) or value
    oom = row.get("row_status") == "oom" or row.get("oom", "").lower() in ("1", "1.0", "true")
    notes = source_notes()
    memory_alone = tells_memory_alone(row, notes)
    source = source_of(row, engine)
    memory = published_memory(row, notes, float(source.get("memory_unit", GIB)))
    if memory_alone and not has_peak(memory):
        raise Unusable(f"row_status {row['row_status']}, and no peak of memory")
    for name, value in source.get("blank", {}).items():
        row[name] = row.get(name) or value
    row |= source.get("instead", {})
    for recipe in source.get("recipes", ()):
        if _runs_recipe(row, recipe):
            row |= recipe.get("instead", {})
    if "after_pp_fix=False" in row.get("notes", "") and (number(row, "pp") or 1) > 1:
        raise Unusable("older pipeline (after_pp_fix=False)")
    model, taken = published_model(row, notes)
    cluster = published_cluster(row, source, notes["gpus"])
    engines, kernels = _engines(row, source, cluster, load)
    usual = {**notes["usual"]["all"], **notes["usual"].get(source["engine"], {}), **source.get("usual", {})}
    choices = usual_choices(row, usual, model, cluster.device)
    taken += tuple(f"{name} {', '.join(values)}" for name, values in choices.items()) + kernels
    return Measurement(
        source=row.get("source_id") or "unnamed",
        sweep=row.get("sweep_id") or "",
        reference=row.get("source_ref", ""),
        line=line,
        model=model,
        cluster=cluster,
        engine=engines[0],
        other_engines=engines[1:],
        layouts=published_layouts(row, choices, model, source.get("stages", "even")),
        step_time_s=None if oom or memory_alone else _step_time(row, model, memory),
        oom=oom,
        taken=taken,
        **memory,
    )


def source_of(row: Mapping[str, str], engine: str | None = None) -> Mapping[str, Any]:
    """The entry of a row's source in `measurements.yaml`.

    An unknown source gets the entry of the longest known name with which its own name begins, or of words in
    its reference and notes. An `engine`, or the cell of that name, has precedence over both.
    """
    notes, name = source_notes(), row.get("source_id", "")
    engine = engine or row.get("engine") or None
    begun = [known for known in notes["sources"] if name == known or name.startswith(f"{known}_")]
    source: Mapping[str, Any] = notes["sources"][max(begun, key=len)] if begun else {}
    if engine is not None:
        if engine not in engine_names() and not is_file_name(engine):
            raise Unusable(f"engine {engine} unknown")
        return {**source, "engine": engine}
    if "engine" in source:
        return source
    # An engine that the notes name comes before other software that notes or reference speak of.
    for said in (
        note_value(row, "engine") or "",
        f"{name} {row.get('source_ref', '')} {row.get('notes', '')}",
    ):
        for word, named in notes["named"].items():
            if word in said.lower():
                return {**source, "engine": named}
    raise Unusable("source unknown: no engine")


def _engines(
    row: Mapping[str, str], source: Mapping[str, Any], cluster: Cluster, load: EngineLoader
) -> tuple[tuple[Engine, ...], tuple[str, ...]]:
    """The engines of a row (several if the attention kernel is not published), and the assumptions behind
    them."""
    changes = dict(source_notes()["unless_said"]) if row.get("moe_experts") not in (None, "", "0") else {}
    changes |= source.get("switches", {})
    if "network" in source:
        changes |= cluster_state(row.get("notes", ""), source["network"], cluster.nodes)
    said = f"{row.get('notes', '')} {row.get('precision', '')}".lower()
    for word, named in source_notes()["features"].items():
        if word in said:
            changes |= {name: value for name, value in named.items() if not isinstance(value, dict)}
            changes |= named.get(cluster.device.architecture, {})
    for recipe in source.get("recipes", ()):
        if _runs_recipe(row, recipe):
            changes |= recipe.get("switches", {})
    kernel = note_value(row, "kernel")
    engine = load(source["engine"])
    if "attention.flash" in changes:
        return (engine.with_constants(changes),), ()
    if kernel is not None and "kernels" in source:
        named = source["kernels"].get(kernel)
        if named is None:
            raise Unusable("attention kernel unknown")
        return (engine.with_constants(changes | named),), ()
    if row.get("flash"):
        return (engine.with_constants(changes | {"attention.flash": switch(row, "flash")}),), ()
    usual = source_notes()["usual"]
    both = usual.get(source["engine"], {}).get("flash", {}).get(cluster.device.architecture, ("1",))
    kinds = [engine.with_constants(changes | {"attention.flash": value == "1"}) for value in both]
    return tuple(kinds), (f"flash {', '.join(both)}",)


def _runs_recipe(row: Mapping[str, str], recipe: Mapping[str, Any]) -> bool:
    """Return whether a recipe of `measurements.yaml` is that of a row: its model, GPU, reference, release."""
    release, model = note_value(row, "release") or "", row.get("model_name", "").lower()
    return (
        model.startswith(tuple(recipe.get("models", ("",))))
        and row.get("gpu", "") in recipe.get("gpus", (row.get("gpu", ""),))
        and recipe.get("reference", "") in row.get("source_ref", "")
        and recipe.get("since", "") <= release
        and ("before" not in recipe or release < recipe["before"])
    )


def _step_time(row: Mapping[str, str], model: ModelSpec, memory: Mapping[str, Any]) -> float | None:
    """Seconds of a step that ran; None if the row publishes only its memory."""
    for name in ("step_time_s", "step_time_derived_s"):
        seconds = number(row, name)
        if seconds is not None and seconds > 0:
            return seconds
    for name in ("tokens_per_s_per_gpu", "tokens_per_s_per_gpu_derived"):
        rate = number(row, name)
        if rate is not None and rate > 0:
            return count(row, "gbs") * model.seq / (rate * count(row, "gpus"))
    if has_peak(memory):
        return None
    raise Unusable("no step time and no throughput")
