"""Lines with styles: drawn by Rich on a terminal, plain text elsewhere.

Loading Rich and drawing with it takes about 15 ms of the 400 ms of a short question. Output to a pipe or a
file does not need Rich.
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
"""Columns of the output where neither a terminal nor the environment gives a width."""

FEWEST_COLUMNS = 20
"""The least number of columns to which paragraphs are wrapped; on a narrower screen Rich cuts them."""

FORCING = ("FORCE_COLOR", "TTY_COMPATIBLE")
"""Environment variables that make Rich draw styles without a terminal, or suppress them on one."""

BLOCKS = "█▓░"
"""The block characters of bars; each is one column wide, as ASCII characters are."""


@dataclass(frozen=True)
class Line:
    """Texts that follow one another on a line, each with the name of its Rich style."""

    parts: tuple[tuple[str, str], ...]

    @classmethod
    def of(cls, text: str = "", style: str = "") -> Line:
        """A line of one text."""
        return cls(((text, style),))

    def plus(self, text: str, style: str = "") -> Line:
        """The line with another text added at its end."""
        return Line((*self.parts, (text, style)))

    def __str__(self) -> str:
        return "".join(text for text, _ in self.parts)


class Screen:
    """Standard output as a console of the library Rich."""

    @cached_property
    def console(self) -> Console:
        """The Rich console that draws the lines."""
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
        """Print a line with its styles."""
        from rich.text import Text

        (text, style), *others = line.parts
        drawn = Text(text, style=style)
        for text, style in others:
            drawn.append(text, style)
        self.console.print(drawn)


class Page(Screen):
    """Standard output that is not a terminal: prints the same text as Rich, without loading it."""

    is_terminal = False

    @cached_property
    def width(self) -> int:
        """Columns of the page, as Rich finds them: those of any terminal of the process."""
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
        """Print a line without its styles; a long line, or one with letters outside ASCII, is left to
        Rich."""
        text = str(line)
        is_plain = text.isprintable() and text.translate(dict.fromkeys(map(ord, BLOCKS))).isascii()
        if is_plain and len(text) <= self.width:
            print(text)
        else:
            super().print(line)


def screen() -> Screen:
    """The screen or the page of standard output."""
    piped = sys.stdout is not None and not sys.stdout.isatty()
    told = any(name in os.environ for name in FORCING) or "IPython" in sys.modules
    if not piped or told or sys.platform == "win32":
        return Screen()
    page = Page()
    return page if page.width >= FEWEST_COLUMNS else Screen()
