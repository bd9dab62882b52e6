"""`planner report` writes a page that needs nothing else, and `planner compare` tells two plans apart."""

from __future__ import annotations

import html
import io
import json
import math
import re
import shutil
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import typer

import planner
from cli.pages import compare, report
from costmodels.catalogue import calibrated_fits, device_names, engine_names, load_device, load_engine
from costmodels.spec.record import GIB
from planner.budget.question import RunQuestion
from planner.options.flags import run
from planner.ranking.distinct import distinct_plans
from planner.report.contents import gather
from planner.report.figures import figures, step_time
from planner.report.page import write_page
from planner.report.parts import ranking
from planner.report.range_basis import range_basis
from tests.support.browser import chromium, tab

pytest.importorskip("plotly")


def run_planner(*words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command, in this process."""
    app = typer.Typer()
    app.command()(report)
    app.command()(compare)
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["planner", *words])
        with pytest.raises(SystemExit) as stop:
            run(app, "planner")
    return int(stop.value.code or 0), out.getvalue(), err.getvalue()


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("plans")
    found = {}
    for name, pins in {"first": ["pp=1"], "piped": ["pp=4", "tp=4"]}.items():
        found[name] = folder / f"{name}.json"
        plan = planner.suggest("llama3-70b", world_size=64, device="h100", max_global_batch_size=64, pin=pins)
        plan.save(found[name])
    return found


@pytest.fixture(scope="module")
def page(plans: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("run")
    shutil.copy(plans["piped"], run / "plan.json")
    # The mean of the steps is no median, and a profiled step is not one of them.
    steps: list[dict[str, object]] = [
        {"iteration": step, "loss": 11.0 / step, "step_time_s": seconds, "peak_memory_bytes": 6e10}
        for step, seconds in enumerate((8.0, 20.0, 9.0), start=1)
    ]
    steps.append({"iteration": 4, "loss": 2.8, "step_time_s": 30.0, "profiled": True})
    steps.append({"iteration": 4, "parts": {"products": 5.0, "attention": 1.0, "elementwise": 2.0}})
    (run / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))
    out = run / "report.html"
    code, _, err = run_planner("report", str(run), "--out", str(out))
    assert code == 0, err
    return out


@pytest.mark.slow
def test_a_report_holds_all_that_it_shows(page: Path) -> None:
    text = page.read_text()
    own = text[: text.index("<script>")] + text[text.rindex("</style>") :]
    assert not re.search(r"<(script|link|img)[^>]+(src|href)=.https?:", own)
    names = re.findall(r'class="figure" id="([a-z-]+)"', text)
    assert set(names) >= {
        "step-time",
        "memory",
        "pipeline",
        "range",
        "front",
        "sizes",
        "map",
        "loss",
        "measured",
        "profile",
    }
    assert "The median step is " in text and "llama3-70b on 64 x h100" in text
    assert "It reaches from -" in text and "measured runs (bundled_h100)" in text
    # Every pass of every microbatch is named.
    assert text.count("microbatch 0, stage 0") >= 2


@pytest.mark.slow
def test_figures_show_what_fits_and_who_differs(plans: dict[str, Path]) -> None:
    contents = gather(planner.Plan.load(plans["first"]))
    cluster = contents.plan.cluster
    assert 0 < contents.cloud.peak_bytes.max() <= cluster.memory_bytes / GIB
    # One of the plans with equal estimates is shown, so that the runner-up lacks something.
    steps = [plan.estimate.step_time_s for plan in contents.rivals]
    assert len(set(steps)) > 1 and contents.comparison.time
    shown = figures(contents)
    assert len(set(shown["step-time"].data[0].y)) == 6
    (cells,) = shown["map"].data
    assert cells.z.shape == cells.text.shape == (2, 32)
    hover = cells.customdata[1, 31]
    assert hover.startswith("rank 63, node 7<br>tp ") and hover.endswith(", pp 0<br>layers 0 to 79")


def test_causes_of_a_range_make_the_range(plans: dict[str, Path]) -> None:
    plan = planner.Plan.load(plans["piped"])
    text = range_basis(plan)
    low, high = (int(found) for found in re.findall(r"from (-\d+) % to \+(\d+) %", text)[0])
    assert high == round(100 * (plan.estimate.step_time_high_s / plan.estimate.step_time_s - 1))
    widths = [float(found) for found in re.findall(r"[a-z] (\d+) %", text)]
    assert math.hypot(*widths) == pytest.approx(100 * math.log1p(high / 100), abs=len(widths))
    assert low < 0 and "12 measured runs" in text


def first_devices() -> dict[str, str]:
    """A device of each architecture in the catalogue."""
    found: dict[str, str] = {}
    for name in device_names():
        found.setdefault(load_device(name).architecture, name)
    return found


PAIRS = [
    (engine, device)
    for engine in engine_names()
    for device in first_devices().values()
    if load_device(device).kind in load_engine(engine).runs.devices
]
"""Engines on a device of each class that they run on."""


def test_the_page_of_every_engine_and_class_of_device_says_what_its_range_rests_on() -> None:
    plan = planner.suggest("gpt2-small", world_size=2, device="h100", global_batch_size=8)
    for engine, device in PAIRS:
        cluster = plan.cluster.model_copy(update={"device": load_device(device)})
        text = range_basis(plan.model_copy(update={"engine": load_engine(engine), "cluster": cluster}))
        known = calibrated_fits().get(engine, {}).get(cluster.device.architecture, {})
        if "rows" in known:
            assert f"fitted to {known['rows']} measured runs" in text
        else:
            assert "not fitted to" in text, (engine, device)


@pytest.mark.slow
@pytest.mark.parametrize("engine", engine_names())
def test_every_engine_has_a_page(engine: str, tmp_path: Path) -> None:
    device = next(device for name, device in reversed(PAIRS) if name == engine)
    plan = planner.suggest("gpt2-small", world_size=2, device=device, engine=engine, global_batch_size=8)
    out = tmp_path / "report.html"
    write_page(gather(plan), out)
    assert "It reaches from -" in out.read_text()


@pytest.fixture(scope="module")
def large_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = planner.suggest("llama3-405b", world_size=16_384, device="h100", max_global_batch_size=2048)
    out = tmp_path_factory.mktemp("large") / "report.html"
    write_page(gather(plan), out)
    return out


OVERLAPS = """(id) => {
    const bar = document.querySelector(`#${id} .modebar-group`);
    const legend = document.querySelector(`#${id} .legend`);
    const shown = bar && getComputedStyle(bar.closest('.modebar-container')).display !== 'none';
    if (!shown || !legend) return [!!shown, false];
    const [one, other] = [bar.closest('.modebar').getBoundingClientRect(), legend.getBoundingClientRect()];
    const apart = one.right <= other.left || other.right <= one.left || one.bottom <= other.top
        || other.bottom <= one.top;
    return [true, !apart];
}"""
"""A script that tells whether the toolbar of a figure is shown, and whether it covers the legend."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["page", "large_page"])
def test_a_browser_draws_a_report_without_complaint(name: str, request: pytest.FixtureRequest) -> None:
    page: Path = request.getfixturevalue(name)
    with chromium() as browser:
        for width, scheme in ((1280, "light"), (390, "dark")):
            touch = width < 600
            context = {"offline": True, "has_touch": touch, "is_mobile": touch}
            with tab(browser, width, scheme, **context) as (shown, errors):
                shown.goto(page.as_uri())
                shown.wait_for_function(
                    "document.documentElement.dataset.drawn >= document.querySelectorAll('.figure').length"
                )
                assert not errors
                assert shown.evaluate("document.documentElement.scrollWidth") <= width
                figures = shown.evaluate("[...document.querySelectorAll('.figure')].map((one) => one.id)")
                # The toolbar comes with a pointer, and covers no legend; fingers and paper have none.
                seen = [shown.evaluate(OVERLAPS, one) for one in figures]
                assert seen == [[not touch, False]] * len(figures)
                shown.emulate_media(media="print")
                assert not any(shown.evaluate(OVERLAPS, one)[0] for one in figures)


def test_a_report_ranks_as_the_answer_does_with_days_and_cost_where_asked_for() -> None:
    job: dict[str, Any] = {"device": "h100", "world_size": 8, "global_batch_size": 64}
    found = planner.search("llama3-8b", **job)
    rows = distinct_plans(found, 10)
    asked = RunQuestion(tokens=10**11, price_per_hour=2.0, currency="$")
    text = html.unescape(ranking(rows[0].plan, rows, asked))
    cells = [re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr[^>]*>(<td>.*?)</tr>", text)]
    assert len(cells) == len(rows) and any(row.twins for row in rows)
    for row, (place, layout, *_, time, cost) in zip(rows, cells, strict=True):
        run = row.plan.run("100B", "$2")
        assert (place, layout) == (str(row.place), row.plan.layout.describe() + row.note_after)
        number, unit = time.split()
        assert float(number) == pytest.approx(run.days * {"days": 1, "hours": 24}[unit], rel=0.01)
        assert cost.startswith("$") and float(cost[1:].replace(",", "")) == pytest.approx(run.money, rel=0.01)
    names = step_time(rows[0].plan, rows).data[0].y
    assert names[0].startswith(f"1: tp={rows[0].plan.layout.tensor_parallel} pp=")
    assert [name.partition(":")[0] for name in names] == [str(row.place) for row in rows[:6]]


def test_the_median_of_a_run_is_drawn_where_the_table_says_it(page: Path) -> None:
    text = page.read_text()
    row = re.search(r"<td>median step</td>(.*?)</tr>", text, re.DOTALL)
    assert row is not None and ">9.00 s<" in row[1] and "median 9.00 s" in text
