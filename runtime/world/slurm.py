"""Tasks of Slurm, from the variables that `srun` sets."""

from __future__ import annotations

import itertools
import re

from costmodels.errors import InputError
from runtime.world.task import LOOPBACK, Environment, Task, common_number, master_port, number

FIRST_SPECIAL_STEP = 0xFFFFFFF0
"""Slurm's step numbers from here on are not of srun, but of the batch script and of salloc's shell."""

MOST_NODES = 1 << 20

_RANGE = re.compile(r"\[([^]]*)\]")


def slurm_task(environment: Environment) -> Task | None:
    """This process's srun task; None if it is not a task of srun, or the only one."""
    if not is_step(environment):
        return None
    step = number(environment, "SLURM_STEP_NUM_TASKS")
    # That of the step is right; the other one may be the whole allocation's.
    count = step if step is not None else number(environment, "SLURM_NTASKS")
    if count is None or count < 2:
        return None
    place = common_number(environment, "SLURM_PROCID", "PMIX_RANK", "PMI_RANK")
    assert place is not None
    others = number(environment, "PMI_SIZE")
    if others not in (None, count):
        raise InputError(
            f"PMI_SIZE={others}, but Slurm has started {count} tasks; these variables contradict each other"
        )
    nodes = _count(environment, ("SLURM_STEP_NUM_NODES", "SLURM_NNODES", "SLURM_JOB_NUM_NODES"), count)
    names = host_names(environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", ""))
    if names and len(names) != nodes:
        raise InputError(
            f"Slurm: {nodes} nodes, but its list of nodes names {len(names)}; these variables contradict "
            f"each other"
        )
    local_count = _tasks_here(environment, count, nodes)
    source = f"SLURM_STEP_NUM_TASKS={count}" if step is not None else f"SLURM_NTASKS={count}"
    address = environment.get("MASTER_ADDR") or (names[0] if names else None)
    job = f"slurm {environment.get('SLURM_JOB_ID', '')}.{environment.get('SLURM_STEP_ID', '')}"
    return Task(
        source=source,
        count=count,
        number=place,
        local_count=local_count,
        local_number=number(environment, "SLURM_LOCALID") or 0,
        nodes=nodes,
        node=number(environment, "SLURM_NODEID") or 0,
        address=LOOPBACK if address is None and nodes == 1 else address,
        port=master_port(environment, job),
        devices=number(environment, "SLURM_GPUS_ON_NODE"),
    ).check()


def is_step(environment: Environment) -> bool:
    """True if srun started this process: a batch script and the shell of salloc have variables of Slurm too.

    Slurm numbers the tasks of srun (SLURM_PROCID) and the batch script, which is marked and belongs to no
    step. A program of salloc has no number, or the number of a special step. With `srun --pty bash` and one
    task for each GPU, only the first task is a shell, and the others end at once.
    """
    if "SLURM_PROCID" not in environment:
        return False
    if "SLURM_PTY_PORT" in environment and environment["SLURM_PROCID"] == "0":
        return False
    for name in ("SLURM_STEP_ID", "SLURM_STEPID"):
        if name in environment:
            text = environment[name]
            return not text.isdecimal() or int(text) < FIRST_SPECIAL_STEP
    return environment.get("ENVIRONMENT") != "BATCH"


def check_batch_script(environment: Environment) -> None:
    """Raise `InputError` in a batch script of several nodes, as only the first node would train."""
    if "SLURM_JOB_ID" not in environment or is_step(environment) or "SLURM_PTY_PORT" in environment:
        return
    name = "SLURM_JOB_NUM_NODES"
    nodes = number(environment, name)
    if nodes is not None and nodes > 1 and "SLURM_PROCID" in environment:
        raise InputError(
            f"{name}={nodes}: the batch script runs on the first node only, and the others would idle; "
            f"start this "
            "with srun --ntasks-per-node=1 (`planner script --to slurm` writes such a file), or give "
            "--nnodes 1"
        )


def host_names(text: str) -> list[str]:
    """The host names in Slurm's short form of a list, such as `gpu[01-03,7],login`."""
    names: list[str] = []
    for part in re.findall(r"[^,\[]*(?:\[[^]]*\][^,\[]*)*", text):
        if not part:
            continue
        pieces = [_numbers(piece) if at % 2 else [piece] for at, piece in enumerate(_RANGE.split(part))]
        names += ["".join(words) for words in itertools.islice(itertools.product(*pieces), MOST_NODES)]
    return names


def _numbers(text: str) -> list[str]:
    """The numbers in `01-03,7`: 01, 02, 03, 7."""
    found = []
    for piece in text.split(","):
        first, _, last = piece.partition("-")
        if not first.isdecimal() or not (last or first).isdecimal():
            raise InputError(f"Slurm's list of nodes has [{text}], which are no numbers")
        count = min(int(last or first) - int(first) + 1, MOST_NODES)
        found += [str(int(first) + at).zfill(len(first)) for at in range(count)]
    return found


def _count(environment: Environment, names: tuple[str, ...], most: int) -> int:
    """The first given number, at most the number of tasks; else 1."""
    for name in names:
        value = number(environment, name)
        if value:
            return min(value, most)
    return 1


def _tasks_here(environment: Environment, count: int, nodes: int) -> int:
    """Tasks on this node: SLURM_STEP_TASKS_PER_NODE is such as `4(x2),3`, in the order of nodes."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", "")
    if not text:
        return -(-count // nodes)
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise InputError(f"SLURM_STEP_TASKS_PER_NODE={text}: expected such as 4(x2),3")
        counts += [int(match[1])] * min(int(match[2] or 1), MOST_NODES)
    if sum(counts) != count or len(counts) != nodes:
        raise InputError(
            f"Slurm: {count} tasks on {nodes} nodes, but SLURM_STEP_TASKS_PER_NODE={text} is {sum(counts)} "
            f"on "
            f"{len(counts)}; these variables contradict each other"
        )
    return counts[min(number(environment, "SLURM_NODEID") or 0, len(counts) - 1)]
