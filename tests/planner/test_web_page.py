"""The page in a browser: the command's answers, links, keys, small screens, and names that mean harm."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlencode

import pytest

from benchmarks.pictures import served

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("plotly")
pytest.importorskip("mcp.client.stdio")  # It takes standard error as it is now, before a fixture replaces it.

import httpx

import planner
from planner.budget.run import spent_text
from planner.service.answers import PLANS
from planner.service.questions import read_question
from planner.web import answer_page
from planner.web.server import MOST_BYTES, question_app
from tests.planner.test_agent_tools import over_stdio
from tests.planner.test_service import comparable, printed
from tests.support import ROOT
from tests.support.browser import chromium, tab
from tests.support.hub import CONFIG

pytestmark = pytest.mark.slow

SMALL = {"model": "gpt2-small", "device": "h100", "world_size": "4", "global_batch_size": "8"}

HOSTILE = '<img src=x onerror="alert(1)"><script>alert(2)</script>'


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    with served(question_app("127.0.0.1")) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as found:
        yield found


def asked(page: Any, site: str, question: dict[str, str]) -> dict[str, Any]:
    """The answer that a page gets to the question in its address, once it is shown."""
    with page.expect_response("**/answer") as response:
        address = f"{site}#{urlencode(question)}"
        if page.url.startswith(site):
            page.evaluate("(url) => { location.href = url; }", address)
        else:
            page.goto(address)
    page.locator("#found:not([aria-busy])").wait_for(state="attached")
    found: dict[str, Any] = response.value.json()
    return found


def fact(page: Any, name: str) -> str:
    """A fact of the plan that a page shows."""
    return str(page.locator(f"dt:text-is('{name}') + dd").first.inner_text())


MODELS = {
    "gpt2-small": ("a100-80g", "h100"),
    "llama3-8b": ("h200", "mi300x"),
    "gpt2-medium": ("l40s", "b200"),
    "qwen1.5-moe-a2.7b": ("h200",),
}
"""Models, and devices for them."""


def random_questions(count: int) -> list[dict[str, str]]:
    """Questions whose answers differ in model, devices, batch, number format, engine and adapters."""
    draw = random.Random(51)
    found = []
    for _ in range(count):
        model = draw.choice(list(MODELS))
        question = {
            "model": model,
            "device": draw.choice(MODELS[model]),
            "world_size": str(draw.choice((2, 4, 8))),
            draw.choice(("global_batch_size", "max_global_batch_size")): str(draw.choice((16, 32))),
            "engine": draw.choice(("bundled", "megatron", "bundled", "torchtitan")),
        }
        if draw.random() < 0.3:
            question["precision"] = "bf16"
        if draw.random() < 0.3:
            question["pin"] = draw.choice(("tp=2", "pp=2", "zero=1", "mbs=1"))
        found.append(question)
    return found


def test_twenty_random_questions_have_one_plan_wherever_they_are_asked(
    site: str, browser: Any, planner_command: Any
) -> None:
    questions = random_questions(20)
    assert {one["model"] for one in questions} == set(MODELS)
    assert {one["engine"] for one in questions} == {"bundled", "megatron", "torchtitan"}
    jobs: list[dict[str, Any]] = [
        {name: int(value) if value.isdigit() else value for name, value in question.items()}
        for question in questions
    ]
    # The browser's driver has the event loop of this thread.
    with ThreadPoolExecutor(1) as thread:
        calls = [("suggest", {**job, "top": PLANS}) for job in jobs]
        told = thread.submit(over_stdio, *calls).result()[1]
    with tab(browser) as (page, complaints):
        for question, job, result in zip(questions, jobs, told, strict=True):
            found = asked(page, site, question)
            words = read_question(question).words
            typed = printed(planner_command, words)
            assert comparable(found["answer"]) == typed, words
            assert comparable(result.structured_content) == typed, words
            plan = planner.suggest(job.pop("model"), **job)
            assert fact(page, "layout") == plan.layout.describe()
            assert found["answer"]["plans"][0]["layout"] == json.loads(plan.layout.model_dump_json())
    assert not complaints


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_all_of_an_answer_is_shown(site: str, browser: Any, width: int, scheme: str) -> None:
    question = {"model": "llama3-8b", "device": "h100", "world_size": "16", "global_batch_size": "64"}
    more = {"pin": "pp=2", "tokens": "1T", "price_per_hour": "$2", "script": "kubernetes"}
    with tab(browser, width, scheme, has_touch=width < 600) as (page, complaints):
        found = asked(page, site, question | more)
        names = ["step-time", "memory", "pipeline", "range"]
        page.locator("html[data-drawn='4']").wait_for()
        shown = page.evaluate("[...document.querySelectorAll('.js-plotly-plot')].map((one) => one.id)")
        assert shown == names
        plan = planner.suggest("llama3-8b", device="h100", world_size=16, global_batch_size=64, pin=["pp=2"])
        run = plan.run("1T", "$2")
        assert fact(page, "1T tokens") == spent_text(run)
        assert "apiVersion:" in page.locator("#file pre").inner_text()
        assert page.locator("#command").inner_text().startswith("planner suggest --model llama3-8b")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        with page.expect_download() as saved:
            page.locator("a[data-file='plan.json']").click()
        text = saved.value.path().read_text()
        assert text == found["files"]["plan.json"]
        # A link that is opened elsewhere shows the same.
        with tab(browser, width, scheme) as (other, others):
            with other.expect_response("**/answer") as response:
                other.goto(page.url)
            assert comparable(response.value.json()["answer"]) == comparable(found["answer"])
            other.locator("html[data-drawn='4']").wait_for()
            assert other.locator("#found header").inner_text() == page.locator("#found header").inner_text()
            assert not others
    assert not complaints


def test_the_plan_of_a_page_is_a_plan_file(tmp_path: Any) -> None:
    found = answer_page.page_answer(SMALL)
    (tmp_path / "plan.json").write_text(found["files"]["plan.json"])
    plan = planner.Plan.load(tmp_path / "plan.json")
    best = planner.suggest("gpt2-small", device="h100", world_size=4, global_batch_size=8)
    assert plan.layout == best.layout


def test_a_question_is_asked_with_keys_alone_and_stands_in_the_address(site: str, browser: Any) -> None:
    with tab(browser) as (page, complaints):
        asked(page, site, SMALL)
        page.locator("input[name=model]").focus()
        names = []
        for _ in range(12):
            names.append(page.evaluate("document.activeElement.name"))
            if names[-1] == "world_size":
                page.keyboard.press("Control+A")
                page.keyboard.type("2")
            page.keyboard.press("Tab")
        assert names[:5] == ["model", "config", "seq_length", "device", "world_size"]
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Enter")
        page.locator("h1:text-is('gpt2-small on 2 x h100')").wait_for()
        assert "world_size=2" in page.url
        # Keys reach what follows the form, and the focus is seen.
        page.keyboard.press("Tab")
        assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    assert not complaints


def test_what_does_not_fit_is_changed_by_a_button(site: str, browser: Any) -> None:
    question = {"model": "llama2-70b", "device": "a100-80g", "world_size": "4", "max_global_batch_size": "8"}
    with tab(browser) as (page, complaints):
        found = asked(page, site, question)
        assert not found["answer"]["feasible"]
        assert "no layout of llama2-70b fits" in page.locator(".error").inner_text()
        proposals = [json.loads(page.locator("[data-fields]").nth(0).get_attribute("data-fields"))]
        with page.expect_response("**/answer") as response:
            page.locator("[data-fields]").nth(0).click()
        changed = response.value.json()["answer"]
        assert changed["feasible"] and proposals[0]
        assert all(f"{name}=" in page.url for name in proposals[0])
    assert not complaints


def test_a_config_of_ones_own_is_pasted(site: str, browser: Any) -> None:
    question = {"model": f"me/{HOSTILE}", "config": json.dumps(CONFIG | {"_name_or_path": HOSTILE})}
    with tab(browser) as (page, complaints):
        found = asked(page, site, question | {"world_size": "8", "device": "h100", "global_batch_size": "16"})
        assert found["answer"]["model"]["layers"] == 16
        assert page.locator("#found img, #found script").count() == 0
        assert found["config_file"].endswith(".json") and "<" not in found["config_file"]
    assert not complaints


def test_a_first_visit_ends_at_the_answer_for_a_model_of_ones_own(site: str, browser: Any) -> None:
    front = (ROOT / "docs" / "index.md").read_text()
    assert "$ pip install '.[web]'\n$ planner web\n" in front and "(pictures/web-first-1280" in front
    with tab(browser, 390, has_touch=True, is_mobile=True) as (page, complaints):
        page.goto(site)
        page.locator("h1:text-is('llama3-8b on 8 x h100')").wait_for()
        page.locator("textarea[name=config]").fill(json.dumps(CONFIG))
        page.locator("button[type=submit]").click()
        # The model of the page's own question names no other model, and Plan goes to the answer.
        page.locator("h1:text-is('pasted on 8 x h100')").wait_for()
        heading = page.locator("h1").bounding_box()
        assert 0 <= heading["y"] < 450 and heading["x"] + heading["width"] <= 390
        assert page.locator("input[name=model]").input_value() == "" and "model=" not in page.url
        page.locator("input[name=model]").fill("mine")
        page.locator("h1:text-is('mine on 8 x h100')").wait_for()
        page.locator("textarea[name=config]").fill(json.dumps(CONFIG | {"num_hidden_layers": 8}))
        page.wait_for_url("**num_hidden_layers%22%3A+8**")
        page.locator("#found:not([aria-busy]) h1:text-is('mine on 8 x h100')").wait_for()
    assert not complaints


def test_hostile_values_are_text(site: str, browser: Any) -> None:
    with tab(browser) as (page, complaints):
        for name in ("model", "device", "engine", "precision", "pin", "layout", "script", "tokens", HOSTILE):
            asked(page, site, SMALL | {name: HOSTILE})
            assert page.locator("#found img, #found script").count() == 0
            if name != HOSTILE:
                assert "<img" in page.locator("#found").inner_text()
    assert not complaints


def test_a_fault_of_the_planner_is_one_line_of_the_page(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(answer_page, "page_answer", lambda question: {"error": object()})
    assert json.loads(answer_page.answer_text({})) == {
        "error": "the planner failed on this question (TypeError), which is a bug of the planner"
    }
    assert "Traceback" in capsys.readouterr().err


def test_a_question_has_bounds(site: str) -> None:
    good = {"model": "gpt2-small", "device": "h100", "world_size": "2", "global_batch_size": "8"}
    kind = {"Content-Type": "application/json"}
    for body, headers, message in (
        (b"x" * (MOST_BYTES + 1), kind, "at most 1 MiB"),
        (json.dumps(good).encode(), {"Content-Type": "text/plain"}, "sent as application/json"),
        (b"[1]", kind, "one JSON object"),
        (b"[" * 100_000, kind, "one JSON object"),
        (json.dumps(good | {"global_batch_size": {}}).encode(), kind, "expected one value, not a dict"),
        (json.dumps(good | {"network_table": "/etc/passwd"}).encode(), kind, "no files are read here"),
    ):
        answer = httpx.post(f"{site}answer", content=body, headers=headers, timeout=None)
        assert message in answer.json()["error"] and "Traceback" not in answer.text
    # A name that somebody else's server has pointed at this machine is not this page's.
    assert httpx.get(site, headers={"Host": "evil.example"}, timeout=None).status_code == 400
    assert httpx.get(f"{site}assets/../server.py", timeout=None).status_code == 404
    page = httpx.get(site, timeout=None)
    assert "script-src 'self';" in page.headers["Content-Security-Policy"]
