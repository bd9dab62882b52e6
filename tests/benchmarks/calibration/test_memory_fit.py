"""Fits of memory constants: known ones come back, from peaks and from which jobs ran out of memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

from benchmarks.calibration.measurements import Measurement, measurement_of, read_measurements
from benchmarks.calibration.memory_fit import MemoryFitPlan, fit_memory, has_memory, memory_fit_plans
from benchmarks.calibration.memory_peaks import MEMORY_KINDS, predicted_peaks, published_peak
from benchmarks.calibration.predictions import predict
from benchmarks.calibration.scores import FITTED_SOURCES, SourceScore, is_fit_row, score
from costmodels import Cluster, Engine, Layout, ModelSpec
from costmodels.catalogue import engine_names, load_engine
from costmodels.errors import InputError
from costmodels.ranks.rank_layers import ranks_of_table
from costmodels.spec.table import LayoutTable
from tests.support import ROOT

MEASURED = ROOT.parent / "shared" / "measured"

TRUE = {"allocator.fragmentation": 0.12, "loss.logits_copies": 3.0}

PLAN = MemoryFitPlan.model_validate(
    {
        "engine": "megatron",
        "sources": ["here"],
        "tolerance": 0.02,
        "constants": {
            "allocator.fragmentation": {"start": 0.05, "within": 3.0, "limits": [0.0, 0.3]},
            "loss.logits_copies": {"start": 1.0, "within": 3.0, "limits": [0.0, 8.0]},
        },
    }
)


@pytest.fixture
def rows(
    gpt: ModelSpec,
    cluster: Callable[..., Cluster],
    engine: Callable[..., Engine],
    layout: Callable[..., Layout],
) -> Callable[..., list[Measurement]]:
    """Makes measurements of an engine with the constants of `TRUE`: peaks, or which jobs ran."""

    def make(memory: float | None = None, wrong: tuple[int, ...] = ()) -> list[Measurement]:
        base = engine("megatron", devices={})
        layouts = [
            layout(gpt, tp=tp, dp=8 // tp, mbs=mbs, m=4, zero=zero if tp < 8 else 0)
            for tp in (1, 2, 4, 8)
            for mbs in (1, 2, 3, 4, 6, 8)
            for zero in (0, 1)
        ]
        table = LayoutTable.of(layouts)
        found = predicted_peaks(gpt, cluster(8), base.with_constants(TRUE), table, ranks_of_table(gpt, table))
        machine = cluster(8)
        if memory is not None:
            machine = machine.model_copy(update={"memory_bytes": memory})
        return [
            Measurement(
                source="here",
                sweep="",
                reference="table 1",
                line=line,
                model=gpt,
                cluster=machine,
                engine=base,
                layouts=(one,),
                step_time_s=1.0,
                oom=memory is not None and found["device"][line].max() > memory,
                allocated_bytes=None,
                reserved_bytes=None
                if memory
                else found["reserved"][line].max() * (2 if line in wrong else 1),
                first_rank_only=False,
            )
            for line, one in enumerate(layouts)
        ]

    return make


def test_peaks_give_the_constants_back_whatever_a_few_rows_say(
    rows: Callable[..., list[Measurement]],
) -> None:
    found = fit_memory(PLAN, rows(wrong=(3, 11, 20)))
    assert found.rows == 48
    assert found.constants == pytest.approx(TRUE, rel=0.05)


def test_jobs_that_ran_and_did_not_bound_the_constants(rows: Callable[..., list[Measurement]]) -> None:
    memory = 7.5e9
    seen = rows(memory)
    assert 10 < sum(row.oom for row in seen) < 38
    constants = fit_memory(PLAN, seen).constants
    table = LayoutTable.of([row.layouts[0] for row in seen])
    engine = seen[0].engine.with_constants(constants)
    device = predicted_peaks(
        seen[0].model, seen[0].cluster, engine, table, ranks_of_table(seen[0].model, table)
    )["device"]
    missed = (device.max(axis=1) > memory) != np.array([row.oom for row in seen])
    assert missed.sum() <= 2


def test_a_fit_needs_as_many_rows_as_constants(rows: Callable[..., list[Measurement]]) -> None:
    with pytest.raises(InputError, match="memory fit of megatron: 1 rows for 2 constants; give more rows"):
        fit_memory(PLAN, rows()[:1])


def test_memory_fits_name_engines_constants_and_sources_that_exist() -> None:
    for plan in memory_fit_plans():
        assert plan.engine in engine_names()
        starts = {name: prior.start for name, prior in plan.constants.items()}
        assert load_engine(plan.engine).with_constants(starts).name == plan.engine
        assert set(plan.sources) <= set(FITTED_SOURCES)
        for prior in plan.constants.values():
            assert prior.limits[0] <= prior.start <= prior.limits[1]


ROW = {
    "source_id": "hf_ultrascale",
    "row_status": "ok",
    "model_name": "Llama-of-ours",
    "seq": "4096",
    "layers": "16",
    "hidden": "2048",
    "ffn": "8192",
    "heads": "32",
    "vocab": "32000",
    "gpu": "H100-80GB-SXM",
    "gpus": "8",
    "gpus_per_node": "8",
    "tp": "1",
    "pp": "1",
    "dp": "8",
    "cp": "1",
    "mbs": "1",
    "gbs": "64",
    "recompute": "none",
    "zero_stage": "1",
    "precision": "bf16",
    "flash": "1",
    "step_time_s": "1",
    "peak_mem_gib": "40",
}


def test_what_a_peak_counts_is_read_from_its_kind() -> None:
    def kinds(kind: str, notes: str = "") -> list[float | None]:
        row = measurement_of({**ROW, "mem_kind": kind, "notes": notes})
        return [
            None if (bytes_ := published_peak(row, each)) is None else bytes_ / 2**30 for each in MEMORY_KINDS
        ]

    assert kinds("torch max_memory_allocated") == [40, None, None, None]
    assert kinds("nvidia-smi GB") == [None, None, 40, None]
    assert kinds("rank0 torch RESERVED", "states_alloc_gib=25.07; tied") == [None, 40, None, 25.07]


def measured(name: str) -> list[Measurement]:
    """The rows of a source that no fit saw; skips where they are not at hand."""
    file = MEASURED / f"{name}.csv"
    if not file.is_file():
        pytest.skip(f"{file} is not there")
    return [row for row in read_measurements(file)[0] if not is_fit_row(row)]


@cache
def scored(source: str) -> SourceScore:
    rows = measured(source)
    return score(rows, predict(rows))[source]


def test_rows_of_a_fit_are_those_of_its_engine_and_sources(rows: Callable[..., list[Measurement]]) -> None:
    row = rows()[0]
    assert has_memory(row, PLAN)
    assert not has_memory(row, PLAN.model_copy(update={"engine": "nemo"}))
    assert not has_memory(row, PLAN.model_copy(update={"sources": ("there",)}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "precision", "recall"), [("aleph_layouts", 0.98, 0.95), ("hf_ultrascale", 0.985, 0.985)]
)
def test_jobs_that_run_out_of_memory_are_told_from_those_that_do_not(
    source: str, precision: float, recall: float
) -> None:
    oom = scored(source).oom
    assert oom.n > 20
    assert oom.precision_fits is not None and oom.precision_fits >= precision
    assert oom.recall_fits is not None and oom.recall_fits >= recall


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "kind", "percent"),
    [
        ("hf_ultrascale", "step", 1.0),
        ("hf_ultrascale", "reserved", 6.0),
        ("torchtitan", "reserved", 10.0),
        ("simumax_b200", "allocated", 3.0),
        ("bigscience_176b", "device", 8.0),
    ],
)
def test_published_peaks_are_met(source: str, kind: str, percent: float) -> None:
    found = scored(source).memory.kinds[kind]
    assert found.median_ape is not None and found.median_ape <= percent


@pytest.mark.parametrize("source", ["mosaic_llmfoundry", "nvidia_dgxc", "vtrain_multi", "korthikanti22"])
def test_jobs_that_ran_are_said_to_fit(source: str) -> None:
    assert predict(measured(source)).fits.mean() > 0.95
