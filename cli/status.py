"""A status line that names a command's current work until its answer is ready."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

from cli.tables import console
from runtime.logs.console import UnfailingStream, say

if TYPE_CHECKING:
    from rich.progress import Progress


class Status:
    """A line that moves on a terminal and leaves nothing behind; elsewhere short lines on standard error.

    Errors of writing are not raised.
    """

    def __init__(self) -> None:
        self.on_screen = _is_terminal(sys.stdout)
        """Standard output is a terminal."""
        self.live = self._live() if self.on_screen or _is_terminal(sys.stderr) else None
        self.task = None if self.live is None else self.live.add_task("")
        self.last = ""

    def __enter__(self) -> Status:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def tell(self, what: str) -> None:
        """Show the work that the command begins now."""
        if what == self.last:
            return
        self.last = what
        if self.live is None:
            say(f"planner: {what}", sys.stderr)
        else:
            self.show(what)

    def show(self, what: str) -> None:
        """Show text that changes often; unlike `tell`, on a terminal only."""
        if self.live is not None and self.task is not None:
            self.live.update(self.task, description=what)
            self.live.start()

    def line(self, text: str) -> None:
        """Print a line of the answer on standard output."""
        if self.live is not None and self.on_screen:
            self.live.console.print(text, markup=False, highlight=False)
        else:
            say(text)

    def clear(self) -> None:
        """Remove the moving line from the terminal, before lasting output is printed."""
        if self.live is not None:
            self.live.stop()

    def _live(self) -> Progress:
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        screen = console(UnfailingStream(sys.stdout if self.on_screen else sys.stderr))  # type: ignore[arg-type]
        return Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            TimeElapsedColumn(),
            console=screen,
            transient=True,
            redirect_stdout=self.on_screen,
        )


def _is_terminal(stream: object) -> bool:
    """Return whether lines of `stream` can be overwritten."""
    import os

    isatty = getattr(stream, "isatty", None)
    return bool(isatty and isatty()) and os.environ.get("TERM") not in (None, "", "dumb")
