"""Closed forms and dry runs of memory against peaks that PyTorch's allocator counted on a real GPU.

python -m benchmarks.memory_h100 --rows bundled_h100.csv [--json]

Rows are steps of this package's runtime, in the columns of `benchmarks.calibration.measurements`: a catalogue
model cut to some layers, on one device. They were measured under PyTorch 2.11, before the output matrix and
the loss became one operation over chunks of tokens, and before layers with experts became one graph. The
traced layers and loss are those of that version. Closed forms describe today's runtime; the bytes that it has
saved since then are added.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple
from unittest.mock import patch

import torch
import typer
from torch import Tensor

from costmodels import Cluster, Layout, ModelSpec
from costmodels.catalogue import load_device, load_engine, load_model
from costmodels.errors import InputError
from costmodels.pricing import price
from costmodels.pytorch import full_version
from costmodels.spec.record import GIB
from costmodels.spec.table import LayoutTable
from planner.options.flags import run
from runtime.dryrun.course import BUILD
from runtime.dryrun.memory_trace import CATEGORIES
from runtime.dryrun.run import trace
from runtime.parallel import loss
from runtime.train import stages

MOMENTS_SHARE = 8 / 12
"""Share of Adam's state in mixed precision that the first update allocates; the rest is the fp32 weights."""


class Row(NamedTuple):
    """One measured step."""

    model: ModelSpec
    layout: Layout
    device: str
    version: str
    """The version of PyTorch, such as "2.11"."""
    allocated: float
    """Bytes of tensors at the peak."""

    @property
    def skips(self) -> bool:
        """True if the measured steps updated nothing, so that the optimizer had no state.

        The runtime's loss scale in fp16 then began at 2^32, which makes the first 19 steps overflow.
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


class _WholeLogits(torch.autograd.Function):
    """The loss of that version: logits of all tokens at once, kept in fp32 for backward."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, weight_VD: Tensor) -> Tensor:
        logits_TV = x_TD @ weight_VD.t()
        ctx.scores = torch.empty_like(logits_TV, dtype=torch.float32)
        ctx.save_for_backward(x_TD, weight_VD)
        return x_TD.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x_TD, weight_VD = ctx.saved_tensors
        gradient_TV = torch.empty_like(ctx.scores, dtype=x_TD.dtype)
        ctx.scores = None
        return gradient_TV @ weight_VD, gradient_TV.t() @ x_TD


@contextmanager
def code_of_then() -> Iterator[None]:
    """Context in which the runtime allocates memory as it did when the rows were measured."""

    def whole(x_BSD: Tensor, weight_VD: Tensor, *_: Any) -> Tensor:
        found: Tensor = _WholeLogits.apply(x_BSD.flatten(0, 1), weight_VD)  # type: ignore[no-untyped-call]
        return found

    with patch.object(loss, "head_loss", whole), patch.object(stages, "_is_whole", lambda *_: False):
        yield


def estimated_bytes(row: Row) -> float:
    """Bytes of tensors at the peak of a step of the row, by the closed forms."""
    device = load_device(row.device)
    cluster = Cluster(device=device, world_size=1, devices_per_node=1, memory_bytes=device.memory_bytes)
    memory = price(row.model, cluster, load_engine("bundled"), LayoutTable.of([row.layout])).memory
    held = sum(float(memory[name][0]) for name in CATEGORIES)
    return held - row.skips * float(memory["optimizer"][0]) * MOMENTS_SHARE


def traced_bytes(row: Row) -> float:
    """The bytes of a row by a dry run, with the libraries' workspaces."""
    found = trace(row.model, row.layout, compiled=True)
    steps = (moment for label, moment in found.moments.items() if label != BUILD)
    peak = max(moment.total - row.skips * moment.allocated["optimizer"] for moment in steps)
    engine = load_engine("bundled").for_device(load_device(row.device))
    return peak + engine.allocator.workspace_bytes


def memory_h100(
    rows: Annotated[Path, typer.Option(help="CSV file of measured steps of the runtime.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compare estimated and traced peaks with measured ones."""
    try:
        with rows.open(encoding="utf-8") as file:
            every = [row_of(raw) for raw in csv.DictReader(file)]
    except OSError as error:
        raise InputError(f"--rows {rows}: {error.strerror}") from None
    except KeyError as error:
        raise InputError(f"--rows {rows}: no column {error.args[0]}") from None
    found = []
    for row in every:
        now = traced_bytes(row)
        with code_of_then():
            then = traced_bytes(row)
        one: dict[str, Any] = {
            "model": f"{row.model.name}, {row.model.layers} layers, seq {row.model.seq}",
            "layout": f"{row.layout.describe()} {row.layout.precision} {row.layout.optimizer}",
            "skips_updates": row.skips,
            "allocated": row.allocated,
            "now": now,
            "estimated": estimated_bytes(row) + then - now,
            "traced": then,
        }
        found.append(one)
        if not as_json:
            print(line(one), flush=True)
    if as_json:
        print(json.dumps({"torch": full_version(), "rows": found}, indent=2))
        return
    print(f"PyTorch {full_version()}, {len(found)} rows; sizes of the errors:")
    for name in ("estimated", "traced"):
        errors = [abs(one[name] / one["allocated"] - 1) for one in found]
        print(f"{name}: median {statistics.median(errors):.2%}, at most {max(errors):.2%}")


def line(one: Mapping[str, Any]) -> str:
    """A row as text."""
    name = f"{one['model']}: {one['layout']}: measured {one['allocated'] / GIB:.3f} GiB"
    name += " (steps that updated nothing)" * one["skips_updates"]
    figures = (
        f"{figure} {one[figure] / GIB:.3f} ({one[figure] / one['allocated'] - 1:+.2%})"
        for figure in ("estimated", "traced")
    )
    return f"{name}, {', '.join(figures)}; {one['now'] / GIB:.3f} now"


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(memory_h100)
    run(app, "benchmarks.memory_h100")
