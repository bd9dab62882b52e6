"""Users' texts in files for shells, schedulers and YAML parsers: quoted, escaped or refused."""

from __future__ import annotations

import re
import shlex
import unicodedata
from typing import Literal

from costmodels.errors import InputError

Form = Literal["word", "comment", "value", "text", "line"]
"""The place of a text in a file.

word: one word of a shell command, with any content; comment: a part of a comment line; value: the value of a
scheduler's directive, which no shell reads and no quotes protect; text: the text after the name of a
parameter, up to the end of its line, or a YAML scalar; line: a shell line that is run unchanged.
"""

_BREAKS = {"Cc", "Zl", "Zp", "Cs"}
"""Unicode categories of control characters, line breaks, and unpaired surrogates."""

_VALUE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:@%+/=-]*")


class Shell(str):
    """A part of a command written by this package, such as `"$NODE_RANK"`, which is not quoted."""

    __slots__ = ()


def written(text: str, form: Form, what: str) -> str:
    """`text` in the form for a file; all callers' texts are written through this function.

    Args:
        what: source of the text, such as `--partition`, for the message.

    Raises:
        InputError: the text is not allowed there: a line break, a control character, or a blank that nothing
            quotes.
    """
    if isinstance(text, Shell):
        return str(text)
    if form == "comment":
        return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    bad = next((c for c in text if unicodedata.category(c) in _BREAKS and (form, c) != ("line", "\t")), None)
    if bad is not None:
        raise InputError(
            f"{what} {_shown(text)}: a {_name(bad)} cannot stand in the file that is written; leave it out"
        )
    if form == "value" and not _VALUE.fullmatch(text):
        raise InputError(
            f"{what} {_shown(text)}: expected letters, digits and any of _.,:@%+/=- without blanks"
        )
    return shlex.quote(text) if form == "word" else text


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 80 else text[:77] + "...")


def _name(char: str) -> str:
    if char in "\n\r\x0b\x0c\x85\u2028\u2029":
        return "line break"
    return f"character {ascii(char)[1:-1]}"


def words_of(text: str, what: str) -> list[str]:
    """The words of a command given as one text; raises `InputError` for an unclosed quote."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(
            f"{what} {_shown(text)}: {str(error).lower()}; close it, or write a backslash before it"
        ) from None
