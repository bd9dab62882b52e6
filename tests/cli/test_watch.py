"""`planner watch`: the figures of runs as their files grow, in a terminal and on a page."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from benchmarks.pictures import served
from planner.report.run_figures import LoggedRun, loss, run_row, steps, stragglers
from runtime.logs.metrics_file import FollowedMetrics, drop_metrics_after
from tests.support.browser import chromium, tab
from tests.support.commands import Command


def step(iteration: int, seconds: float, **more: Any) -> dict[str, Any]:
    """A record as the runtime writes one."""
    figures = {"loss": 10.0 - iteration, "tokens_per_s": 100 / seconds, "peak_memory_bytes": 2**31}
    return {"iteration": iteration, "step_time_s": seconds, "predicted_step_time_s": 2.0, **figures, **more}


RECORDS = [
    step(1, 9.0, profiled=True),
    step(2, 1.0),
    step(3, 4.0, expert_load={"0": [0.5, 0.5]}),
    {"iteration": 3, "straggler": "straggler: rank 3 on node7 works 4 s in each step"},
    {"iteration": 3, "validation_loss": 7.5},
    step(4, 2.5),
]

MEDIAN = statistics.median([1.0, 4.0, 2.5])


def write(folder: Path, records: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)
    return folder


def test_a_run_that_grows_ends_and_goes_on_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    followed = FollowedMetrics(folder)
    assert followed.update() == []
    write(folder, RECORDS[:2])
    assert [record["iteration"] for record in followed.update()] == [1, 2]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 3, "lo')
        file.flush()
        assert len(followed.update()) == 2
        file.write('ss": 1.0}\n')
    assert followed.update()[-1] == {"iteration": 3, "loss": 1.0}
    # A job that goes on from its checkpoint takes steps again.
    drop_metrics_after(folder, 2)
    assert [record["iteration"] for record in followed.update()] == [1, 2]
    write(folder, RECORDS[2:])
    again = followed.update()
    assert [record["iteration"] for record in again] == [1, 2, 3, 3, 3, 4]
    assert not any("expert_load" in record for record in again)
    (folder / "metrics.jsonl").write_text(json.dumps(step(1, 1.0)) + "\n")
    assert len(followed.update()) == 1


def test_figures_say_what_the_table_says() -> None:
    run = LoggedRun("mine", RECORDS)
    cells = run_row(run)
    assert cells == ("mine", "4", "6", "2.50 s", "2.00 s", f"{2.0 / MEDIAN:.2f}", "40", "2.00")
    shown = {line.name: list(line.y) for line in steps([run]).data}
    # The profiled step is no step of the run, and the median is the table's.
    assert shown == {
        "measured": [1.0, 4.0, 2.5],
        "predicted 2.00 s": [2.0, 2.0],
        "median 2.50 s": [MEDIAN] * 2,
    }
    both = steps([run, LoggedRun("other", RECORDS[:2])])
    assert [line.name for line in both.data if "measured" in line.name] == [
        "mine, measured",
        "other, measured",
    ]
    assert len({line.line.color for line in both.data}) == 2
    assert [line.name for line in loss([run]).data] == ["training", "validation"]
    assert stragglers([run]) == [f"mine, iteration 3: {RECORDS[3]['straggler']}"]
    assert loss([LoggedRun("none", [])]) is None and run_row(LoggedRun("none", [])) == ("none", *[""] * 7)


def test_the_terminal_shows_runs_side_by_side(
    tmp_path: Path, planner_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    one, other = write(tmp_path / "one", RECORDS), tmp_path / "other"
    other.mkdir()
    code, out, _ = planner_command("watch", one, other, "--once")
    assert code == 0
    row = next(line for line in out.splitlines() if line.startswith("one "))
    assert row.split()[1:8] == ["4", "6", "2.50", "s", "2.00", "s", "0.80"]
    assert "rank 3 on node7" in out and "other: no step is logged yet" in out
    code, _, err = planner_command("watch", tmp_path / "none")
    assert code == 2 and "no such folder; name the --log-dir of a run" in err
    assert planner_command("watch", one, "--every", "0")[0] == 2


@pytest.mark.slow
def test_the_page_of_runs_follows_them(tmp_path: Path) -> None:
    pytest.importorskip("starlette")
    pytest.importorskip("plotly")
    from planner.web.watch import watch_app

    folders = [write(tmp_path / "<b>one", RECORDS[:3]), write(tmp_path / "two", RECORDS[:2])]
    followed = [FollowedMetrics(folder) for folder in folders]

    def now() -> list[LoggedRun]:
        return [LoggedRun(one.name, each.update()) for one, each in zip(folders, followed, strict=True)]

    with served(watch_app("127.0.0.1", now)) as site, chromium() as browser:
        for width, scheme in ((1280, "light"), (390, "dark")):
            with tab(browser, width, scheme) as (page, complaints):
                page.goto(site)
                page.locator("html[data-drawn='4']").wait_for()
                before = page.locator("#table tr").nth(1).inner_text()
                write(folders[0], [step(100 + width, 2.0)])
                page.locator(f"#table td:text-is('{100 + width:,}')").wait_for()
                assert before != page.locator("#table tr").nth(1).inner_text()
                assert page.locator("#table b").count() == 0
                assert page.evaluate("document.documentElement.scrollWidth") <= width
            assert not complaints
