"""Ascend's tables of ranks: merged as MindFormers' tools do, and checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels.errors import InputError
from planner.scripts.rank_table import RankTable, merge_rank_tables, rank_table_problems
from tests.support.commands import Command


def server_table(server: int, first: int = 0, count: int = 8) -> RankTable:
    """A table as hccl_tools.py writes it on one server."""
    devices = [
        {"device_id": str(first + at), "device_ip": f"192.168.{at}.{server}", "rank_id": str(at)}
        for at in range(count)
    ]
    servers = [{"server_id": f"10.0.0.{server}", "device": devices, "host_nic_ip": "reserve"}]
    values = {"version": "1.0", "server_count": "1", "server_list": servers, "status": "completed"}
    return RankTable.model_validate(values)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=6, unique=True))
def test_servers_keep_their_order_and_ranks_count_through(numbers: list[int]) -> None:
    merged = merge_rank_tables([server_table(number) for number in numbers])
    assert [server.server_id for server in merged.server_list] == [f"10.0.0.{n}" for n in numbers]
    assert [device.rank_id for device in merged.devices] == [str(rank) for rank in range(8 * len(numbers))]
    assert merged.server_count == str(len(numbers))
    # Other fields of the tools' files stay.
    assert json.loads(merged.text())["server_list"][0]["host_nic_ip"] == "reserve"
    assert not list(rank_table_problems(merged, 8 * len(numbers)))
    # Merging what is merged changes nothing.
    assert merge_rank_tables([merged]) == merged


def changed(change: Any) -> RankTable:
    values = merge_rank_tables([server_table(1), server_table(2)]).model_dump()
    change(values)
    return RankTable.model_validate(values)


def device(values: dict[str, Any], server: int, at: int) -> dict[str, Any]:
    return values["server_list"][server]["device"][at]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda v: v.update(server_count="3"), "server_count 3, but 2 servers are listed"),
        (lambda v: v.update(version="9"), "version 9: expected 1.0"),
        (lambda v: device(v, 1, 0).update(rank_id="9"), "rank_id 9 where 8 is expected"),
        (lambda v: device(v, 1, 0).update(device_ip="192.168.0.1"), "device_ip 192.168.0.1 comes 2 times"),
        (lambda v: device(v, 0, 0).update(device_ip="host"), "device_ip host of rank 0 is no address"),
        (lambda v: device(v, 0, 1).update(device_id="0"), "a device_id comes twice"),
        (lambda v: device(v, 0, 7).update(device_id="9"), "are not continuous"),
        (lambda v: v["server_list"][1].update(server_id="10.0.0.1"), "server_id 10.0.0.1 comes 2 times"),
        (lambda v: v["server_list"][1]["device"].pop(), "servers have different numbers of devices"),
    ],
)
def test_what_hccl_could_not_use_is_named(change: Any, named: str) -> None:
    assert any(named in problem for problem in rank_table_problems(changed(change)))


def test_devices_of_two_groups_are_all_or_none() -> None:
    assert list(rank_table_problems(server_table(1, first=4, count=4))) == []
    [problem] = rank_table_problems(server_table(1, first=3, count=3))
    assert "devices 3 to 5 are of two groups" in problem
    with pytest.raises(InputError, match=r"server_id 10\.0\.0\.1 comes 2 times"):
        merge_rank_tables([server_table(1), server_table(1)])


def test_the_commands_merge_and_check(planner_command: Command, tmp_path: Path) -> None:
    files = []
    for number in (2, 1):
        files.append(tmp_path / f"hccl_{number}.json")
        files[-1].write_text(server_table(number).text())
    out = tmp_path / "merged.json"
    code, shown, err = planner_command("ranktable", "merge", *files, "--out", out)
    assert (code, shown) == (0, "") and err == f"planner: saved {out}: 2 servers, ranks 0 to 15\n"
    code, shown, err = planner_command("ranktable", "check", out)
    assert (code, err) == (0, "") and "2 servers, 16 devices, ranks in order" in shown
    out.write_text(out.read_text().replace('"rank_id": "3"', '"rank_id": "4"'))
    code, shown, err = planner_command("ranktable", "check", out)
    assert (code, shown) == (2, "") and "rank_id 4 where 3 is expected" in err
    (tmp_path / "half.json").write_text('{"version": "1.0"')
    code, _, err = planner_command("ranktable", "merge", tmp_path / "half.json")
    assert code == 2 and "no table of ranks" in err and err.count("\n") == 1
