"""The page of all flags, which `python -m tests.support.flag_page` writes from the commands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import typer

from cli.app import make_app
from cli.main import COMMANDS
from tests.support import ROOT

PAGE = ROOT / "docs" / "flags.md"

HEAD = """\
# Flags

The flags of each command, as `planner COMMAND --help` prints them; `python -m tests.support.flag_page` writes
this page. A flag stands once, under its heading, with the commands that take it. Flags that Megatron-LM has
keep its spelling.
"""

OWN = "Options"
"""The heading of flags that belong to no section."""


class Flag(NamedTuple):
    """One row of the page."""

    section: str
    names: str
    text: str


def commands() -> Iterator[tuple[str, Any]]:
    """Each command by the words that it is called with."""
    for first in COMMANDS:
        app: Any = typer.main.get_command(make_app(COMMANDS, [first, "--help"]))
        waiting = [(first, app.commands[first])]
        while waiting:
            words, command = waiting.pop(0)
            if hasattr(command, "commands"):
                waiting += [(f"{words} {name}", below) for name, below in command.commands.items()]
            else:
                yield words, command


def flags() -> dict[Flag, list[str]]:
    """The commands of each flag."""
    found: dict[Flag, list[str]] = {}
    for name, command in commands():
        for param in command.params:
            record = param.get_help_record(typer.Context(command))
            if record is None or param.param_type_name == "argument" or "--help" in param.opts:
                continue
            section = getattr(param, "rich_help_panel", None) or OWN
            found.setdefault(Flag(section, record[0], " ".join(record[1].split())), []).append(name)
    return found


def page() -> str:
    """The text of the page."""
    sections: dict[str, list[str]] = {}
    for flag, names in flags().items():
        text = flag.text.replace("|", "\\|")
        row = f"| `{flag.names}` | {text} | {', '.join(names)} |"
        sections.setdefault(flag.section, []).append(row)
    # Flags of single commands come last.
    order = sorted(sections, key=lambda name: name == OWN)
    parts = [HEAD]
    for section in order:
        title = "Flags of single commands" if section == OWN else section
        parts.append(f"\n## {title}\n\n| flag | does | commands |\n| --- | --- | --- |\n")
        parts += [row + "\n" for row in sections[section]]
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
