"""`planner suggest` of several sizes: one size is recommended, with days and money, and the page shows it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from planner import Plan
from tests.support.commands import Command

JOB = ("suggest", "--model", "gpt2-124m", "--device", "a100-80g", "--global-batch-size", "64")
SIZES = (*JOB, "--world-size", "8,16,64", "--tokens", "300B")


def answer_of(planner_command: Command, *words: Any) -> dict[str, Any]:
    code, out, err = planner_command(*SIZES, *words, "--json")
    assert code == 0, err
    found: dict[str, Any] = json.loads(out)
    return found


def test_a_deadline_gets_the_cheapest_size_in_time_and_a_budget_the_fastest_that_it_pays(
    planner_command: Command, tmp_path: Path
) -> None:
    plain = answer_of(planner_command, "--price-per-hour", "$2")
    runs = {size["world_size"]: size["run"] for size in plain["sizes"]}
    days, money = ({size: run[name] for size, run in runs.items()} for name in ("days", "money"))
    assert days[8] > days[16] > days[64] and money[8] < money[64]
    limit = (days[8] + days[16]) / 2
    path = tmp_path / "plan.json"
    found = answer_of(planner_command, "--deadline-days", limit, "--save", path)
    in_time = [size for size in runs if days[size] <= limit]
    assert found["chosen"] == min(in_time, key=lambda size: money[size])
    assert found["recommendation"]["rule"] == "deadline" and found["recommendation"]["keeps_goal"]
    saved = Plan.load(path)
    assert saved.layout.world_size == found["chosen"] and saved.asked is not None
    assert saved.asked.deadline_days == pytest.approx(limit) and saved.asked.tokens == 3 * 10**11
    budget = (money[16] + money[64]) / 2
    found = answer_of(planner_command, "--price-per-hour", "$2", "--budget", f"${budget:.2f}")
    paid = [size for size in runs if money[size] <= budget]
    assert found["chosen"] == min(paid, key=lambda size: days[size])
    assert (found["recommendation"]["rule"], found["currency"]) == ("budget", "$")


def test_without_a_goal_the_knee_is_recommended_and_the_table_says_what_a_front_is(
    planner_command: Command,
) -> None:
    code, out, _ = planner_command(*SIZES, "--price-per-hour", "2.5 EUR")
    text = " ".join(out.split())
    assert code == 0 and max(map(len, out.splitlines())) <= 80
    assert "Pareto-optimal, no other size is both faster and cheaper" in text
    found = answer_of(planner_command)
    assert found["recommendation"]["rule"] == "knee"
    assert f"recommended: {found['chosen']} devices" in text
    assert f"why: {found['recommendation']['why']}" in text
    # From the days of the answer alone: a step pays if it saves as large a share as it adds to the cost.
    runs = {size["world_size"]: size["run"] for size in found["sizes"] if size["on_front"]}
    path = sorted(runs, key=lambda size: float(runs[size]["device_hours"]))
    taken = path[0]
    for size in path[1:]:
        one, other = runs[taken], runs[size]
        if 1 - other["days"] / one["days"] >= other["device_hours"] / one["device_hours"] - 1:
            taken = size
    assert found["chosen"] == taken


@pytest.mark.parametrize(
    ("price", "words"),
    [
        ("$2.5", "; at $2.5 a device-hour)"),
        ("€2.5", "; at €2.5 a device-hour)"),
        ("2.5 EUR", " EUR; at 2.5 EUR a device-hour)"),
        ("2.5", "; in the unit of your price, 2.5 a device-hour)"),
    ],
)
def test_a_currency_is_printed_back(planner_command: Command, price: str, words: str) -> None:
    one = (*JOB, "--world-size", "8", "--tokens", "300B", "--price-per-hour", price)
    code, out, _ = planner_command(*one)
    text = " ".join(out.split())
    assert code == 0 and words in text
    cost = json.loads(planner_command(*one, "--json", "--top", "1")[1])["plans"][0]["run"]["money"]
    assert f"{cost:,.0f}" in text


def test_a_sum_that_a_shell_has_shortened_is_said(planner_command: Command) -> None:
    one = (*JOB, "--world-size", "8", "--tokens", "300B", "--json", "--top", "1", "--price-per-hour")
    assumed = [json.loads(planner_command(*one, price)[1])["assumed"] for price in (".5", "0.5")]
    assert assumed[0] == ["--price-per-hour is .5: of $2.5 without quotes a shell leaves that"]
    assert assumed[1] == []


def test_the_goal_of_one_size_is_judged(planner_command: Command) -> None:
    one = (*JOB, "--world-size", "8", "--tokens", "300B")
    _, out, _ = planner_command(*one, "--deadline-days", "1000")
    assert "goal: kept, to take at most 1,000 days" in out
    _, out, _ = planner_command(*one, "--deadline-days", "1")
    assert "goal: missed, to take at most 24 hours: " in out
    _, out, _ = planner_command(*one, "--deadline-days", "1", "--json", "--top", "1")
    assert json.loads(out)["plans"][0]["keeps_goal"] is False


def test_sizes_say_which_of_their_plans_leave_less_than_the_headroom(planner_command: Command) -> None:
    found = answer_of(planner_command, "--headroom", "79")
    [note] = [note for note in found["notes"] if note.startswith("headroom of ")]
    assert note.startswith("headroom of 79.0 GiB: with 8, 16, 64 devices the plan leaves ")
    assert not [note for note in answer_of(planner_command)["notes"] if note.startswith("headroom of ")]
    _, out, _ = planner_command(*SIZES, "--headroom", "79")
    assert "note: headroom of 79.0 GiB" in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--deadline-days", "0"), "--deadline-days 0: expected days above 0, such as 30"),
        (("--deadline-days", "soon"), "'--deadline-days': 'soon' is not a number"),
        (("--budget", "3"), "--budget 3: also give --price-per-hour, the money for one device and hour"),
        (("--budget", "little", "--price-per-hour", "2"), "--budget little: expected money above 0"),
        (("--budget", "$3", "--price-per-hour", "€2"), "--budget $3: in $, and --price-per-hour is in €"),
        (("--price-per-hour", "2,5"), "--price-per-hour 2,5: expected money above 0 for a device and hour"),
    ],
)
@pytest.mark.parametrize("world_size", ["8", "8,16"])
def test_wrong_goals_end_in_one_line(
    planner_command: Command, world_size: str, words: tuple[str, ...], line: str
) -> None:
    job = (*JOB, "--world-size", world_size, "--tokens", "300B")
    code, out, err = planner_command(*job, *words)
    assert code == 2 and out == "" and err.startswith("planner: error: ") and line in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("words", [("--deadline-days", "3"), ("--budget", "3", "--price-per-hour", "2")])
def test_goals_need_a_number_of_tokens(planner_command: Command, words: tuple[str, ...]) -> None:
    code, _, err = planner_command(*JOB, "--world-size", "8", *words)
    assert code == 2 and f"{words[0]} 3: also give tokens, such as 2T" in err


def page_of(planner_command: Command, plan: Path, tmp_path: Path) -> str:
    """A page without the script that draws."""
    out = tmp_path / "report.html"
    code, _, err = planner_command("report", plan, "--out", out)
    assert code == 0, err
    text = out.read_text(encoding="utf-8")
    return (text[: text.index("<script>")] + text[text.rindex("</style>") :]).replace("&nbsp;", " ")


def test_the_page_shows_the_days_the_cost_and_the_sizes_that_were_asked_for(
    planner_command: Command, tmp_path: Path
) -> None:
    pytest.importorskip("plotly")
    path = tmp_path / "plan.json"
    found = answer_of(planner_command, "--price-per-hour", "€2", "--save", path)
    text = page_of(planner_command, path, tmp_path)
    assert "Runs of 300B tokens" in text and "a billion tokens" not in text
    run = next(size["run"] for size in found["sizes"] if size["world_size"] == found["chosen"])
    assert "<dt>300B tokens</dt>" in text and f"cost €{run['money']:,.0f} " in text
    assert f"Recommended: {found['chosen']} devices, as {found['recommendation']['why']}" in text
    rows = text[text.index('class="ranking sizes"') :]
    rows = rows[: rows.index("</table>")]
    for size in found["sizes"]:
        assert f"<td>{size['world_size']}</td>" in rows
        assert f"<td>€{size['run']['money']:,.0f}</td>" in rows
    assert rows.count("<tr") == 1 + len(found["sizes"])


def test_the_page_of_one_size_has_half_and_twice_as_many_devices(
    planner_command: Command, tmp_path: Path
) -> None:
    pytest.importorskip("plotly")
    path = tmp_path / "plan.json"
    planner_command(*JOB, "--world-size", "8", "--tokens", "2T", "--price-per-hour", "3", "--save", path)
    text = page_of(planner_command, path, tmp_path)
    rows = text[text.index('class="ranking sizes"') :]
    rows = rows[: rows.index("</table>")]
    assert [f"<td>{size}</td>" in rows for size in (4, 8, 16, 32)] == [True, True, True, False]
    assert "Runs of 2T tokens" in text and "in the unit of your price, 3 a device-hour" in text
    planner_command(*JOB, "--world-size", "8", "--save", path)
    text = page_of(planner_command, path, tmp_path)
    assert (
        "Runs of 1B tokens, as no number was asked for" in text and "cost " not in text[: text.index("<pre>")]
    )
