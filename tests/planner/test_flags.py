"""Flags of commands: groups that are declared only when one of their flags is given."""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from typing import Any

import pytest
import typer

from planner.options.batch import BatchOptions
from planner.options.cluster import ClusterOptions
from planner.options.command import add
from planner.options.flags import flag, flag_groups, flag_names, for_words, run
from planner.options.model import ModelOptions
from planner.options.other_tools import SUBSTITUTES, substitute
from planner.options.parallel import ParallelOptions
from runtime.settings.training_options import DataOptions, OutputOptions, TrainingOptions

GROUPS = (
    *(ModelOptions, ClusterOptions, BatchOptions, ParallelOptions),
    *(TrainingOptions, DataOptions, OutputOptions),
)


@dataclass(frozen=True)
class Usual:
    """Flags of the command."""

    size: int = flag(1, "A number.", "--size", "--n-size")


@dataclass(frozen=True)
class Rare:
    """Flags that few give."""

    rate: float | None = flag(None, "A rate.", hidden=True)


def test_flags_of_late_groups_are_declared_for_words_that_need_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[type] = []
    called: list[tuple[Usual, Rare | None]] = []

    def rare() -> type:
        made.append(Rare)
        return Rare

    @flag_groups(late={"rare": rare}, usual=Usual)
    def command(usual: Usual, rare: Rare | None) -> None:
        """Do something."""
        called.append((usual, rare))

    def invoke(*words: str) -> Any:
        app = typer.Typer(add_completion=False)
        add(app, for_words(command, words))
        monkeypatch.setattr("sys.argv", ["command", *words])
        with pytest.raises(SystemExit) as stop:
            run(app, "command")
        return stop.value.code

    assert invoke("--size", "3") == 0 and invoke("--n-size=4") == 0
    assert made == [] and called == [(Usual(3), None), (Usual(4), None)]
    assert invoke("--size", "3", "--rate=0.5") == 0
    assert made == [Rare] and called[-1] == (Usual(3), Rare(0.5))
    # The message on an unknown flag knows all flags.
    assert invoke("--rat", "1") == 2 and "--rate" in capsys.readouterr().err


def test_flags_that_no_word_names_have_the_defaults_that_help_declares() -> None:
    given: list[dict[str, Any]] = []

    @flag_groups(late={"unused": lambda: Rare}, model=ModelOptions, batch=BatchOptions, plan=ParallelOptions)
    def command(**groups: Any) -> None:
        """Do something."""
        given.append(groups)

    every = for_words(command, ["-h"])
    few = for_words(command, ["--tp", "2"])
    declared = {name: one.default for name, one in inspect.signature(every).parameters.items()}
    assert set(inspect.signature(few).parameters) < set(declared)
    for made in (every, few):
        named = inspect.signature(made).parameters
        made(**{name: default for name, default in declared.items() if name in named})
    assert given[0] == given[1]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--sise 3", "unknown flag --sise: did you mean --size?"),
        ("--n_size 3", "unknown flag --n_size: did you mean --n-size?"),
        ("--quiet", "unknown flag --quiet: `command --help` lists all"),
        ("-x 3", "unknown flag -x: `command --help` lists all"),
        # All at once, whatever stands between them: a number below zero is the value of a flag.
        (
            "--sise -3 --size -4 --quiet=1 --sise 2 --size --what",
            "2 unknown flags: --sise (did you mean --size?), --quiet; `command --help` lists all",
        ),
    ],
)
def test_all_unknown_flags_are_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: str, told: str
) -> None:
    @flag_groups(usual=Usual)
    def command(usual: Usual) -> None:
        """Do something."""

    app = typer.Typer(add_completion=False)
    add(app, command)
    monkeypatch.setattr("sys.argv", ["command", *words.split()])
    with pytest.raises(SystemExit) as stop:
        run(app, "command")
    assert stop.value.code == 2
    assert capsys.readouterr().err == f"command: error: {told}\n"


def test_what_other_tools_call_a_flag_is_known_where_there_is_one_like_it() -> None:
    assert substitute("--train_samples", {"--train-iters": 1}) == "use --train-iters"
    assert substitute("--train-samples", {"--seed": 1}) == ""
    assert substitute("--zero-stage", {"--pin": 1}) == "use --pin zero_stage=VALUE"
    assert substitute("--TP", {"--pin": 1, "--tp": 1}) == "use --tp"
    every = {name for group in GROUPS for field in dataclasses.fields(group) for name in flag_names(field)}
    for name in SUBSTITUTES:
        assert name not in every
        assert substitute(name, every | {"--engine"}), name
