"""Rich tables, made where they are printed: rich is imported by the commands that draw."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def console(file: IO[str] | None = None) -> Console:
    """Standard output or another `file`, as wide as the terminal, or 80 columns where there is none.

    If the reader of the output has gone away, printing raises `BrokenPipeError`, as `print` does.
    """
    from rich.console import Console

    class Screen(Console):
        def on_broken_pipe(self) -> None:
            raise

    # Rich would take COLUMNS=0 at its word.
    is_zero = os.environ.get("COLUMNS", "").strip() == "0"
    width = shutil.get_terminal_size().columns if is_zero else None
    return Screen(file=file, width=width, highlight=False, soft_wrap=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[str] = ()) -> Table:
    """A plain table; columns are aligned to the right, except for those named in `left`."""
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column in columns:
        # Words may wrap, numbers never: a cut digit is a wrong number.
        made.add_column(
            column,
            justify="left" if column in left else "right",
            no_wrap=column not in left,
            overflow="fold",
        )
    for row in rows:
        made.add_row(*row)
    return made


def table_text(table: Table) -> str:
    """A table as text, for callers that must not fail where standard output cannot be written."""
    screen = console()
    with screen.capture() as captured:
        screen.print(table)
    return captured.get().rstrip("\n")


def fitted(text: str) -> str:
    """A line of words, wrapped where standard output is a narrower terminal."""
    width = max(shutil.get_terminal_size().columns, 20)
    if len(text) <= width or sys.stdout is None or not sys.stdout.isatty():
        return text
    return textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)


def table_width(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> int:
    """Columns that a `table` of plain letters needs, even beyond the width of the screen."""
    longest = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
    return sum(longest) + len(longest) - 1


def parameter_count(count: float) -> str:
    """A parameter count such as `22.1 B` or `124 M`."""
    return f"{count / 1e9:.1f} B" if count >= 1e9 else f"{count / 1e6:.0f} M"
