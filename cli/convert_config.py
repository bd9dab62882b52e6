"""`planner convert-config`: a configuration of one software in the words of another."""

from __future__ import annotations

import sys
from typing import Any, ClassVar, cast

from cli.written_plans import print_notes
from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.files import write_whole
from planner.formats.check import CheckKeywords
from planner.formats.conversion import convert_config as converted
from planner.formats.nearest import check_expressible
from planner.formats.targets import TARGETS
from planner.options.cluster import ClusterOptions
from planner.options.flags import argument, flag, flag_groups


@dataclass(frozen=True)
class ConvertConfigOptions:
    """The files to read and the file to write."""

    SECTIONS: ClassVar[dict[str, str]] = {"define": "Files", "to": "Output"}

    files: list[str] = argument(
        "A script or configuration that `planner check` reads; beside it a config.json or YAML file of the "
        "model. Nothing in them is run.",
        "FILE...",
    )
    define: list[str] = flag(
        [], "Environment variable of a script, or the value of a key; repeatable.", metavar="NAME=VALUE"
    )
    to: str = flag("", f"Software: {', '.join(TARGETS)}.", metavar="NAME")
    out: str | None = flag(None, "File to write; standard output unless given.", metavar="FILE")
    nearest: bool = flag(
        False, "Write the nearest job where the other software does not support a part of this one."
    )


@flag_groups(options=ConvertConfigOptions, cluster=ClusterOptions)
def convert_config(options: ConvertConfigOptions, cluster: ClusterOptions) -> None:
    """Write the job of a script or configuration as the flags or the file of other software.

    If the software does not support a part of the job, nothing is written and the exit code is 5. With
    --nearest the nearest job is written, and its difference in time and memory is printed.
    """
    if not options.to:
        raise InputError(f"--to is missing: expected {', '.join(TARGETS)}")
    given: dict[str, Any] = {
        "world_size": cluster.world_size,
        "local_world_size": cluster.local_world_size,
        "device": cluster.device,
        "define": options.define,
        **cluster.network(),
    }
    found = converted(options.files, to=options.to, **cast(CheckKeywords, given))
    check_expressible(found.export, options.nearest)
    if options.out is None:
        print(found.text, end="")
    else:
        write_whole("convert-config", options.out, found.text)
        print(f"planner: saved {options.out}", file=sys.stderr)
    for text in found.reading.assumed:
        print(f"planner: assumed: {text}", file=sys.stderr)
    if found.unconverted:
        print(f"planner: not converted: {' '.join(found.unconverted)}", file=sys.stderr)
    print_notes(found.plan, found.export)
