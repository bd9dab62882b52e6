"""Texts of users in files that shells, schedulers and parsers of YAML read: quoted, spelled out, refused."""

from __future__ import annotations

import re
import shlex
import unicodedata
from typing import Literal

from costmodels.errors import InputError

Form = Literal["word", "comment", "value", "text", "line"]
"""The place of a text in a file.

word: one word of a shell's command, whatever is in it;
comment: a part of a line that nobody reads but people;
value: what a directive of a scheduler sets, which no shell reads and no quotes protect;
text: what stands after the name of a parameter, up to the end of its line, or in a scalar of YAML;
line: a line of shell that is run as it is given.
"""

_BREAKS = {"Cc", "Zl", "Zp", "Cs"}
"""Categories of control characters, all line breaks, and halves of characters that no encoding has."""

_VALUE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:@%+/=-]*")


class Shell(str):
    """A part of a command that this package wrote itself, such as `"$NODE_RANK"`: it is not quoted."""

    __slots__ = ()


def written(text: str, form: Form, what: str) -> str:
    """`text` as a file takes it; all that callers give goes into files through this function.

    Args:
        what: source of the text, such as `--partition`, for the message.

    Raises:
        InputError: the text cannot stand there: a line break, a control character, or a blank where nothing
            quotes it.
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
    """The words of a command that is given as one text; raises `InputError` for a quote that does not end."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(
            f"{what} {_shown(text)}: {str(error).lower()}; close it, or write a backslash before it"
        ) from None
