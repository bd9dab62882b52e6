"""Ascend's RANK_TABLE_FILE: the devices of a cluster, their addresses and ranks, in the form that HCCL reads.

MindFormers' hccl_tools.py writes such a file on each server, and its merge_hccl.py joins them: servers stay
in the order of the files, and ranks are numbered consecutively.
"""

from __future__ import annotations

import ipaddress
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from costmodels.errors import InputError, on_one_line
from costmodels.files import MIB, read_text

LARGEST_TABLE = 64 * MIB

GROUP = 4
"""Number of devices of a server that are linked directly: 0 to 3, and 4 to 7 (hccl_tools.py)."""

Number = Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)]
"""A whole number as text, as the tools write it."""


class RankedDevice(BaseModel):
    """A device of a server, with its address and its rank."""

    model_config = ConfigDict(extra="allow")

    device_id: Number
    device_ip: str
    rank_id: Number


class Server(BaseModel):
    """A server with its devices."""

    model_config = ConfigDict(extra="allow")

    server_id: str
    device: list[RankedDevice]


class RankTable(BaseModel):
    """A RANK_TABLE_FILE."""

    model_config = ConfigDict(extra="allow")

    version: str
    server_count: Number
    server_list: list[Server]
    status: Literal["completed"]

    def text(self) -> str:
        """The text of the file."""
        return json.dumps(self.model_dump(mode="json"), indent=4) + "\n"

    @property
    def devices(self) -> list[RankedDevice]:
        """Devices of all servers, in order."""
        return [device for server in self.server_list for device in server.device]


def read_rank_table(path: str | Path) -> RankTable:
    """The table in a file; raises `InputError` for any other content."""
    try:
        return RankTable.model_validate_json(read_text(path, LARGEST_TABLE))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValidationError, UnicodeDecodeError) as error:
        what = on_one_line(error) if isinstance(error, ValidationError) else "it is not UTF-8 text"
        raise InputError(f"{path}: no table of ranks: {what}") from None


def merge_rank_tables(tables: Sequence[RankTable]) -> RankTable:
    """One table of all servers, in the order of `tables`, with ranks numbered consecutively.

    Raises `InputError` for a server or an address that comes twice.
    """
    servers: list[Server] = []
    rank = 0
    for table in tables:
        for server in table.server_list:
            devices = []
            for device in server.device:
                devices.append(device.model_copy(update={"rank_id": str(rank)}))
                rank += 1
            servers.append(server.model_copy(update={"device": devices}))
    merged = RankTable(version="1.0", server_count=str(len(servers)), server_list=servers, status="completed")
    problems = list(rank_table_problems(merged))
    if problems:
        raise InputError("; ".join(problems))
    return merged


def rank_table_problems(table: RankTable, world_size: int | None = None) -> Iterator[str]:
    """Errors in a table, one per line; empty where HCCL can use the table.

    Args:
        world_size: number of ranks of the plan.
    """
    servers, devices = table.server_list, table.devices
    if table.version not in ("1.0", "1.2"):
        yield f"version {table.version}: expected 1.0"
    if table.server_count != str(len(servers)):
        yield f"server_count {table.server_count}, but {len(servers)} servers are listed"
    if not devices:
        yield "there are no devices"
    for what, values in (
        ("server_id", [server.server_id for server in servers]),
        ("device_ip", [device.device_ip for device in devices]),
    ):
        for value, count in Counter(values).items():
            if count > 1:
                yield f"{what} {value} comes {count} times"
    for device in devices:
        if not _is_address(device.device_ip):
            yield f"device_ip {device.device_ip} of rank {device.rank_id} is no address"
    ranks = [device.rank_id for device in devices]
    if ranks != [str(number) for number in range(len(devices))]:
        wrong = next(at for at, rank in enumerate(ranks) if rank != str(at))
        yield f"rank_id {ranks[wrong]} where {wrong} is expected: ranks count from 0, server by server"
    for server in servers:
        yield from _server_problems(server)
    if len({len(server.device) for server in servers}) > 1:
        sizes = ", ".join(f"{server.server_id} has {len(server.device)}" for server in servers)
        yield f"servers have different numbers of devices: {sizes}"
    if world_size is not None and len(devices) != world_size:
        yield f"the table has {len(devices)} devices, and the plan is for {world_size}"


def _server_problems(server: Server) -> Iterator[str]:
    numbers = [device.device_id for device in server.device]
    where = f"server {server.server_id}"
    if not all(number.isdecimal() for number in numbers):
        yield f"{where}: device_id {', '.join(n for n in numbers if not n.isdecimal())} is no number"
        return
    ordered = [int(number) for number in numbers]
    if len(set(ordered)) < len(ordered):
        yield f"{where}: a device_id comes twice in {', '.join(numbers)}"
    elif ordered != list(range(ordered[0], ordered[0] + len(ordered))):
        yield f"{where}: device_id {', '.join(numbers)} are not continuous"
    elif ordered[0] < GROUP <= ordered[-1] and (ordered[0], len(ordered)) not in ((0, 8), (0, 16)):
        names = f"{numbers[0]} to {numbers[-1]}"
        yield f"{where}: devices {names} are of two groups of {GROUP}; take all, or one group"


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
