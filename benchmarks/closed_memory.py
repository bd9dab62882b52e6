"""Closed forms of memory, by which the search ranks all layouts, against dry runs of the runtime.

python -m benchmarks.closed_memory [--rows N] [--solved N] [--seed S] [--minutes M] [--only JOB]...
    [--save FILE] [--write]
python -m benchmarks.closed_memory --load FILE [--load FILE]...     # dry runs that --save has kept

A row is appended to the file of --save as soon as it is traced. The same command with the same file traces
what is not there.

Legal layouts are drawn from the searches of some jobs, whether they fit or not. Compared are bytes of tensors
on the fullest pipeline rank, of the two that are the fullest by closed forms. `--solved` adds layouts that
searches solve: recomputation of some layers, and unequal stages. They are first plans of random jobs.

Decisions are counted at memory limits between 80 and 120 % of the bytes of a layout, all equally likely.
Admitted are layouts whose upper end fits and whose dry run does not; rejected are those the other way round.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
import yaml

import costmodels.catalogue
from benchmarks.calibrate_memory import HEADER
from benchmarks.first_plans import SHOWN, Asked, jobs, searched
from costmodels import Layout, ModelSpec
from costmodels.catalogue.yaml_files import catalogue_file
from costmodels.errors import InputError
from costmodels.memory.ranges import KINDS, kinds_of_model, kinds_of_rows
from costmodels.rank_costs import RankCosts
from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.spec.table import Floats, LayoutTable
from planner import SearchResult, search
from planner.inputs.model import resolve_model
from planner.options.flags import run
from planner.problem import Problem
from runtime.dryrun.memory_trace import CATEGORIES
from runtime.processes.pools import spawn_context

TARGET = Path(costmodels.catalogue.__file__).with_name("calibrated_memory.yaml")


class Job(NamedTuple):
    """A model and its devices, from which layouts are drawn."""

    model: str
    world_size: int
    device: str
    batch: int
    """The largest global batch."""
    pins: tuple[str, ...] = ()
    fields: Mapping[str, Any] = {}
    """Fields of the model that replace those of the catalogue."""

    def spec(self) -> ModelSpec:
        """The model."""
        known = resolve_model(self.model).model_dump()
        router = {**known["router"], **self.fields.get("router", {})}
        return ModelSpec.model_validate({**known, **self.fields, "router": router})


LORA = {"rank": 16, "alpha": 32.0}

USUAL = {
    "gpt2-xl": Job("gpt2-xl", 8, "a100-80g", 64),
    "gpt3-13b": Job("gpt3-13b", 32, "h100", 64),
    "llama2-7b": Job("llama2-7b", 8, "a100-80g", 64),
    "llama3-8b": Job("llama3-8b", 64, "h100", 128),
    "llama2-70b": Job("llama2-70b", 64, "a100-80g", 128),
    "llama3-70b": Job("llama3-70b", 128, "h100", 256),
    "qwen3-8b": Job("qwen3-8b", 32, "h100", 128),
    "mixtral-8x7b": Job("mixtral-8x7b", 32, "h100", 128),
    "qwen3-30b-a3b": Job("qwen3-30b-a3b", 16, "h100", 64),
    "qwen1.5-moe-a2.7b": Job("qwen1.5-moe-a2.7b", 8, "h100", 32),
    "deepseek-v2-lite": Job("deepseek-v2-lite", 16, "h100", 64),
    "gpt-oss-20b": Job("gpt-oss-20b", 8, "h100", 32),
    "gemma-3-12b": Job("gemma-3-12b", 8, "h100", 32),
    "zero 3 with experts": Job("qwen3-30b-a3b", 16, "h100", 32, ("zero=3",)),
}
"""Kinds of most jobs."""

OTHERS = {
    "further tokens": Job("deepseek-v3", 32, "h100", 64, (), {"mtp": {"depths": 1}}),
    "linear attention": Job("qwen3-next-80b-a3b", 16, "h100", 32),
    "capped scores": Job("gemma-2-9b", 8, "h100", 32),
    "fp8 rowwise": Job("qwen3-8b", 8, "h100", 32, ("precision=fp8", "fp8_recipe=rowwise")),
    "fp8 tensorwise": Job("llama3-8b", 8, "h100", 32, ("precision=fp8",)),
    "fp32": Job("gpt2-xl", 8, "a100-80g", 32, ("precision=fp32",)),
    "muon": Job("llama3-8b", 8, "h100", 32, ("optimizer=muon",)),
    "adam8bit": Job("llama3-8b", 8, "h100", 32, ("optimizer=adam8bit",)),
    "adafactor": Job("llama3-8b", 8, "h100", 32, ("optimizer=adafactor",)),
    "offloaded optimizer": Job("llama3-8b", 8, "h100", 32, ("offload_optimizer=true",)),
    "offloaded activations": Job("qwen3-8b", 8, "h100", 32, ("offload_activations=true",)),
    "lora": Job("llama3-8b", 8, "h100", 32, (), {"lora": LORA}),
    "qlora": Job("llama3-8b", 8, "h100", 32, (), {"lora": {**LORA, "quantize_base": "nf4"}}),
    "capacity": Job("mixtral-8x7b", 16, "h100", 32, (), {"router": {"capacity_factor": 1.0}}),
    "block": Job(
        "llama3-8b", 8, "h100", 32, ("recompute=full", "recompute_method=block", "recompute_num_layers=2")
    ),
    "graphs": Job("qwen3-0.6b", 8, "h100", 32, ("cuda_graphs=true",)),
}
"""Other kinds, a job each."""

JOBS = {**USUAL, **OTHERS}

SOLVED = "solved"
"""The kind of layouts that a search solves."""

APART = (*OTHERS, SOLVED)
"""Kinds that are not among the usual ones."""

SOLVED_OF_ONE = 2
"""Solved layouts that are drawn from one random job."""

NEAR = 0.2
"""The largest relative distance of a memory limit from the bytes that a layout takes."""

COVERED = 0.9
"""Share of dry runs that the upper end of their kind's range must cover."""

FEW = 12
"""Fewest layouts of a kind to which a range is fitted."""


class Drawn(NamedTuple):
    """One layout of a job."""

    job: str
    model: ModelSpec
    layout: Layout
    closed: float
    """Bytes of tensors by closed forms, with the workspaces of libraries."""
    doubt: float
    """Half the width of their range, in bytes."""
    workspace: float
    ranks: tuple[int, ...]
    """Pipeline ranks that may be the fullest."""
    parts: tuple[dict[str, float], ...]
    """Bytes of tensors of each of them by category, by closed forms."""


class Compared(NamedTuple):
    """Closed forms of one layout beside its dry run."""

    drawn: Drawn
    traced_parts: tuple[dict[str, float], ...]
    """Bytes of tensors of each of its ranks by category, with the workspaces of libraries."""

    @property
    def traced(self) -> float:
        """Bytes of tensors of the fullest of its ranks."""
        return max(sum(parts.values()) for parts in self.traced_parts)

    @property
    def error(self) -> float:
        """The closed form less the dry run, as a share of the latter."""
        return self.drawn.closed / self.traced - 1

    @property
    def upper(self) -> float:
        """The relative error of the upper end of the range."""
        return (self.drawn.closed + self.drawn.doubt) / self.traced - 1


def job_of(name: str) -> Job:
    """The job of a name: one of `JOBS`, or "solved:MODEL:WORLD SIZE:DEVICE:BATCH"."""
    if name in JOBS:
        return JOBS[name]
    _, model, world_size, device, batch = name.split(":")
    return Job(model, int(world_size), device, int(batch))


def drawn_solved(count: int, seed: int) -> Iterator[Drawn]:
    """Layouts that searches solve, from the first plans of random jobs."""
    chosen = random.Random(seed)
    found = (one for job in jobs(seed) for one in _solved(job, chosen))
    return islice(found, count)


def _solved(job: Asked, chosen: random.Random) -> list[Drawn]:
    result = searched(job)
    if result is None:
        return []
    layouts = [plan.layout for plan in result.plans(SHOWN) if _is_solved(plan.layout)]
    name = f"{SOLVED}:{job.model}:{job.world_size}:{job.device}:{job.batch}"
    some = chosen.sample(layouts, min(SOLVED_OF_ONE, len(layouts)))
    return [_drawn(name, result.problem, LayoutTable.of([layout]), 0) for layout in some]


def _is_solved(layout: Layout) -> bool:
    """True if a layout recomputes some of its layers, or its stages are unequal."""
    return layout.recompute_method == "block" or len(set(layout.layers_per_stage)) > 1


def _search(name: str, pins: Sequence[str] = ()) -> SearchResult:
    """All layouts of a job, whether they fit or not."""
    job = job_of(name)
    return search(
        job.spec(),
        world_size=job.world_size,
        device=job.device,
        max_global_batch_size=job.batch,
        pin=[*job.pins, *pins],
        device_memory_gib=4000.0,
    )


def drawn_layouts(name: str, rows: int, rng: np.random.Generator) -> list[Drawn]:
    """Some layouts of a job."""
    result = _search(name)
    chosen = result.table.take(rng.permutation(len(result.table))[:rows])
    return [_drawn(name, result.problem, chosen, row) for row in range(len(chosen))]


def _drawn(name: str, problem: Problem, table: LayoutTable, row: int) -> Drawn:
    layout = table.layout(row)
    memory = RankCosts.of_all(problem.model, problem.cluster, problem.engine, table, row).memory
    shape = 1, layout.pipeline_parallel
    each = {part: np.broadcast_to(memory[part], shape)[0] for part in CATEGORIES}
    tensors: Floats = sum(each.values(), np.zeros(()))
    fullest = np.argsort(-tensors)[:2].tolist()
    engine = problem.engine.for_device(problem.cluster.device)
    ranks = tuple(sorted(fullest))
    return Drawn(
        job=name,
        model=problem.model,
        layout=layout,
        closed=float(tensors.max()),
        doubt=float(np.broadcast_to(memory["doubt"], shape)[0][fullest[0]]),
        workspace=engine.allocator.workspace_bytes,
        ranks=ranks,
        parts=tuple({part: float(some[rank]) for part, some in each.items()} for rank in ranks),
    )


def traced_parts(drawn: Drawn) -> tuple[dict[str, float], ...]:
    """Bytes of the ranks of a layout by category, at the peaks of their dry runs."""
    # Only here: it takes seconds, and the processes that draw do without.
    from runtime.dryrun.run import trace

    compiled = drawn.layout.schedule not in SPLIT_BACKWARD
    peaks = []
    for rank in drawn.ranks:
        peak = trace(drawn.model, drawn.layout, pipeline_rank=rank, compiled=compiled).peak
        parts: dict[str, float] = dict(peak.allocated)
        peaks.append(parts | {"temporaries": parts.get("temporaries", 0) + drawn.workspace})
    return tuple(peaks)


def row_of(one: Compared) -> dict[str, Any]:
    """A row of a layout: closed forms and dry runs of each rank by category."""
    return {
        "job": one.drawn.job,
        "layout": one.drawn.layout.describe(),
        "error": one.error,
        "range": one.drawn.doubt / one.drawn.closed,
        "ranks": one.drawn.ranks,
        "closed": one.drawn.parts,
        "dry_run": one.traced_parts,
        "fields": one.drawn.layout.model_dump(mode="json"),
    }


def refused_row(drawn: Drawn, why: str) -> dict[str, Any]:
    """The row of a layout that the runtime refuses."""
    fields = drawn.layout.model_dump(mode="json")
    return {"job": drawn.job, "layout": drawn.layout.describe(), "refused": why, "fields": fields}


def append_row(file: Path, row: Mapping[str, Any]) -> None:
    """Add a JSON object to the lines of a file."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(row) + "\n")


def known_rows(file: Path) -> list[dict[str, Any]]:
    """The rows already in a file."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def compared(
    every: Sequence[Drawn], processes: int, minutes: float, save: Path | None = None
) -> Iterator[Compared]:
    """Trace layouts for this many minutes; layouts that the runtime refuses are listed.

    Each is appended to the file `save` at once.
    """
    end = time.monotonic() + 60 * minutes
    with ProcessPoolExecutor(processes, mp_context=spawn_context()) as pool:
        futures = {pool.submit(traced_parts, one): one for one in every}
        for number, future in enumerate(as_completed(futures), start=1):
            if future.cancelled():
                continue
            try:
                one = Compared(futures[future], future.result())
            except (InputError, RuntimeError, NotImplementedError) as error:
                print(f"{futures[future].layout.describe()}: {error}", file=sys.stderr)
                row = refused_row(futures[future], str(error))
            else:
                row = row_of(one)
                yield one
            if save is not None:
                append_row(save, row)
            if number % 20 == 0:
                print(f"{number} of {len(every)} layouts", file=sys.stderr)
            if time.monotonic() > end:
                for other in futures:
                    other.cancel()


def loaded(file: Path) -> Iterator[Compared]:
    """Dry runs that `append_row` has written, beside the closed forms of today."""
    problems: dict[str, Problem] = {}
    for row in known_rows(file):
        if "refused" in row:
            continue
        name = row["job"]
        if name not in problems:
            problems[name] = _search(name, ("tp=1", "pp=1")).problem
        drawn = _drawn(name, problems[name], LayoutTable.of([Layout.model_validate(row["fields"])]), 0)
        yield Compared(drawn, tuple(row["dry_run"]))


def kinds_of(one: Compared) -> Iterator[str]:
    """The kinds of a layout, as rows of the table."""
    layout, model = one.drawn.layout, one.drawn.model
    kind = one.drawn.job.partition(":")[0]
    if kind in APART:
        yield kind
        return
    yield "all usual"
    yield "experts" if model.experts else "dense"
    yield f"recompute {layout.recompute}"
    yield f"zero {layout.zero_stage}" if layout.data_parallel * layout.context_parallel > 1 else "one replica"
    yield "no pipeline" if layout.pipeline_parallel == 1 else f"schedule {layout.schedule}"
    if layout.tensor_parallel > 1:
        yield "sequence parallel" if layout.sequence_parallel else "tensor parallel"
    if layout.context_parallel > 1:
        yield f"context {layout.context_parallel_form}"


def by_kind(every: Sequence[Compared]) -> list[dict[str, Any]]:
    """Errors of each kind, that of all usual ones first."""
    kinds: defaultdict[str, list[Compared]] = defaultdict(list)
    for one in every:
        for kind in kinds_of(one):
            kinds[kind].append(one)
    order = sorted(kinds, key=lambda kind: (kind != "all usual", kind in APART, kind))
    return [_row(kind, kinds[kind]) for kind in order]


def _row(kind: str, some: Sequence[Compared]) -> dict[str, Any]:
    error, upper = (np.array([getattr(one, name) for one in some]) for name in ("error", "upper"))
    size = np.abs(error)
    return {
        "kind": kind,
        "layouts": len(some),
        "median": float(np.median(size)),
        "mean": float(size.mean()),
        "p98": float(np.quantile(size, 0.98)),
        "within_5": float(np.mean(size <= 0.05)),
        "too_low": float(np.mean(error < -0.03)),
        "range": float(np.mean([one.drawn.doubt / one.drawn.closed for one in some])),
        "covered": float(np.mean(upper >= 0)),
        "admitted": float(np.clip(-upper, 0, NEAR).mean() / (2 * NEAR)),
        "rejected": float(np.clip(upper, 0, NEAR).mean() / (2 * NEAR)),
    }


def fitted_ranges(every: Sequence[Compared]) -> dict[str, float]:
    """Half widths of the kinds of `costmodels.memory.ranges` that have enough layouts, the usual one first.

    The width of a kind is what its layouts need in addition to the usual width.
    """
    errors: defaultdict[str, list[float]] = defaultdict(list)
    for one in every:
        table = LayoutTable.of([one.drawn.layout])
        rows = kinds_of_rows(table, one.drawn.model.experts > 0)
        held = kinds_of_model(one.drawn.model) | {kind: bool(some[0]) for kind, some in rows.items()}
        own = [kind for kind in KINDS if held[kind] and kind != "usual"]
        for kind in own or ["usual"]:
            errors[kind].append(one.error)
    enough = {kind: np.array(some) for kind, some in errors.items() if len(some) >= FEW}
    return {kind: round(max(float(np.quantile(-some, COVERED)), 0.0), 3) for kind, some in enough.items()}


def write_ranges(widths: Mapping[str, float], rows: int) -> None:
    """Write half widths into the catalogue; kinds that are not fitted keep theirs."""
    entries = dict(catalogue_file(TARGET.name)["engines"])
    known = entries["bundled"]["constants"]
    fitted = {f"memory_range.{kind}": width for kind, width in widths.items()}
    entries["bundled"] = {"constants": known | fitted, "rows": rows, "sources": ["closed_memory"]}
    TARGET.write_text(HEADER + yaml.safe_dump({"engines": entries}, width=110), encoding="utf-8")


def closed_memory(
    rows: Annotated[int, typer.Option(min=0, help="Layouts of all jobs together.")] = 150,
    solved: Annotated[int, typer.Option(min=0, help="Further layouts, which searches solve.")] = 0,
    seed: Annotated[int, typer.Option(help="Of their random choice.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="A job; all unless given. Repeatable.")] = None,
    processes: Annotated[int, typer.Option(min=1, help="Dry runs at a time.")] = 2,
    minutes: Annotated[float, typer.Option(min=0, help="After these no other layout is begun.")] = 120.0,
    save: Annotated[
        Path | None, typer.Option(help="Append each layout's bytes there; take what is there.")
    ] = None,
    load: Annotated[list[Path] | None, typer.Option(help="Take these dry runs, and make none.")] = None,
    write: Annotated[bool, typer.Option("--write", help=f"Write ranges into {TARGET.name}.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the errors of closed forms by kind of layout."""
    names = list(only or JOBS) if not load else []
    if unknown := [name for name in names if name not in JOBS]:
        raise InputError(f"--only {unknown[0]}: no such job; the jobs are {', '.join(JOBS)}")
    rng = np.random.default_rng(seed)
    began = time.monotonic()
    drawn = [one for name in names for one in drawn_layouts(name, -(-rows // len(names)), rng)]
    order = rng.permutation(len(drawn))[:rows]
    known = known_rows(save) if save is not None and save.exists() else []
    held = {(row["job"], Layout.model_validate(row["fields"])) for row in known}
    files = [*(load or ()), *([save] if known and save is not None else [])]
    every = [one for file in files for one in loaded(file)]
    chosen = [*(drawn[place] for place in order), *drawn_solved(0 if load else solved, seed)]
    missing = [one for one in chosen if (one.job, one.layout) not in held]
    every += compared(missing, processes, minutes, save)
    table, widths = by_kind(every), fitted_ranges(every)
    if write:
        write_ranges(widths, len(every))
    if as_json:
        print(json.dumps({"layouts": len(every), "kinds": table, "ranges": widths}, indent=2))
        return
    took = (time.monotonic() - began) / 60
    jobs = len({one.drawn.job for one in every})
    source = "loaded" if load else f"seed {seed}, {took:.0f} minutes"
    print(f"{len(every)} layouts of {jobs} jobs, {source}")
    print(
        f"{'kind':22} {'layouts':>7} {'median':>7} {'mean':>6} {'p98':>6} {'in 5 %':>7} {'< -3 %':>7} "
        f"{'range':>6} {'below':>6} {'admitted':>8} {'rejected':>8}"
    )
    for one in table:
        print(
            f"{one['kind']:22} {one['layouts']:7} {one['median']:7.1%} {one['mean']:6.1%} {one['p98']:6.1%} "
            f"{one['within_5']:7.0%} {one['too_low']:7.0%} {one['range']:6.1%} {one['covered']:6.0%} "
            f"{one['admitted']:8.2%} {one['rejected']:8.2%}"
        )
    print("half widths: " + ", ".join(f"{kind} {width:.1%}" for kind, width in widths.items()))


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(closed_memory)
    run(app, "benchmarks.closed_memory")
