"""Lines with styles, on a screen that draws them or, where nobody sees styles, as they are.

To load Rich and to draw with it takes some 15 ms of a short question's 400. What a pipe or a file takes needs
nothing of it.
"""

from __future__ import annotations

import os
import sys
from functools import cached_property
from typing import TYPE_CHECKING

from cli.tables import console
from costmodels.dataclass import dataclass

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS = 80
"""Width where neither a terminal nor the environment says one."""

FEWEST_COLUMNS = 20
"""Columns for which paragraphs are wrapped at least: Rich cuts them on a narrower screen."""

FORCING = ("FORCE_COLOR", "TTY_COMPATIBLE")
"""Variables with which Rich draws styles where standard output is no terminal, or the other way round."""

BLOCKS = "█▓░"
"""The block characters of bars; each is one column wide, as ASCII characters are."""


@dataclass(frozen=True)
class Line:
    """Texts in a row, each with its style in Rich's words."""

    parts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, text: str = "", style: str = "") -> Line:
        """A line of one text."""
        return cls(((text, style),))

    def plus(self, text: str, style: str = "") -> Line:
        """The line with another text behind it."""
        return Line((*self.parts, (text, style)))

    def __str__(self) -> str:
        return "".join(text for text, _ in self.parts)


class Screen:
    """Standard output, as Rich knows it."""

    @cached_property
    def console(self) -> Console:
        """The console that draws."""
        return console()

    @property
    def width(self) -> int:
        """Columns."""
        return self.console.width

    @property
    def encoding(self) -> str:
        """The name of the encoding, in small letters."""
        return self.console.encoding

    @property
    def is_terminal(self) -> bool:
        """Somebody sees styles."""
        return self.console.is_terminal

    def print(self, line: Line) -> None:
        """A line, with its styles."""
        from rich.text import Text

        (text, style), *others = line.parts
        drawn = Text(text, style=style)
        for text, style in others:
            drawn.append(text, style)
        self.console.print(drawn)


class Page(Screen):
    """Standard output that is no terminal: what Rich would write there, without loading it."""

    is_terminal = False

    @cached_property
    def width(self) -> int:
        """Columns, as Rich has them: those of any terminal that the process has, if there is one."""
        given = os.environ.get("COLUMNS", "")
        if given.isdigit():
            return int(given) or COLUMNS
        for stream in range(3):
            try:
                return os.get_terminal_size(stream).columns or COLUMNS
            except OSError:
                continue
        return COLUMNS

    @property
    def encoding(self) -> str:
        """The name of the encoding, in small letters."""
        return (sys.stdout.encoding or "utf-8").lower()

    def print(self, line: Line) -> None:
        """A line without its styles; how wide other letters than ASCII are, and where to cut, Rich knows."""
        text = str(line)
        is_plain = text.isprintable() and text.translate(dict.fromkeys(map(ord, BLOCKS))).isascii()
        if is_plain and len(text) <= self.width:
            print(text)
        else:
            super().print(line)


def screen() -> Screen:
    """Standard output."""
    piped = sys.stdout is not None and not sys.stdout.isatty()
    told = any(name in os.environ for name in FORCING) or "IPython" in sys.modules
    if not piped or told or sys.platform == "win32":
        return Screen()
    page = Page()
    return page if page.width >= FEWEST_COLUMNS else Screen()
