"""A process among the processes of one job, and numbers in environment variables."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from costmodels.errors import InputError

Environment = Mapping[str, str]

FIRST_PORT, PORTS = 20_000, 10_000
"""Range of the ports of jobs: above services, and below the ports that Linux assigns (from 32768 on)."""

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Task:
    """This process's place among the processes of one job."""

    source: str
    """The name of the launcher of the tasks."""
    count: int
    """Number of processes of the job."""
    number: int
    local_count: int
    """Number of processes on this node."""
    local_number: int
    nodes: int
    node: int
    address: str | None
    """Host of the first process; None where unknown."""
    port: int
    how_to_say_address: str = "set MASTER_ADDR to the host of the first task"
    devices: int | None = None
    """Devices of a node, if a variable gives them."""

    def check(self) -> Task:
        """This task; raises `InputError` where its numbers contradict each other."""
        for number, count, what in (
            (self.number, self.count, "task"),
            (self.local_number, self.local_count, "task on this node"),
            (self.node, self.nodes, "node"),
        ):
            if number >= count:
                raise InputError(
                    f"{self.source}: {what} number {number} of {count}; numbers begin at 0, so the "
                    f"variables of "
                    "this process contradict each other"
                )
        if self.local_count > self.count or self.nodes > self.count:
            raise InputError(
                f"{self.source}: {self.count} tasks, of which {self.local_count} are on this node of "
                f"{self.nodes}; these variables contradict each other"
            )
        return self

    def endpoint(self) -> tuple[str, int]:
        """Host and port of the first task for the rendezvous; raises `InputError` where unknown."""
        if self.address is None:
            raise InputError(
                f"{self.source}: {self.count} tasks on several nodes, and nothing says where the first one "
                f"is; "
                f"{self.how_to_say_address}"
            )
        return self.address, self.port


def number(environment: Environment, name: str) -> int | None:
    """The number in a variable; None where it is not set; raises `InputError` where it is not a number."""
    text = environment.get(name, "").strip()
    if not text:
        return None
    if not text.isdecimal():
        raise InputError(f"{name}={text}: must be a whole number")
    return int(text)


def common_number(environment: Environment, *names: str) -> int | None:
    """The common number in the set variables; raises `InputError` where they differ."""
    given = {name: value for name in names if (value := number(environment, name)) is not None}
    if len(set(given.values())) > 1:
        words = ", ".join(f"{name}={value}" for name, value in given.items())
        raise InputError(
            f"{words}: these say the same thing of this process, and contradict each other; unset one"
        )
    return next(iter(given.values()), None)


def master_port(environment: Environment, job: str) -> int:
    """MASTER_PORT, or a port derived from the name of a job, so that all its processes know it."""
    given = number(environment, "MASTER_PORT")
    if given is not None:
        if not 0 < given < 1 << 16:
            raise InputError(f"MASTER_PORT={given}: must be a port from 1 to 65535")
        return given
    return FIRST_PORT + zlib.crc32(job.encode()) % PORTS
