"""A run of a plan with the training script of the user's own installation of other software."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from costmodels.errors import InputError
from costmodels.files import write_whole
from costmodels.paths import is_file
from costmodels.spelling import nearest
from planner.formats.nearest import check_expressible, differences
from planner.formats.script_arguments import SCRIPT_STARTS, ScriptStart, passed_on
from planner.formats.targets import export
from planner.formats.writing.written import words_of
from planner.inputs.engine import DEFAULT_ENGINE
from planner.options.flags import arguments
from planner.plan import Plan
from runtime.job.job import Job
from runtime.launch.launch_options import LaunchOptions
from runtime.settings.checks import check_folder


@dataclass(frozen=True)
class ScriptRun:
    """A script to run, with its arguments, files and environment."""

    plan: Plan
    command: tuple[str, ...]
    environment: Mapping[str, str]
    file: Path | None
    """The file written for the software and named by a flag; None if there are only flags."""
    text: str
    notes: tuple[str, ...]
    """Notes on parts of a plan that the software does not support, and on further flags that it needs."""

    def line(self) -> str:
        """The command as typed in a shell."""
        variables = [f"{name}={value}" for name, value in self.environment.items()]
        return (
            shlex.join([*variables, *self.command])
            if not variables
            else (" ".join(variables) + " " + shlex.join(self.command))
        )

    def run(self) -> int:
        """Run the script to its end; returns torchrun's exit code."""
        if self.file is not None:
            check_folder(self.file.parent, "--log-dir")
            write_whole("launch", self.file, self.text)
        return subprocess.run(self.command, env={**os.environ, **self.environment}).returncode


def script_run(job: Job, options: LaunchOptions, log_dir: Path) -> ScriptRun:
    """The run of `options.script` with the plan of a job, on the devices of this machine.

    Raises:
        InputError: the named engine has no script that torchrun starts, or this machine has too few devices.
        NoLayoutFits: nothing fits.
    """
    assert options.script is not None
    plan = _plan(job, options)
    engine = plan.engine.name
    start = _start(engine)
    if not is_file(options.script):
        raise InputError(f"--script {options.script}: no such file; give the training script of {engine}")
    written = export(plan, to=start.target)
    check_expressible(written, options.nearest)
    file = log_dir / f"{start.target}{start.suffix}" if start.file_flag else None
    words = words_of(written.text, "the plan") if file is None else [start.file_flag, str(file)]
    given = [word for group in (job.training, job.data, job.output) for word in arguments(group)]
    passed, kept = passed_on(given, start)
    extra = words_of(options.script_args or "", "--script-args")
    command = (
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={plan.layout.world_size}", options.script, *words, *passed, *extra),
    )
    environment = {name: value for name, value in written.environment.items() if name not in os.environ}
    notes = [f"not expressible in {start.target}: {text}" for text in written.inexpressible]
    notes += [f"to be said in {options.script}: {text}" for text in written.in_script]
    if written.inexpressible:
        notes.append(differences(plan, written))
    if kept:
        notes.append(f"not passed on to {options.script}: {' '.join(kept)}; give --script-args")
    return ScriptRun(plan, command, environment, file, written.text, (*notes, *written.notes))


def _start(engine: str) -> ScriptStart:
    if engine not in SCRIPT_STARTS:
        if engine == DEFAULT_ENGINE:
            raise InputError(
                f"--script runs other software than {DEFAULT_ENGINE}; give --engine, one of "
                f"{', '.join(SCRIPT_STARTS)}"
            )
        known = nearest(engine, SCRIPT_STARTS) or f"those of {', '.join(SCRIPT_STARTS)} are"
        raise InputError(f"--engine {engine}: scripts of it are not started from here; {known}")
    return SCRIPT_STARTS[engine]


def _plan(job: Job, options: LaunchOptions) -> Plan:
    from runtime.job.devices import local_device_count

    here = local_device_count()
    if options.plan is not None:
        plan = Plan.load(options.plan)
    else:
        _start(job.parallel.engine or DEFAULT_ENGINE)
        plan = _searched(job, job.cluster.world_size or here)
    ranks = plan.layout.world_size
    if here and ranks > here:
        raise InputError(f"the plan is for {ranks} devices, and this machine has {here}; plan for {here}")
    return plan


def _searched(job: Job, ranks: int) -> Plan:
    from planner import advice
    from planner.api import search
    from planner.options.search import search_keywords

    if not ranks:
        raise InputError("--script without --plan: no device is seen here; give --world-size and --device")
    spec = job.model.spec()
    cluster = replace(job.cluster, local_world_size=job.cluster.local_world_size or ranks)
    result = search(spec, world_size=ranks, **search_keywords(spec, cluster, job.batch, job.parallel))
    if result.best is None:
        raise advice.no_layout_fits(result)
    return result.best
