"""The plans of the kinds of jobs for a GPU, made without one."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

from benchmarks.gpu_kinds.attempts import AS_IT_IS, Machine, commands
from benchmarks.gpu_kinds.kinds import Kind
from costmodels.catalogue import load_device
from planner.plan import Plan
from runtime import pretrain
from runtime.job.job import Job
from runtime.job.plan_search import search_for_job

HOPPER, BLACKWELL = "h100", "b200"


def plans(kind: Kind, machine: Machine) -> Iterator[Plan]:
    """The plans of the training commands of a kind, checked like the plan of a rank."""
    jobs: list[Job] = []

    def keep(job: Job) -> int:
        jobs.append(job)
        return 0

    for module, *words in commands(kind, AS_IT_IS, machine):
        if module != "runtime.pretrain":
            continue
        loads = "--load" in words
        if loads:
            # The checkpoint that an earlier command of the kind writes.
            at = words.index("--load")
            del words[at : at + 2]
        with patch.object(pretrain, "train", keep):
            pretrain.app(words, standalone_mode=False)
        device = load_device(BLACKWELL if kind.capability > (9, 0) else HOPPER)
        plan = search_for_job(jobs[-1], device, 1, 1, None).plan(0)
        if not loads:
            pretrain.check_job(plan, jobs[-1], 1)
        yield plan
