"""Flags about the network: what `planner suggest` and `planner launch` make of them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from planner import Plan
from tests.support.commands import Command

JOB = (
    "suggest",
    "--model",
    "gpt2-124m",
    "--world-size",
    "16",
    "--device",
    "a100-80g",
    "--global-batch-size",
    "32",
)


def test_flags_reach_the_plan_and_are_repeated_in_words(planner_command: Command, tmp_path: Path) -> None:
    table = tmp_path / "nccl.csv"
    table.write_text("collective,devices,nodes,busbw_gbs\nall_reduce,16,2,80\n")
    file = tmp_path / "plan.json"
    flags = (
        "--intra-node-gbps", "4800", "--inter-node-gbps", "100", "--island", "4", "--nics-per-node", "4",
        "--nodes-per-pod", "1", "--oversubscription", "2", "--network-table", str(table),
    )  # fmt: skip
    code, out, err = planner_command(*JOB, *flags, "--top", "1", "--json", "--save", str(file))
    assert code == 0
    cluster = json.loads(out)["cluster"]
    assert cluster["intra_node"]["bandwidth"] == 600e9
    assert cluster["inter_node"]["bandwidth"] == 12.5e9
    names = ("island", "nics_per_node", "nodes_per_pod", "oversubscription")
    assert [cluster[name] for name in names] == [4, 4, 1, 2]
    assert cluster["measured"][0]["bus_bandwidth"] == 80e9
    assert "network: NVLink 600 GB/s a device, joins 4; host 32 GB/s" in err
    assert Plan.load(file).cluster.measured[0].nodes == 2


def test_without_flags_nothing_is_said_of_the_network(planner_command: Command) -> None:
    code, out, err = planner_command(*JOB, "--top", "1")
    assert (code, err) == (0, "")
    assert "network:" not in out


def test_a_slower_network_makes_slower_plans(planner_command: Command) -> None:
    def best(*flags: str) -> float:
        code, out, _ = planner_command(*JOB, "--top", "1", "--json", "--pin", "dp=16", *flags)
        assert code == 0
        seconds: float = json.loads(out)["plans"][0]["estimate"]["step_time_s"]
        return seconds

    assert best("--inter-node-gbps", "1") > best("--inter-node-gbps", "10") > best()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--inter-node-gbps", "0"), "--inter-node-gbps 0: expected gigabits per second (8 x GB/s)"),
        (("--inter-node-gbps", "fast"), "'fast' is not a number"),
        (("--island", "5"), "island 5: expected whole nodes of 8 devices"),
        (("--oversubscription", "2"), "oversubscription 2 needs --nodes-per-pod"),
        (("--network-table", "none.csv"), "cannot read network table 'none.csv': No such file"),
    ],
)
def test_wrong_flags_end_in_one_line(planner_command: Command, flags: tuple[str, ...], message: str) -> None:
    code, out, err = planner_command(*JOB, *flags)
    assert (code, out) == (2, "")
    assert err.startswith("planner: error: ") and message in err and err.count("\n") == 1


def test_launch_hands_its_network_to_the_job(planner_command: Command) -> None:
    code, out, err = planner_command(
        "launch", "--model", "gpt2-nano", "--device", "cpu", "--world-size", "2", "--global-batch-size", "8",
        "--intra-node-gbps", "16", "--print-command",
    )  # fmt: skip
    assert (code, err) == (0, "")
    words = shlex.split(out)
    assert words[words.index("--intra-node-gbps") + 1] == "16.0"


def test_a_plan_says_all_of_its_network(planner_command: Command, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    job = (*JOB[:3], "--device", "cpu", "--world-size", "2", "--global-batch-size", "8")
    assert planner_command(*job, "--save", str(file))[0] == 0
    code, _, err = planner_command("launch", "--plan", str(file), "--island", "2", "--print-command")
    assert code == 2
    assert "--plan decides" in err and "--island" in err
