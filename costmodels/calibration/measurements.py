"""Rows of published measurements: what was trained, on what, how it was split, and what was seen.

The columns are those of Megatron's vocabulary in short form (`tp, pp, vpp, dp, cp, ep, sp, mbs, gbs`, ...).
A row that lacks what its price depends on is skipped under the name of what is missing; only what
`measurements.yaml` knows of a whole source fills a blank.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from costmodels.calibration.published_models import MOST, MOST_LAYERS, Unusable, published_model
from costmodels.calibration.published_networks import cluster_state, job_collectives, node_collectives
from costmodels.calibration.published_splits import SPLITS
from costmodels.catalogue import load_device, load_engine
from costmodels.catalogue.yaml_files import catalogue_file
from costmodels.errors import InputError
from costmodels.files import read_text
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Cluster, Device
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.record import GIB

SOURCES = "measurements.yaml"
LARGEST_ROWS = 1 << 30

PRECISIONS = {
    "fp32": "fp32",
    "tf32": "tf32",
    "fp16": "fp16",
    "bf16": "bf16",
    "fp8": "fp8",
    "amp_bf16": "bf16",
    "amp_fp8": "fp8",
    "mxfp8": "fp8",
    "fp8-cs": "fp8",
    "fp8-mx": "fp8",
    "fp8 per-tensor cs": "fp8",
    "fp8 blockwise/mxfp8": "fp8",
    "fp8-cs (fp8-mx)": "fp8",
}
"""Spellings of number formats."""

LARGEST = 1e12
"""Seconds, tokens a second and GiB are less than this, and more than one over it."""

SCHEDULES = {"1F1B": "1f1b", "1F1B-I": "interleaved"}
"""Spellings of schedules in the notes of rows that name one."""


@dataclass(frozen=True)
class Measurement:
    """One usable row."""

    source: str
    sweep: str
    """Rows that may be ranked against each other."""
    reference: str
    """Publication of the row; with `line`, what tells it from others."""
    line: int
    """Line of the file, the header being 1."""
    model: ModelSpec
    cluster: Cluster
    engine: Engine
    layouts: tuple[Layout, ...]
    """The layout; several where the authors tuned what they did not print."""
    step_time_s: float | None
    """None where the row ran out of memory."""
    oom: bool
    allocated_bytes: float | None
    """Peak of tensors (`torch.cuda.max_memory_allocated`)."""
    reserved_bytes: float | None
    """Peak of what the allocator held (`torch.cuda.max_memory_reserved`)."""
    first_rank_only: bool
    """The memory is that of the first pipeline rank, not of the fullest."""
    device_bytes: float | None = None
    """Bytes of the device that the driver said were taken (nvidia-smi)."""
    step_bytes: float | None = None
    """Peak of tensors since the end of the last backward pass."""


def table_groups(measurements: Sequence[Measurement]) -> Iterable[list[int]]:
    """Places of the rows that one table of layouts can hold."""
    groups: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, row in enumerate(measurements):
        records = (row.model, row.cluster, row.engine)
        layout = row.layouts[0]
        key = (*(record.model_dump_json() for record in records), layout.precision, layout.gradient_reduction)
        groups[key].append(place)
    return groups.values()


@cache
def source_notes() -> dict[str, Any]:
    """The contents of `measurements.yaml`."""
    return catalogue_file(SOURCES)


def read_measurements(path: str | Path) -> tuple[list[Measurement], Counter[tuple[str, str]]]:
    """The usable rows of a CSV file, and how many were skipped by (source, reason).

    Raises:
        InputError: the file cannot be read or is no table of measurements.
    """
    try:
        text = read_text(path, LARGEST_ROWS, "utf-8-sig")
        rows = csv.DictReader(io.StringIO(text, newline=""))
        columns = rows.fieldnames
        every = [(rows.line_num, row) for row in rows]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"rows {path}: cannot read them ({error})") from error
    # Without other columns rows are skipped, under the name of what they lack.
    if columns and "source_id" not in columns:
        raise InputError(f"rows {path}: no column source_id; expected a table of measurements")
    measurements: list[Measurement] = []
    skipped: Counter[tuple[str, str]] = Counter()
    for line, row in every:
        source = (row.get("source_id") or "").strip() or "unnamed"
        try:
            measurements.append(measurement_of(row, line))
        except Unusable as reason:
            skipped[source, str(reason)] += 1
    return measurements, skipped


def measurement_of(raw: Mapping[str, str | None], line: int = 0) -> Measurement:
    """One row as a `Measurement`; raises `Unusable` with the reason when it cannot be one."""
    row = {name: (value or "").strip() for name, value in raw.items() if isinstance(name, str)}
    status = row.get("row_status", "")
    if status not in ("ok", "oom"):
        raise Unusable(f"row_status {status or 'blank'}")
    source = source_notes()["sources"].get(row.get("source_id", "")) or _by_name(row)
    for name, value in source.get("blank", {}).items():
        row[name] = row.get(name) or value
    row |= source.get("instead", {})
    if "after_pp_fix=False" in row.get("notes", "") and _count(row, "pp") > 1:
        raise Unusable("older pipeline (after_pp_fix=False)")
    model = published_model(row, source_notes())
    cluster = _cluster(row, source)
    oom = status == "oom" or row.get("oom") == "1"
    return Measurement(
        source=row.get("source_id") or "unnamed",
        sweep=row.get("sweep_id") or "",
        reference=row.get("source_ref", ""),
        line=line,
        model=model,
        cluster=cluster,
        engine=_engine(row, source, cluster.nodes),
        layouts=_layouts(row, source, model),
        step_time_s=None if oom else _step_time(row, model),
        oom=oom,
        **_memory(row),
    )


def _by_name(row: Mapping[str, str]) -> Mapping[str, Any]:
    """What is known of a row of another source, whose reference or notes name the engine that ran."""
    said = f"{row.get('source_ref', '')} {row.get('notes', '')}".lower()
    for word, engine in source_notes()["named"].items():
        if word in said:
            return {"engine": engine}
    raise Unusable("source unknown: no engine")


def _number(row: Mapping[str, str], name: str) -> float | None:
    text = row.get(name, "")
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise Unusable(f"{name} is no number") from None
    if value != value:
        return None  # How other programs write a blank.
    if value and not 1 / LARGEST < abs(value) < LARGEST:
        raise Unusable(f"{name} is out of range")
    return value


def _count(row: Mapping[str, str], name: str, otherwise: int | None = None) -> int:
    value = _number(row, name)
    if value is None:
        if otherwise is None:
            raise Unusable(f"{name} not published")
        return otherwise
    if not 1 <= value <= MOST or value != int(value):
        raise Unusable(f"{name} is no whole number of 1 to {MOST}")
    return int(value)


def _switch(row: Mapping[str, str], name: str) -> bool:
    text = row.get(name, "").lower()
    if text in ("1", "1.0", "true"):
        return True
    if text in ("0", "0.0", "false"):
        return False
    raise Unusable(f"{name} not published")


def _cluster(row: Mapping[str, str], source: Mapping[str, Any]) -> Cluster:
    named = source_notes()["gpus"].get(row.get("gpu", ""))
    if named is None:
        raise Unusable("gpu unknown" if row.get("gpu") else "gpu not published")
    device = _device(named) if isinstance(named, str) else _changed(named)
    world, per_node = _count(row, "gpus"), _count(row, "gpus_per_node")
    values: dict[str, Any] = {
        "device": device,
        "world_size": world,
        "devices_per_node": min(world, per_node),
        "memory_bytes": device.memory_bytes,
        "island": source.get("island", {}).get(row["gpu"]),
    }
    if "inter_node_bandwidth" in source:
        link = device.inter_node.model_copy(update={"bandwidth": float(source["inter_node_bandwidth"])})
        values["inter_node"] = link
    try:
        cluster = Cluster(**values)
    except ValidationError:
        raise Unusable("gpus is no multiple of gpus_per_node") from None
    if "network" in source:
        seen = job_collectives(row.get("notes", ""), source["network"], world, cluster.nodes)
    else:
        seen = node_collectives(source.get("bus_bandwidth", {}))
    return cluster.model_copy(update={"measured": seen})


@cache
def _device(name: str) -> Device:
    return load_device(name)


def _changed(named: Mapping[str, Any]) -> Device:
    changes = {field: value for field, value in named.items() if field != "name"}
    return _device(named["name"]).model_copy(update=changes)


def _engine(row: Mapping[str, str], source: Mapping[str, Any], nodes: int) -> Engine:
    changes = dict(source.get("switches", {}))
    if "network" in source:
        changes |= cluster_state(row.get("notes", ""), source["network"], nodes)
    kernel = re.search(r"kernel=([^;]*)", row.get("notes", ""))
    if kernel is not None and "kernels" in source:
        named = source["kernels"].get(kernel[1].strip())
        if named is None:
            raise Unusable("attention kernel unknown")
        changes |= named
    else:
        changes["attention.flash"] = _switch(row, "flash")
    return _load_engine(source["engine"]).with_constants(changes)


@cache
def _load_engine(name: str) -> Engine:
    return load_engine(name)


def _layouts(row: Mapping[str, str], source: Mapping[str, Any], model: ModelSpec) -> tuple[Layout, ...]:
    choices: list[dict[str, str]] = [dict(row)]
    for name, values in source.get("tuned", {}).items():
        if not row.get(name):
            choices = [{**chosen, name: value} for chosen in choices for value in values]
    layouts, reasons = [], []
    for chosen in choices:
        try:
            layouts.append(_layout(chosen, model, source.get("stages", "even")))
        except Unusable as reason:
            reasons.append(reason)
    if not layouts:
        raise reasons[0]
    return tuple(layouts)


def _layout(row: Mapping[str, str], model: ModelSpec, stages: str) -> Layout:
    tp, pp = _count(row, "tp"), _count(row, "pp")
    gpus, dp, cp = _count(row, "gpus"), _number(row, "dp"), _number(row, "cp")
    if dp is None and cp is None:
        raise Unusable("dp and cp not published")
    if any(degree is not None and degree < 1 for degree in (dp, cp)):
        raise Unusable("tp x pp x cp x dp is not gpus")
    # One of the two follows from the others.
    cp = gpus / (tp * pp * dp) if cp is None and dp is not None else cp
    dp = gpus / (tp * pp * cp) if dp is None and cp is not None else dp
    if cp is None or dp is None or tp * pp * cp * dp != gpus or cp != int(cp) or dp != int(dp):
        raise Unusable("tp x pp x cp x dp is not gpus")
    ep = _count(row, "ep", None if model.experts else 1)
    # A source that names plain 1F1B has one chunk a device.
    plain = pp == 1 or _named_schedule(row) == "1F1B"
    vpp = 1 if plain and not row.get("vpp") else _count(row, "vpp")
    recompute = row.get("recompute", "")
    modules: tuple[str, ...] = ()
    if recompute == "norm+activation":
        recompute, modules = "selective", ("norm", "activation")
    if recompute not in ("none", "selective", "full"):
        raise Unusable("recompute not published" if not recompute else "recompute of a kind not modelled")
    mbs, gbs = _count(row, "mbs"), _count(row, "gbs")
    if pp * vpp > MOST_LAYERS:
        raise Unusable("more stages than layers")
    zero, replicas = _zero(row, int(dp * cp))
    layout: dict[str, Any] = {
        "tensor_parallel": tp,
        "sequence_parallel": tp > 1 and _switch(row, "sp"),
        "pipeline_parallel": pp,
        "virtual_pipeline_parallel": vpp,
        "context_parallel": int(cp),
        # Megatron-Core's default of --cp-comm-type is p2p; all rows with context parallelism ran it.
        "context_parallel_form": "ring" if cp > 1 else "all_gather",
        "expert_parallel": ep,
        "expert_tensor_parallel": _expert_tensor_parallel(row, tp, int(tp * cp * dp)) if model.experts else 1,
        "data_parallel": int(dp),
        "zero_stage": zero,
        "zero_replicas": replicas,
        "schedule": _schedule(row, vpp),
        "micro_batch_size": mbs,
        "global_batch_size": gbs,
        "recompute": recompute,
        "recompute_modules": modules,
        "precision": _precision(row),
        "layers_per_stage": [1] * (pp * vpp),
    }
    split = SPLITS[stages](model, pp * vpp)
    try:
        checked = Layout(**layout)
    except ValidationError as error:
        first = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise Unusable(f"layout not legal: {re.sub('[0-9]+', '#', first)}") from None
    # Other engines may leave a stage without layers, which a layout of ours may not.
    return checked.model_copy(update={"layers_per_stage": split})


def _expert_tensor_parallel(row: Mapping[str, str], tp: int, stage: int) -> int:
    """Printed in the notes of folded layouts; otherwise Megatron-Core's default, the tensor-parallel group,
    where that is possible on the `stage` devices of a pipeline stage."""
    printed = re.search(r"\bETP=(\d{1,9})", row.get("notes", ""))
    if printed:
        return int(printed[1])
    whole = "FSDP" in row.get("zero_stage", "") or stage % (_count(row, "ep") * tp) > 0
    return 1 if whole else tp


def _schedule(row: Mapping[str, str], vpp: int) -> str:
    named = _named_schedule(row)
    if named is not None and named not in SCHEDULES:
        raise Unusable(f"schedule {named} not modelled")
    return "interleaved" if vpp > 1 else "1f1b"


def _named_schedule(row: Mapping[str, str]) -> str | None:
    named = re.search(r"schedule=([^;]*)", row.get("notes", ""))
    return None if named is None else named[1].strip()


def _precision(row: Mapping[str, str]) -> str:
    text = row.get("precision", "").lower()
    if not text:
        raise Unusable("precision not published")
    if text not in PRECISIONS:
        raise Unusable(f"precision {text} not modelled")
    return PRECISIONS[text]


def _zero(row: Mapping[str, str], ranks: int) -> tuple[int, int]:
    """ZeRO's stage, and the copies of what it splits, among `ranks` data- and context-parallel ranks."""
    text = row.get("zero_stage", "").lower()
    if not text:
        raise Unusable("zero_stage not published")
    sharded = re.search(r"fsdp=(\d{1,9})", text)
    number = re.search(r"\d", re.sub(r"fsdp\d*(=\d+)?", "", text))
    stage = int(number[0]) if number else 3 if "fsdp" in text else 0
    if ranks == 1:
        return 0, 1
    shards = int(sharded[1]) if sharded else ranks
    if not shards or ranks % shards:
        raise Unusable("ZeRO's shards do not divide the data-parallel ranks")
    return min(stage, 3), ranks // shards if stage else 1


def _step_time(row: Mapping[str, str], model: ModelSpec) -> float:
    for name in ("step_time_s", "step_time_derived_s"):
        seconds = _number(row, name)
        if seconds is not None and seconds > 0:
            return seconds
    rate = _number(row, "tokens_per_s_per_gpu")
    if rate is None or rate <= 0:
        raise Unusable("no step time and no throughput")
    return _count(row, "gbs") * model.seq / (rate * _count(row, "gpus"))


def _memory(row: Mapping[str, str]) -> dict[str, Any]:
    kind = row.get("mem_kind", "").lower()
    peak, reserved = _number(row, "peak_mem_gib"), _number(row, "peak_reserved_gib")
    if min(peak or 0.0, reserved or 0.0) < 0:
        raise Unusable("peak memory is out of range")
    if "reserved" in kind and "allocated" not in kind:
        peak, reserved = None, reserved or peak
    device = None
    if "nvidia-smi" in kind:
        peak, device = None, peak
    # nanotron logs the peak since it cleared the statistics, which it does after backward.
    step = re.search(r"\bstates_alloc_gib=(\d{1,6}(?:\.\d{1,9})?)", row.get("notes", ""))
    return {
        "allocated_bytes": None if peak is None else peak * GIB,
        "reserved_bytes": None if reserved is None else reserved * GIB,
        "device_bytes": None if device is None else device * GIB,
        "step_bytes": None if step is None else float(step[1]) * GIB,
        "first_rank_only": "rank0" in kind,
    }
