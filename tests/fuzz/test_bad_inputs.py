"""The table of wrong inputs, the judge of how they end, and a few; all: `python -m tests.fuzz.bad_inputs`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fuzz.bad_inputs import Case, End, faults, prepare, read_cases
from tests.support.commands import Command

CASES = read_cases()

FEW = [case for case in CASES if case.group in ("network tables", "models in files") and case.files][::4]
"""Some that read a file of the user."""


def test_the_table_has_hundreds_of_different_inputs() -> None:
    known = Counter(repr(case) for case in CASES)
    assert [text for text, times in known.items() if times > 1] == []
    wrong = [case for case in CASES if case.code]
    assert len(wrong) >= 200 and {case.code for case in wrong} <= {2, 3, 4}
    for command in (
        "suggest",
        "explain",
        "launch",
        "timeline",
        "dryrun",
        "data",
        "convert",
        "generate",
        "rank",
    ):
        assert any(case.words[0] == command for case in wrong), command
    assert any(case.process for case in wrong) and any(case.env for case in wrong)


def test_the_judge_finds_what_is_wrong_with_an_end() -> None:
    case = Case("numbers", ("suggest", "--top", "0"), 2, ("--top 0",))
    good = End(2, "planner: planning\nplanner: error: --top 0: must be at least 1\n", 0.5, 0.5, ())
    assert faults(case, good, 0.5) == []
    for change, what in (
        ({"code": None}, "hangs"),
        ({"code": 1}, "exit code 1 instead of 2"),
        ({"err": "Traceback (most recent call last):\nKeyError: 'x'\n"}, "traceback: KeyError"),
        ({"err": good.err * 2}, "2 lines of error"),
        ({"err": good.err + "and more\n"}, "1 lines of error among 3"),
        ({"err": "planner: error: no\n"}, "does not say '--top 0'"),
        ({"left": ("runs",)}, "leaves runs"),
        ({"cpu_s": 60.0}, "takes 60.0 s of the processor, 120 x --version"),
    ):
        found = faults(case, replace(good, **change), 0.5)  # type: ignore[arg-type]
        assert any(line.startswith(what) for line in found), (change, found)


@pytest.mark.parametrize("case", FEW, ids=[str(number) for number in range(len(FEW))])
def test_some_of_the_inputs_end_as_they_must(
    planner_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: Case
) -> None:
    monkeypatch.chdir(tmp_path)
    words = prepare(case, tmp_path, {})
    before = sorted(tmp_path.rglob("*"))
    code, _, err = planner_command(*words)
    assert faults(case, End(code, err, 0.0, 0.0, ()), 1.0) == []
    assert sorted(tmp_path.rglob("*")) == before
