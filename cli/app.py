"""The typer app of the command `planner`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Annotated

import typer

from cli.help_examples import EXAMPLES
from planner.formats.pasted import PastedCommand, PlanningCommand
from planner.options.command import HELP, Command, add
from planner.options.flags import for_words
from planner.version import version


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"planner {version() or '(a source tree that is not installed)'}")
        raise typer.Exit()


def planner(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan how to split the training of a language model over a cluster, and run it."""


def _nothing() -> None:
    """A command that only gives its name to shell completion; it does nothing."""


def _to_complete() -> list[str] | None:
    """The words of the command line that a shell wants completed; None without shell completion."""
    if "_PLANNER_COMPLETE" not in os.environ:
        return None
    typed = os.environ.get("COMP_WORDS") or os.environ.get("_TYPER_COMPLETE_ARGS", "")
    return typed.split()[1:]


KINDS: dict[str, type[Command]] = {
    "suggest": PlanningCommand,
    "explain": PlanningCommand,
    "dryrun": PlanningCommand,
    "launch": PastedCommand,
}
"""Commands that take pasted training commands."""


def make_app(commands: Mapping[str, str], words: Sequence[str]) -> typer.Typer:
    """The typer app for the command line `words`; only the command that its first word names is imported.

    The same holds for shell completion. If the line to complete has no command yet, the app has names only.

    Args:
        commands: modules of the commands: a function of the command's name, or `app` for a command with its
            own.
    """
    app = typer.Typer(
        name="planner",
        no_args_is_help=True,
        context_settings=HELP,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        callback=planner,
    )
    unfinished = _to_complete()
    words = words if unfinished is None else unfinished
    chosen = [word for word in words[:1] if word in commands]
    for name in chosen or commands:
        if unfinished is not None and not chosen:
            app.command(name)(_nothing)
            continue
        module = import_module(commands[name])
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            function = for_words(getattr(module, name.replace("-", "_")), words)
            add(app, function, name, KINDS.get(name, Command), EXAMPLES.get(name, ()))
    return app
