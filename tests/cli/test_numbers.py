"""Every flag that takes a number, and the numbers that none of them may have."""

from __future__ import annotations

import dataclasses
import sys
import typing
from collections.abc import Iterator
from typing import Any

import pytest

from cli import data, main, suggest
from cli.convert import ConvertOptions
from cli.dryrun import DryRunOptions
from cli.explain import Questions
from cli.training_flags import training_flags
from costmodels.errors import InputError
from planner.options.batch import BatchOptions
from planner.options.budget import BudgetOptions
from planner.options.cluster import ClusterOptions, WorldSizesOptions
from planner.options.flags import flag_names
from planner.options.limits import check_bounds
from planner.options.model import ModelOptions
from planner.options.parallel import ParallelOptions
from runtime.faults.fault_options import FaultOptions
from runtime.generation.generate_options import GenerateOptions
from runtime.job.job import RunOptions
from runtime.launch.launch_options import LaunchOptions, TrialOptions
from runtime.settings.training_options import DataOptions, OutputOptions, TrainingOptions

GROUPS: tuple[type, ...] = (
    *(ModelOptions, WorldSizesOptions, ClusterOptions, BatchOptions, BudgetOptions, ParallelOptions),
    *(TrainingOptions, DataOptions, OutputOptions, FaultOptions, RunOptions, LaunchOptions, GenerateOptions),
    *(TrialOptions, suggest.Output, Questions, DryRunOptions, ConvertOptions, data.Output),
)

HUGE = 10**30

JOB = (
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "64"),
    *("--vocab-size", "512", "--world-size", "2", "--global-batch-size", "4"),
)

ELSEWHERE = ("stage", "rank", "ckpt_step", "seq_length", "context_parallel_size", "data_parallel_size")
"""Fields that are held against a plan or a model, and those of `generate` that are only 1."""


def numbers(group: type) -> Iterator[tuple[dataclasses.Field[Any], type]]:
    """The fields of a group that hold a number, and its kind."""
    for field in dataclasses.fields(group):
        hint = typing.get_type_hints(group)[field.name]
        kinds = {int, float} & set(typing.get_args(hint) or (hint,))
        if kinds:
            yield field, kinds.pop()


BOUNDED = [(group, *item) for group in GROUPS for item in numbers(group) if item[0].metadata.get("within")]

PLANNED = [
    (field, kind)
    for group in (ModelOptions, ClusterOptions, BatchOptions, BudgetOptions, ParallelOptions)
    for field, kind in numbers(group)
    if not field.metadata.get("within")
]


def ended(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> tuple[object, str]:
    """The exit code of `planner` and its last line on standard error."""
    monkeypatch.setattr(sys, "argv", ["planner", *words])
    with pytest.raises(SystemExit) as stop:
        main.main()
    return stop.value.code, capsys.readouterr().err.splitlines()[-1]


def test_numbers_have_bounds_or_are_checked_where_a_job_is_planned() -> None:
    bounded = {(group, field.name) for group, field, _ in BOUNDED}
    planned = {field.name for field, _ in PLANNED}
    left = {
        (group.__name__, field.name)
        for group in GROUPS
        for field, _ in numbers(group)
        if (group, field.name) not in bounded and field.name not in (*planned, *ELSEWHERE)
    }
    assert not left
    # Commands that only take a flag along hold it to the same bounds.
    carried = {
        field.name: field.metadata["within"] for field, _ in numbers(training_flags(but=suggest.Output))
    }
    own = {
        field.name: field.metadata["within"] for group, field, _ in BOUNDED if group is not GenerateOptions
    }
    assert carried == {name: own[name] for name in carried}


@pytest.mark.parametrize(
    ("group", "field", "kind"), BOUNDED, ids=lambda value: getattr(value, "name", None) or value.__name__
)
def test_no_bounds_hold_what_is_no_number_or_beyond_all_reason(
    group: type, field: dataclasses.Field[Any], kind: type
) -> None:
    wrong = (HUGE, -HUGE) if kind is int else (float("nan"), float("inf"), -float("inf"), 1e30)
    for value in wrong:
        with pytest.raises(InputError, match=f"{flag_names(field)[0]} .*: must be "):
            check_bounds(group(**{field.name: value}))
    check_bounds(group())


@pytest.mark.parametrize(("field", "kind"), PLANNED, ids=lambda value: getattr(value, "name", ""))
def test_plans_of_no_number_are_refused_in_one_line(
    field: dataclasses.Field[Any], kind: type, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    name = flag_names(field)[0]
    for value in (str(HUGE), "") if kind is int else ("nan", "1e400", ""):
        code, line = ended(("suggest", *JOB, name, value), monkeypatch, capsys)
        assert code == 2, (name, value, line)
        assert line.startswith("planner: error: ")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("suggest", *JOB, "--lr", "nan"), "--lr nan: must be positive"),
        (("suggest", *JOB, "--top", str(HUGE)), f"--top {HUGE}: must be at least 1, and at most 1e+15"),
        (("explain", *JOB, "--weight-decay", "inf"), "--weight-decay inf: must be 0 (off) or positive"),
        (("dryrun", *JOB, "--eval-iters", "-1"), "--eval-iters -1: must be 0 (off) or positive"),
        (
            ("launch", *JOB, "--straggler-factor", "nan"),
            "--straggler-factor nan: must be 0 (off) or positive",
        ),
        (("generate", "--load", "x", "--top-p", "nan"), "--top-p nan: must be above 0 and at most 1"),
        (
            ("suggest", *JOB, "--group-query-attention", "--num-query-groups", "0"),
            "--num-query-groups 0: must be at least 1",
        ),
        *(
            (("suggest", *JOB, flag, str(HUGE)), f"{flag} {HUGE}: expected a whole number of at least 1")
            for flag in ("--mbs", "--vpp", "--ep", "--etp", "--num-distributed-optimizer-instances")
        ),
        (("suggest", *JOB, "--rampup-batch-size", "1", "1", str(HUGE)), "three whole numbers above 0"),
        (("devices", "--template", "--json"), "--template prints YAML"),
    ],
)
def test_each_command_refuses_such_numbers_in_one_line(
    words: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    code, line = ended(words, monkeypatch, capsys)
    assert code == 2 and says in line
