"""The nearest job that a software supports instead of a plan, and the price of that job."""

from __future__ import annotations

import tempfile
from pathlib import Path

import yaml

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.pricing import estimate
from costmodels.spec.estimate import Estimate
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.record import GIB, in_seconds
from planner.formats.files import read_files
from planner.formats.writing.export import Export
from planner.formats.writing.model_words import model_parts
from planner.plan import Plan

SUFFIXES = {"megatron": "sh", "mindspeed": "sh", "torchtitan": "sh", "deepspeed": "json"}
"""Endings of files that are not YAML."""


class Inexpressible(InputError):
    """Error: a software does not support a plan. Exit code 5."""

    exit_code = 5


@dataclass(frozen=True)
class Nearest:
    """The job that is written instead of a plan."""

    model: ModelSpec
    layout: Layout
    estimate: Estimate


def check_expressible(export: Export, nearest: bool) -> None:
    """Raise `Inexpressible` where a software does not support a part of a plan, unless `nearest` allows
    it."""
    if export.inexpressible and not nearest:
        parts = "; ".join(export.inexpressible)
        raise Inexpressible(
            f"{export.target} does not support {parts}; nothing is written: --nearest writes the nearest job"
        )


def nearest_job(plan: Plan, export: Export) -> Nearest:
    """The job of an export, read back by this package and priced like the plan.

    Values that the training script decides are taken from the plan. Raises `InputError` where the export is
    contradictory.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, f"config.{SUFFIXES.get(export.target, 'yaml')}")
        file.write_text(export.text, encoding="utf-8")
        files = [file]
        if any(text.startswith("model ") for text in (*export.inexpressible, *export.in_script)):
            files.append(Path(folder, "model.yaml"))
            files[-1].write_text(yaml.safe_dump(plan.model.model_dump(mode="json", exclude_none=True)))
        reading = read_files(files, world_size=plan.layout.world_size)
    if reading.layout is None or reading.model is None:
        reasons = [f"{one.flag}: {one.text}" for one in reading.problems if one.severity != "note"]
        raise InputError(f"{'; '.join(reasons) or 'it says no layout'}")
    layout = reading.layout.model_dump() | {
        text.partition("=")[0]: getattr(plan.layout, text.partition("=")[0])
        for text in export.in_script
        if text.partition("=")[0] in Layout.model_fields
    }
    model = _model(plan, export, reading.model)
    where = model, plan.cluster, plan.engine, Layout.model_validate(layout)
    return Nearest(model, where[3], estimate(*where))


def _model(plan: Plan, export: Export, read: ModelSpec) -> ModelSpec:
    """The plan's model if the export expresses it fully; otherwise the model read back."""
    lost = export.named - {text.partition("=")[0] for text in export.in_script}
    parts = {name.partition(".")[0] for name in model_parts(plan.model)} | {"mtp", "lora"}
    if not {name.partition(".")[0] for name in lost} & parts:
        return plan.model
    changes = {
        name: getattr(plan.model, name)
        for name in ("name", "activation", "router", "other_parameters", "other_layer_parameters")
        if not {one for one in lost if one.partition(".")[0] == name}
    }
    return read.model_copy(update=changes)


def differences(plan: Plan, export: Export) -> str:
    """A sentence on the time and memory of the job that is written, against those of the plan."""
    try:
        job = nearest_job(plan, export)
    except ValueError as error:
        return f"the written job cannot be priced: {error}"
    ours, theirs = plan.estimate, job.estimate
    gained = theirs.step_time_s / ours.step_time_s - 1
    more = (theirs.peak_memory_bytes - ours.peak_memory_bytes) / GIB
    limit = plan.cluster.memory_bytes
    text = (
        f"written job: {job.layout.describe()}; {in_seconds(theirs.step_time_s)} a step, {gained:+.1%} "
        f"against the plan, and {theirs.peak_memory_bytes / GIB:.1f} GiB, {more:+.1f} GiB"
    )
    if theirs.peak_memory_bytes > limit:
        text += f": the job does not fit into {limit / GIB:.1f} GiB"
    return text
