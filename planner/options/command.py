"""A command of the command line: help in sections, and one message that names all unknown flags."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import typer
from typer.core import TyperCommand

from costmodels.errors import InputError
from costmodels.spelling import nearest
from planner.options.other_tools import substitute

HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
"""Context settings of every app."""

WIDTH = 78
"""Columns of unwrapped help text, beside an indentation."""

_NUMBER = re.compile(r"-[\d.]")


class Command(TyperCommand):
    """The command that `add` makes of a function."""

    def __init__(self, *words: Any, **settings: Any) -> None:
        super().__init__(*words, **settings)
        for param in self.params:
            _leave_absent(param)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse unknown flags, all at once; the parser would stop at the first."""
        if not ctx.resilient_parsing:
            check_flags(self.get_params(ctx), args, ctx.command_path)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options under the headings of their sections; sections are in the order of their first
        options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                usual = "Arguments" if param.param_type_name == "argument" else "Options"
                section = getattr(param, "rich_help_panel", None) or usual
                sections.setdefault(section, []).append((_folded(record[0]), record[1]))
        for section, records in sections.items():
            with formatter.section(section):
                formatter.write_dl(records)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the closing notes, with blank lines between them."""
        if self.epilog:
            formatter.write_paragraph()
            formatter.write(self.epilog.rstrip() + "\n")


def _leave_absent(param: Any) -> None:
    """Make a flag that is not given None without a validator; validators take a twentieth of a question's
    time."""
    process = param.process_value
    if param.required or param.callback or param.multiple or param.nargs != 1:
        return
    param.process_value = lambda ctx, value: None if value is None else process(ctx, value)


def add(
    app: typer.Typer,
    function: Callable[..., None],
    name: str | None = None,
    kind: type[TyperCommand] = Command,
    examples: Sequence[str] = (),
) -> None:
    """Make a command of a function; its help ends with `examples` and with the notes of `flag_groups`."""
    shown = epilog_section("Examples", "\n".join(examples)) if examples else ""
    epilog = "\n\n".join(filter(None, [getattr(function, "epilog", ""), shown]))
    # Its first sentence, whole: a list of commands would cut it.
    short = " ".join((inspect.getdoc(function) or "").split("\n\n")[0].split())
    app.command(name, cls=kind, epilog=epilog, short_help=short, context_settings=HELP)(function)


def _folded(names: str) -> str:
    """The spellings of a flag, on two lines where one line would be too long."""
    if len(names) <= WIDTH:
        return names
    middle = names.index(", ") + 1
    return f"{names[:middle]}\n     {names[middle:]}"


def epilog_section(title: str, text: str) -> str:
    """A section at the end of the help: a heading, and lines below it."""
    return f"{title}:\n{textwrap.indent(text, '  ')}"


def name_list(names: Iterable[str]) -> str:
    """Lines of names with commas between them; no name is broken."""
    return textwrap.fill(", ".join(names), WIDTH, break_on_hyphens=False, break_long_words=False)


def check_flags(params: Sequence[Any], words: Sequence[str], command: str) -> None:
    """Raise `InputError` that names every flag of `words` that is not in `params`, with similar flags.

    Args:
        params: parameters of the command.
        command: name of the command, as the user types it.
    """
    following = {
        name: 0 if getattr(param, "is_flag", False) else param.nargs
        for param in params
        if param.param_type_name == "option"
        for name in (*param.opts, *param.secondary_opts)
    }
    unknown = list(dict.fromkeys(_unknown(following, words)))
    if not unknown:
        return
    hints = [(name, substitute(name, following) or nearest(name, following)) for name in unknown]
    listing = f"`{command} --help` lists all"
    if len(hints) == 1:
        name, hint = hints[0]
        raise InputError(f"unknown flag {name}: {hint or listing}")
    parts = [f"{name} ({hint})" if hint else name for name, hint in hints]
    raise InputError(f"{len(parts)} unknown flags: {', '.join(parts)}; {listing}")


def _unknown(following: dict[str, int], words: Sequence[str]) -> Iterator[str]:
    """Words that look like flags but are unknown; `following` gives the number of words that a flag takes."""
    rest = iter(words)
    for word in rest:
        if word == "--":
            return
        name, equals, _ = word.partition("=")
        if name in following:
            for _ in range(following[name] - bool(equals)):
                next(rest, None)
        elif word.startswith("-") and word != "-" and not _NUMBER.match(word):
            yield name
