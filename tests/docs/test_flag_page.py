"""The page of flags is that of the commands."""

from __future__ import annotations

from cli.main import COMMANDS
from tests.support.flag_page import PAGE, commands, flags, page


def test_the_page_of_flags_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.support.flag_page writes it"


def test_every_command_has_its_flags_in_it() -> None:
    named = {name for names in flags().values() for name in names}
    assert {"suggest", "launch", "data prepare"} <= named
    assert {name.split()[0] for name, _ in commands()} == set(COMMANDS)
