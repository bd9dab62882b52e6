"""The command `planner`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module, metadata
from typing import Annotated

import typer

from planner.flags import run

COMMANDS = {
    "suggest": "cli.suggest",
    "explain": "cli.explain",
    "launch": "cli.launch",
    "timeline": "cli.timeline",
    "dryrun": "cli.dryrun",
    "models": "cli.catalogues",
    "devices": "cli.catalogues",
    "engines": "cli.catalogues",
    "data": "cli.data",
    "convert": "cli.convert",
    "generate": "cli.generate",
}
"""Modules of the commands: a function of the command's name, or `app` for a command with its own."""


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


def make_app(words: Sequence[str]) -> typer.Typer:
    """The command line for `words`: where the first names a command, only that one is imported."""
    app = typer.Typer(
        name="planner",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        callback=planner,
    )
    for name in [word for word in words[:1] if word in COMMANDS] or COMMANDS:
        module = import_module(COMMANDS[name])
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, name))
    return app


def main() -> None:
    """Run the command line; wrong input ends in one line on stderr and exit code 2 (3: nothing fits)."""
    run(make_app(sys.argv[1:]), "planner")
