"""Notes of commands on flags that have no effect on their answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterable, Iterator
from typing import Any

from planner.inputs.engine import DEFAULT_ENGINE
from planner.options.flags import arguments, flag_names
from planner.options.parallel import ParallelOptions
from runtime.settings.job_rules import BY_FLAG


def unused_flag_notes(
    unused: Any, what: str, heeded: Container[str] = BY_FLAG, also: Iterable[str] = ()
) -> Iterator[str]:
    """A note on given flags of other commands, and on the flags `also`, that do not affect `what`; the fields
    `heeded` do affect it."""
    given: list[str] = []
    if unused is not None:
        words = arguments(unused)
        names = {flag_names(field)[0]: field.name for field in dataclasses.fields(unused)}
        given = [name for name, field in names.items() if name in words and field not in heeded]
    given += also
    if given:
        yield f"not used for {what}: {', '.join(given)}"


def planning_flag_notes(unused: Any, parallel: ParallelOptions, engine: str) -> Iterator[str]:
    """Notes on given flags of other commands that rule out no layout, and on flags that are always on in this
    package's runtime."""
    own = engine == DEFAULT_ENGINE
    return unused_flag_notes(
        unused, "planning", BY_FLAG if own else (), () if own else parallel.given_accepted()
    )
