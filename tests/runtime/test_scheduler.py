"""Which processes of a scheduler are a job of their own, by the variables that it sets."""

from __future__ import annotations

import pytest

from costmodels.errors import InputError
from runtime.processes.scheduler import check_one_task

STEP = {"SLURM_JOB_ID": "9", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}
"""What srun sets, but for the number of tasks."""

AGENT = {"RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
"""What torchrun sets, but for numbers of ranks."""


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        (STEP | {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS=2"),
        (STEP | {"SLURM_NTASKS": "2"}, "SLURM_NTASKS=2"),
        ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1"}, "SLURM_NTASKS=2"),
        # In a batch script, but of srun.
        (STEP | {"ENVIRONMENT": "BATCH", "SLURM_STEP_NUM_TASKS": "4"}, "SLURM_STEP_NUM_TASKS=4"),
        # Of srun --pty, but not the task that has the terminal.
        (STEP | {"SLURM_PTY_PORT": "7", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, "SLURM_NTASKS=2"),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "OMPI_COMM_WORLD_SIZE=2"),
        ({"PMI_SIZE": "8", "PMI_RANK": "0"}, "PMI_SIZE=8"),
        ({"PMIX_RANK": "3"}, "PMIX_RANK=3"),
    ],
)
def test_one_of_several_tasks_is_refused(environment: dict[str, str], named: str) -> None:
    for joins in (False, True):
        with pytest.raises(InputError, match=f"^{named}: the scheduler has started this .* times"):
            check_one_task(environment, joins)


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "2"},  # The shell of salloc.
        {"SLURM_JOB_ID": "9", "SLURM_NTASKS": "2", "SLURM_PROCID": "0", "ENVIRONMENT": "BATCH"},
        STEP | {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "2"},  # The same as a step.
        STEP | {"SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "1"},
        STEP | {"SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8", "SLURM_PTY_PORT": "7"},  # srun --pty bash.
        {"OMPI_COMM_WORLD_SIZE": "1", "PMIX_RANK": "0"},
        {"OMPI_COMM_WORLD_SIZE": "two"},
    ],
)
def test_a_task_of_its_own_may_run(environment: dict[str, str]) -> None:
    for joins in (False, True):
        check_one_task(environment, joins)


@pytest.mark.parametrize(
    "ranks",
    [
        {"WORLD_SIZE": "16", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"},
        # The last of several nodes: the others were lost.
        {"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "job-9"},
        # Without torchrun, by variables of the user's own.
        {"WORLD_SIZE": "2"},
    ],
)
def test_ranks_that_know_of_each_other_are_one_job(ranks: dict[str, str]) -> None:
    check_one_task(STEP | {"SLURM_STEP_NUM_TASKS": "2"} | AGENT | ranks, joins=True)


@pytest.mark.parametrize("run", ["none", "0b3e6f6a-53a8-4d3b-8e0e-3c7f0f3c9d11"])
def test_several_torchruns_that_do_not_know_of_each_other_are_refused(run: str) -> None:
    alone = {"WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": run}
    with pytest.raises(InputError, match="SLURM_STEP_NUM_TASKS=2"):
        check_one_task(STEP | {"SLURM_STEP_NUM_TASKS": "2"} | AGENT | alone, joins=True)


def test_a_launcher_is_no_rank() -> None:
    check_one_task(AGENT | {"WORLD_SIZE": "1"})
    with pytest.raises(InputError, match="WORLD_SIZE=2, RANK=0: this is one of several processes"):
        check_one_task(AGENT | {"WORLD_SIZE": "2"})
