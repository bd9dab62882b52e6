"""Lines of an answer: what a pipe takes is what Rich would write there."""

from __future__ import annotations

import sys

import pytest

from cli.lines import BLOCKS, FORCING, Line, Page, Screen, screen

LINES = (
    Line.of("tp=4+sp pp=4", "bold green"),
    Line.of(),
    Line.of("step  489 ms  ")
    .plus(BLOCKS[0] * 9 + BLOCKS[1] * 3, "cyan")
    .plus(BLOCKS[2] * 4, "dim")
    .plus("  end"),
    Line.of("run: planner launch --plan " + "计划" * 30 + ".json", "yellow"),
    Line.of("words " * 40),
    Line.of("é [bold]no markup[/bold] :smile: " + "x" * 90),
)


@pytest.mark.parametrize("columns", ["", "0", "40", "200"])
def test_a_page_has_what_rich_writes_where_nobody_sees_styles(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], columns: str
) -> None:
    for name in FORCING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", columns)
    written = []
    for shown in (Screen(), Page()):
        for line in LINES:
            shown.print(line)
        written.append((shown.width, shown.encoding, shown.is_terminal, capsys.readouterr().out))
    assert written[0] == written[1]


@pytest.mark.parametrize("variable", ["", *FORCING])
def test_rich_draws_for_terminals_and_where_it_is_told_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variable: str
) -> None:
    for name in FORCING:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    assert isinstance(screen(), Page)
    if variable:
        monkeypatch.setenv(variable, "1")
    else:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    drawn = screen()
    assert not isinstance(drawn, Page)
    drawn.print(LINES[0])
    assert "\x1b[" in capsys.readouterr().out or not variable
