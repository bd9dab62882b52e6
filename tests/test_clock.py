"""No test may fail because the machine is busy: what the tests themselves keep to."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, settings

from tests.support.jobs import TIMEOUT_S

TESTS = sorted(Path(__file__).parent.rglob("*.py"))

WALL_CLOCKS = ("time.monotonic", "time.perf_counter", "time.time", "monotonic", "perf_counter")

WAITS = ("communicate", "wait", "wait_until", "wait_for")
"""Calls that may be given how long to wait."""

LIMITS = ("timeout", "timeout_s", "deadline")

CHECKS = "suppress_health_check"


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.Call))


def impatient(tree: ast.Module) -> list[str]:
    """Code that goes by the clock in a file of tests: `LINE: CODE`."""
    found: list[ast.Assert | ast.Call] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and any(ast.unparse(c.func) in WALL_CLOCKS for c in calls(node.test)):
            found.append(node)
    for call in calls(tree):
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        limits = [word.value for word in call.keywords if word.arg in LIMITS]
        if name in WAITS:
            limits += call.args[-1:]
        seconds = [one.value for one in limits if isinstance(one, ast.Constant)]
        if any(isinstance(one, int | float) and one < TIMEOUT_S for one in seconds):
            found.append(call)
        checks = [ast.unparse(word.value) for word in call.keywords if word.arg == CHECKS]
        if any("too_slow" not in check for check in checks):
            found.append(call)
    return [f"{node.lineno}: {ast.unparse(node)[:80]}" for node in found]


def test_no_test_goes_by_the_clock() -> None:
    """Time of the own process (`time.process_time`) and ratios of one run may be asserted, seconds not."""
    texts = {str(path): path.read_text() for path in TESTS}
    found = {
        name: impatient(ast.parse(text))
        for name, text in texts.items()
        if any(word in text for word in (*WALL_CLOCKS, *WAITS, *LIMITS, CHECKS))
    }
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_what_goes_by_the_clock_is_found() -> None:
    for line in (
        "assert time.monotonic() - started < 5",
        "job.wait(120)",
        "subprocess.run(words, timeout=60)",
        "wait_until(lambda: ended, 'the end', 5)",
        "settings(deadline=200)",
        "settings(suppress_health_check=[HealthCheck.data_too_large])",
    ):
        assert len(impatient(ast.parse(line))) == 1, line
    assert impatient(ast.parse("job.wait(TIMEOUT_S); assert seconds() < 1; ', '.join(words)")) == []


def test_drawn_examples_have_no_time_limit() -> None:
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check
