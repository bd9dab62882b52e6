"""The Python interface besides questions: schemas, catalogues, tables, pictures, and names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import planner
from costmodels import Layout
from costmodels.spec.estimate import Estimate, StageMemory, StepTime
from planner.budget.question import RunQuestion
from planner.schema import RECORDS, schema
from tests.support import ROOT
from tests.support.commands import Command

JOB: dict[str, Any] = {"device": "h100", "global_batch_size": 64}


@pytest.fixture(scope="module")
def plan() -> planner.Plan:
    return planner.suggest("llama3-8b", 8, **JOB)


@pytest.mark.parametrize("name", RECORDS)
def test_every_field_of_a_record_is_described_and_numbers_have_a_unit(name: str) -> None:
    found = schema(name)
    assert found["title"] == name and found["description"]
    parts = {one.__name__ for one in (planner.Plan, Layout, Estimate, StepTime, StageMemory)}
    records = [found, *(about for part, about in found.get("$defs", {}).items() if part in parts)]
    for record in records:
        for field, about in record["properties"].items():
            assert len(about.get("description", "")) > 8, field
            kinds = {about.get("type"), *(one.get("type") for one in about.get("anyOf", ()))}
            assert bool(kinds & {"number", "integer"}) <= bool({"unit", "const", "enum"} & {*about}), field


def test_units_are_those_of_the_records() -> None:
    estimate = schema("Estimate")
    fields = estimate["properties"]
    assert fields["step_time_s"]["unit"] == "seconds" and fields["peak_memory_bytes"]["unit"] == "bytes"
    assert fields["tokens_per_s"]["unit"] == "per second"
    assert {one["unit"] for one in estimate["$defs"]["StepTime"]["properties"].values()} == {"seconds"}
    assert {one["unit"] for one in estimate["$defs"]["StageMemory"]["properties"].values()} == {"bytes"}
    assert schema("Layout")["properties"]["tensor_parallel"]["unit"] == "count"
    assert {"considered", "legal", "feasible", "rejected", "elapsed_s", "best"} <= set(
        schema("SearchResult")["properties"]
    )


def test_the_command_prints_the_schema(planner_command: Command) -> None:
    code, out, _ = planner_command("schema", "Layout")
    assert code == 0 and json.loads(out) == schema("Layout")
    code, _, err = planner_command("schema", "Layuot")
    assert code == 2 and "did you mean Layout?" in err


def test_names_of_the_package_are_the_public_ones_alone() -> None:
    assert dir(planner) == sorted(planner.__all__)
    code = "import planner; print(callable(planner.report), callable(planner.report), *dir(planner))"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; import sys; assert 'torch' not in sys.modules"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["True", "True", *sorted(planner.__all__)], done.stderr


def test_catalogues_are_tuples_that_notebooks_show() -> None:
    for found, name in ((planner.models(), "llama3-8b"), (planner.devices(), "h100")):
        assert found.named(name).name == name and found.names == tuple(one.name for one in found)
        html = found._repr_html_()
        assert html.count("<tr>") == len(found) + 1 and f"<td>{name}</td>" in html
    assert planner.engines().names[0] == "bundled"
    with pytest.raises(KeyError):
        planner.devices().named("abacus")
    frame = planner.devices().to_pandas() if _has_pandas() else None
    assert frame is None or len(frame) == len(planner.devices())


def _has_pandas() -> bool:
    try:
        import pandas  # noqa: F401
    except ImportError:
        return False
    return True


def test_explanations_and_sizes_are_tables() -> None:
    found = planner.explain("llama3-8b", 8, what_if=False, against="tp=8", **JOB)
    assert found._repr_html_().startswith("<pre>best: ")
    several = planner.sizes("llama3-8b", "8,16", tokens="1T", **JOB)
    html = several._repr_html_()
    assert html.count("<tr>") == 3 and "recommended" in html
    if not _has_pandas():
        return
    terms = found.to_pandas()
    assert set(terms["unit"]) == {"seconds", "bytes"}
    first = terms[(terms["unit"] == "seconds") & (terms["against"] == terms["against"][0])]
    best = found.result.best
    assert best is not None and first["best"].sum() == pytest.approx(best.estimate.step_time_s)
    rows = several.to_pandas()
    assert list(rows["world_size"]) == [8, 16]
    assert list(rows["days"]) == [run.days for run in several.runs.values()]


def test_the_nearest_layouts_come_with_the_error() -> None:
    with pytest.raises(planner.NoLayoutFits) as caught:
        planner.suggest("llama2-70b", 2, device="a100-80g", global_batch_size=16)
    nearest = caught.value.nearest
    assert 1 < len(nearest) <= 5 and nearest[0] == caught.value.closest
    lacks = [plan.estimate.peak_memory_bytes for plan in nearest]
    assert lacks == sorted(lacks) and not any(plan.fits for plan in nearest)
    assert all(plan.layout.world_size == 2 for plan in nearest)


def test_plans_are_loaded_compared_drawn_and_reported(plan: planner.Plan, tmp_path: Path) -> None:
    plan.save(tmp_path / "plan.json")
    again = planner.load(tmp_path / "plan.json")
    assert again == plan
    other = planner.suggest("llama3-8b", 8, pin=["tp=4"], **JOB)
    found = planner.compare(plan, other)
    assert found.first == plan and found.throughput >= 1
    pytest.importorskip("plotly")
    assert "memory" in planner.plan_figures(plan)
    path = planner.report(plan, tmp_path / "page.html")
    assert "<html" in path.read_text(encoding="utf-8")[:200].lower()
    asked = plan.model_copy(update={"asked": RunQuestion(tokens=10**12)})
    text = planner.report(asked, tmp_path / "days.html").read_text(encoding="utf-8")
    assert "<dt>with checkpoints and failures</dt>" in text and "storage takes 8 Gb/s from each node" in text
