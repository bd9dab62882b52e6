"""The script that plants faults, and its lists; all of them: `python -m benchmarks.planted_faults`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from benchmarks.drawn_faults import changes, drawn, likely_tests
from benchmarks.planted_faults import (
    ROOT,
    Fault,
    Outcome,
    chosen,
    counted,
    outcome,
    read_faults,
    staleness,
)
from costmodels.errors import InputError

FAULTS = read_faults()


def fault(old: str, *tests: str, added: str = "") -> Fault:
    return Fault("sums differ", "model/sums.py", old, "a - b", tests or ("one", "other"), added)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A runtime of one function."""
    (tmp_path / "runtime/model").mkdir(parents=True)
    (tmp_path / "runtime/model/sums.py").write_text("def total(a, b):\n    return a + b\n")
    return tmp_path


def test_the_lists_have_faults_of_all_parts_of_training_and_tests_that_exist() -> None:
    assert [name for name, times in Counter(one.name for one in FAULTS).items() if times > 1] == []
    assert len(FAULTS) >= 60 and {one.part for one in FAULTS} >= {
        *("model", "parallel", "train", "optimizers", "settings", "data", "checkpoint"),
        *("faults", "generation", "huggingface", "job"),
    }
    for one in FAULTS:
        assert one.old != one.new and one.tests, one.name
        assert all((ROOT / words.split()[0].partition("::")[0]).is_file() for words in one.tests), one.name


def test_a_fault_is_found_by_the_first_tests_that_fail_and_taken_out_again(tree: Path) -> None:
    path = tree / "runtime/model/sums.py"
    right, asked = path.read_text(), []

    def tests(words: str) -> tuple[int, str]:
        asked.append((words, "a - b" in path.read_text()))
        return (1, "test_of_sums") if words == "other" else (0, "")

    found = outcome(fault("a + b"), tree, tests)
    assert (found.word, found.by, asked) == ("found", "test_of_sums", [("one", True), ("other", True)])
    assert path.read_text() == right
    assert outcome(fault("a + b", "one"), tree, tests).word == "missed"


def test_a_fault_that_cannot_be_planted_is_stale_and_runs_no_tests(tree: Path) -> None:
    for old, reason in (("a * b", "0 times"), ("a", "3 times")):
        result = outcome(fault(old), tree, lambda words: pytest.fail("planted"))
        assert result.word == "stale" and reason in result.by
    assert "no file" in staleness(fault("a + b"), tree / "runtime")


def test_tests_that_do_not_run_find_nothing(tree: Path) -> None:
    assert outcome(fault("a + b"), tree, lambda words: (5, "")).word == "broken"


def test_the_count_says_what_was_found_by_tests_that_were_there() -> None:
    found = [Outcome(fault("a + b", added=added), "found") for added in ("", "", "test_new")]
    assert counted(found) == "3 faults: 3 found; 1 of them by a test that was added for the fault"
    rest = [Outcome(fault("a + b"), word) for word in ("missed", "stale")]
    assert counted([*found[:2], *rest]) == "4 faults: 2 found, 1 missed, 1 stale"


def test_words_that_no_fault_has_are_refused() -> None:
    assert [one.name for one in chosen(FAULTS, "Nesterov")] and chosen(FAULTS, "") == FAULTS
    with pytest.raises(InputError, match="no fault"):
        chosen(FAULTS, "nothing like it")


SUMS = '''
def mean(x, group, size):
    """The mean of a - b."""
    if size < 1:
        raise ValueError(f"{size - 1} ranks")
    print(size * 2)
    dist.all_reduce(x, group=group)
    return x.sum(0)[: size + 1] / size if size > 1 else x.masked_fill(x < 0, 0.0)


class _Scaled(Function):
    def backward(ctx, grad):
        return grad * ctx.scale, None
'''


def test_faults_are_drawn_of_what_computes_and_of_nothing_that_tells(tmp_path: Path) -> None:
    path = tmp_path / "model/sums.py"
    path.parent.mkdir()
    path.write_text(SUMS)
    news = [(SUMS[one.first : one.end].strip(), one.new.strip()) for one in changes(path)]
    kinds = {one.kind for one in changes(path)}
    assert kinds == {
        *("sign", "sign lost", "factor", "factor lost", "border", "axis", "reduction", "call lost"),
        *("condition", "gradient", "step lost"),
    }
    assert {("dist.all_reduce(x, group=group)", "pass"), ("grad * ctx.scale", "None")} <= set(news)
    assert not {"size - 1", "size * 2", "size < 1"} & {old for old, _ in news}
    faults = list(drawn(1, tmp_path))
    assert [one["name"] for one in drawn(1, tmp_path)] == [one["name"] for one in faults]
    # One in a statement, each of which is there once and is Python still.
    assert len(faults) == 3
    for one in faults:
        assert SUMS.count(one["old"]) == 1 and one["old"] != one["new"]
        compile(SUMS.replace(one["old"], one["new"]), one["file"], "exec")


def test_likely_tests_of_a_module_begin_with_its_own() -> None:
    assert likely_tests("parallel/loss.py")[0] == "tests/runtime/test_loss.py"
    assert likely_tests("settings/loss_scale.py")[0] == "tests/runtime/test_precision.py"
