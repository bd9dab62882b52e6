"""`planner report` writes a page that needs nothing else, and `planner compare` tells two plans apart."""

from __future__ import annotations

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
from benchmarks.pictures import PATIENCE_MS
from cli.pages import compare, report
from costmodels.catalogue import calibrated_fits, device_names, engine_names, load_device, load_engine
from costmodels.spec.record import GIB
from planner.options.flags import run
from planner.report.contents import gather
from planner.report.figures import figures
from planner.report.page import write_page
from planner.report.range_basis import range_basis

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
    measured = {"step_time_s": 9.0, "peak_memory_bytes": 6e10}
    steps: list[dict[str, object]] = [{"iteration": step, "loss": 11.0 / step, **measured} for step in (1, 2)]
    steps.append({"iteration": 2, "parts": {"products": 5.0, "attention": 1.0, "elementwise": 2.0}})
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
    # Of plans that every estimate has equal one is shown, so that the runner-up lacks something.
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


def complaints_of(tab: Any) -> list[str]:
    """Errors of a browser's tab, which fill while it lives."""
    found: list[str] = []
    tab.on("console", lambda message: found.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: found.append(str(error)))
    return found


@pytest.fixture(scope="module")
def large_page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = planner.suggest("llama3-405b", world_size=16_384, device="h100", max_global_batch_size=2048)
    out = tmp_path_factory.mktemp("large") / "report.html"
    write_page(gather(plan), out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("name", ["page", "large_page"])
def test_a_browser_draws_a_report_without_complaint(name: str, request: pytest.FixtureRequest) -> None:
    api = pytest.importorskip("playwright.sync_api")
    browser_path = shutil.which("chromium") or shutil.which("google-chrome")
    if browser_path is None:
        pytest.skip("no Chrome or Chromium to draw in")
    page: Path = request.getfixturevalue(name)
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
        for width, scheme in ((1280, "light"), (390, "dark")):
            context = browser.new_context(
                viewport={"width": width, "height": 900}, color_scheme=scheme, offline=True
            )
            context.set_default_timeout(PATIENCE_MS)
            tab = context.new_page()
            errors = complaints_of(tab)
            tab.goto(page.as_uri())
            tab.wait_for_function(
                "document.documentElement.dataset.drawn >= document.querySelectorAll('.figure').length"
            )
            assert not errors
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
        browser.close()


@pytest.mark.slow
def test_figures_are_written_as_images(plans: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("kaleido")
    if shutil.which("chromium") is None and shutil.which("google-chrome") is None:
        pytest.skip("no Chrome or Chromium to draw in")
    words = ("--out", str(tmp_path / "page.html"), "--figures", str(tmp_path / "figures"))
    code, _, err = run_planner("report", str(plans["piped"]), *words)
    assert code == 0, err
    written = {file.name: file.read_bytes() for file in (tmp_path / "figures").iterdir()}
    assert {"memory.svg", "memory.png", "pipeline.svg", "map.png"} <= written.keys()
    assert f"saved {len(written)} images" in err
    for name, data in written.items():
        assert data.startswith(b"\x89PNG" if name.endswith("png") else b"<svg"), name


def test_two_plans_are_told_apart(plans: dict[str, Path]) -> None:
    one, other = str(plans["first"]), str(plans["piped"])
    code, out, err = run_planner("compare", one, other, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["throughput_ratio"] > 0
    assert "pipeline_parallel" in " ".join(found["differences"]) or "pp" in found["differences"]
    first, second = planner.Plan.load(one), planner.Plan.load(other)
    assert sum(pair[0] for pair in found["time_s"].values()) == pytest.approx(first.estimate.step_time_s)
    scale = first.layout.global_batch_size / second.layout.global_batch_size
    total = sum(pair[1] for pair in found["time_s"].values())
    assert total == pytest.approx(scale * second.estimate.step_time_s)
    assert "more tokens a second" in run_planner("compare", one, other)[1]


def test_what_cannot_be_shown_is_one_line(plans: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for words, part in (
        (("report", str(tmp_path / "empty")), "a folder without plan.json"),
        (("report", str(tmp_path / "none.json")), "no such file"),
        (("compare", str(plans["first"]), str(tmp_path)), "a folder without plan.json"),
    ):
        code, _, err = run_planner(*words)
        assert code == 2 and part in err and err.count("\n") == 1


@pytest.mark.slow
def test_notebooks_show_plans_and_results(plans: dict[str, Path]) -> None:
    plan = planner.Plan.load(plans["piped"])
    assert plan.layout.describe() in plan._repr_html_().replace("&#x27;", "'")
    figures = planner.plan_figures(plan)
    assert set(figures) >= {"step-time", "memory", "pipeline", "front", "map"}
    # Of as many devices, each is a cell.
    assert figures["map"].data[0].z.size == 64
    result = planner.search("gpt2-small", world_size=4, device="h100", max_global_batch_size=16)
    assert result._repr_html_().count("<tr>") > 2
    frame = pytest.importorskip("pandas") and result.to_pandas(5)
    assert frame["step_time_s"].iloc[0] == result.plan(0).estimate.step_time_s
    assert len(frame) == 5 and {"tensor_parallel", "mfu", "compute_s"} <= set(frame.columns)
