"""Tapes of units that nobody has recorded yet, for plans that are priced later.

As a program with the file of a plan it does so at the lowest priority, as `planner launch` runs it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from costmodels.spec.layout import SPLIT_BACKWARD
from costmodels.tapes import player, store
from costmodels.tapes.structure import Structure
from planner.plan import Plan
from planner.ranking.exact_memory import has_exact_memory
from runtime import entry
from runtime.processes.tether import tether

LOWEST_PRIORITY = 19


def unrecorded(plan: Plan) -> tuple[Structure, ...]:
    """The structures of a plan that have no tape; none where tapes would not be played."""
    compiled = plan.layout.schedule not in SPLIT_BACKWARD
    where = plan.model, plan.layout, compiled
    if not has_exact_memory(plan.cluster, plan.engine) or not player.is_playable(*where):
        return ()
    return player.missing(*where)


def record_unrecorded(plan: Plan) -> None:
    """Record what a plan lacks into the user's cache, tape by tape: what ends it loses none.

    Raises:
        OSError: it cannot be written.
    """
    structures = unrecorded(plan)
    if not structures:
        return
    from runtime.dryrun.tape_recorder import record_tapes  # It loads PyTorch.

    splits = plan.layout.schedule in SPLIT_BACKWARD
    record_tapes(structures, store.cache_path(store.default_version()), at_once=1, splits=splits)


class BackgroundRecording:
    """Records the tapes that a plan lacks in a process of its own, which ends with the `with` block."""

    def __init__(self, plan: Plan, path: Path) -> None:
        self.plan, self.path = plan, path
        self.process: subprocess.Popen[bytes] | None = None
        self.started = False

    def start(self) -> None:
        """Begin, unless there is nothing to record or it has begun."""
        if self.started:
            return
        self.started = True
        if not unrecorded(self.plan):
            return
        # Fake tensors need no device, and a driver's context would take memory from the job.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        # The job does not depend on it.
        with contextlib.suppress(OSError):
            self.process = subprocess.Popen(
                tether(entry.command("runtime.dryrun.missing_tapes", str(self.path))),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )

    def __enter__(self) -> BackgroundRecording:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it; what is recorded is kept."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def main() -> None:
    """Record what the plan of a file lacks."""
    os.nice(LOWEST_PRIORITY)
    record_unrecorded(Plan.load(sys.argv[1]))


if __name__ == "__main__":
    main()
