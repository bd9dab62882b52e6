"""Flags of commands: groups that are declared only when one of their flags is given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import typer

from planner.flags import flag, for_words, run, takes


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

    @takes(late={"rare": rare}, usual=Usual)
    def command(usual: Usual, rare: Rare | None) -> None:
        """Do something."""
        called.append((usual, rare))

    def invoke(*words: str) -> Any:
        app = typer.Typer(add_completion=False)
        app.command()(for_words(command, words))
        monkeypatch.setattr("sys.argv", ["command", *words])
        with pytest.raises(SystemExit) as stop:
            run(app, "command")
        return stop.value.code

    assert invoke("--size", "3") == 0 and invoke("--n-size=4") == 0
    assert made == [] and called == [(Usual(3), None), (Usual(4), None)]
    assert invoke("--size", "3", "--rate=0.5") == 0
    assert made == [Rare] and called[-1] == (Usual(3), Rare(0.5))
    # What nobody knows is told with all that is known in mind.
    assert invoke("--rat", "1") == 2 and "--rate" in capsys.readouterr().err
