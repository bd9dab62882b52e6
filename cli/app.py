"""The typer app of the command `planner`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module, metadata
from typing import Annotated

import typer

from planner.flags import for_words


def _print_version(wanted: bool) -> None:
    if wanted:
        try:
            print(f"planner {metadata.version('llm-parallelism-planner')}")
        except metadata.PackageNotFoundError:
            print("planner (a source tree that is not installed)")
        raise typer.Exit()


def planner(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Plan how to split the training of a language model over a cluster, and run it."""


def make_app(commands: Mapping[str, str], words: Sequence[str]) -> typer.Typer:
    """The command line for `words`: where the first names a command, only that one is imported.

    Args:
        commands: modules of the commands: a function of the command's name, or `app` for a command with its
            own.
    """
    app = typer.Typer(
        name="planner",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        callback=planner,
    )
    for name in [word for word in words[:1] if word in commands] or commands:
        module = import_module(commands[name])
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(for_words(getattr(module, name), words))
    return app
