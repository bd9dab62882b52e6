"""The look at all ranks before a job trains: what stops it, what is only named, and what is measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from costmodels.errors import InputError
from costmodels.network.network_table import read_network_table
from runtime.preflight.preflight_options import PreflightOptions
from runtime.preflight.report import RankReport, clock_note, mismatches, report_table
from runtime.preflight.speed import GroupRate, LinkRate, slow_devices, slow_links, slow_nodes, table_rows
from tests.support.ranks import preflight as work
from tests.support.worker_pool import WorkerPool

GIB = 2**30

SOFTWARE = {"PyTorch": "2.14.1", "Python": "3.11"}

RANKS = [
    RankReport(rank, f"host{rank // 2}", "H100", 80 * GIB, 79 * GIB, SOFTWARE, 100.0, 2, ("--lr 0.1",))
    for rank in range(6)
]


def with_rank(number: int, **changes: Any) -> list[RankReport]:
    return [replace(report, **changes) if report.rank == number else report for report in RANKS]


@pytest.mark.parametrize(
    ("reports", "named"),
    [
        (with_rank(3, device="A100"), ["rank 3 on host1: device A100, but H100 on most ranks"]),
        (with_rank(5, free_bytes=40 * GIB), ["rank 5 on host2: 40.0 GiB of memory are free, 79.0 usually"]),
        (
            with_rank(2, software=SOFTWARE | {"PyTorch": "2.13.0"}),
            ["rank 2 on host1: PyTorch 2.13.0, but 2.14.1 on most ranks"],
        ),
        (with_rank(4, local_ranks=1), ["rank 4 on host2: ranks on its node 1, but 2 on most ranks"]),
        (
            with_rank(4, arguments=("--lr 0.2",)),
            ["rank 4 on host2: other flags than most ranks: --lr 0.1, --lr 0.2"],
        ),
        (RANKS, []),
    ],
)
def test_what_differs_is_named_with_its_host(reports: list[RankReport], named: list[str]) -> None:
    assert list(mismatches(reports)) == named


def test_nodes_of_two_kinds_may_differ_in_their_device() -> None:
    mixed = [replace(report, device="V100", free_bytes=31 * GIB) for report in RANKS[:2]] + RANKS[2:]
    assert list(mismatches(mixed, kinds=2)) == []
    assert [line.partition(":")[0] for line in mismatches(mixed)] == ["rank 0 on host0"]


def test_alike_ranks_share_a_line_of_the_table() -> None:
    lines = list(report_table(with_rank(1, device="A100")))
    assert [line.split(":")[0].strip() for line in lines] == [
        "ranks 0 on host0",
        "ranks 1 on host0",
        "ranks 2-3 on host1",
        "ranks 4-5 on host2",
    ]


def test_clocks_that_differ_are_a_warning() -> None:
    assert clock_note(RANKS) == "" == clock_note(with_rank(1, clock_s=120.0))
    assert clock_note(with_rank(1, clock_s=200.0)) == (
        "the clock of host0 is 100 s ahead of that of another host"
    )


def test_the_slow_one_is_named() -> None:
    assert list(slow_devices([1e12, 1e12, 5e11], ["a", "b", "rank 2 on c"], "accelerator")) == [
        "slow device: rank 2 on c multiplies at 0.5 TFLOP/s, 1 usually"
    ]
    links = [LinkRate(0, 1, 1e9), LinkRate(1, 2, 1e8), LinkRate(2, 0, 1e9)]
    assert list(slow_links(links, ["a", "b", "c"])) == ["slow link: b to c carries 0.1 GB/s, 1 usually"]
    # Two nodes have two directions.
    both = [LinkRate(0, 1, 1e8), LinkRate(1, 0, 1e9)]
    assert list(slow_links(both, ["a", "b"])) == ["slow link: a to b carries 0.1 GB/s, 0.55 usually"]
    whole = GroupRate("all_reduce", 6, 3, 1e6, 1 << 20)  # A group of all nodes names none.
    rates = [[GroupRate("all_reduce", 2, 1, rate, 1 << 20), whole] for rate in (9e9, 9e9, 2e9)]
    ranks = [each for each in rates for _ in range(2)]
    assert list(slow_nodes(ranks, 2, ["a", "b", "c"])) == [
        "slow node: all_reduce among the ranks on c runs at 2 GB/s, 9 usually"
    ]
    assert list(slow_nodes([[whole]], 1, ["a"])) == []


def test_what_is_measured_can_be_planned_with(tmp_path: Path) -> None:
    rates = [
        GroupRate("all_reduce", 2, 1, 5e9, 1 << 20),
        GroupRate("all_reduce", 2, 1, 4e9, 1 << 20),
        GroupRate("all_reduce", 4, 2, 1e9, 1 << 20),
    ]
    table = tmp_path / "network.csv"
    table.write_text("\n".join(table_rows(rates, [LinkRate(0, 1, 2e9)], 2)) + "\n")
    rows = read_network_table(table)
    # The slowest of equal groups counts.
    assert [(row.collective, row.devices, row.nodes, row.bus_bandwidth) for row in rows] == [
        ("all_reduce", 2, 1, 4e9),
        ("all_reduce", 4, 2, 1e9),
        ("send", 2, 2, 2e9),
    ]


@pytest.mark.parametrize(
    ("options", "plan", "named"),
    [
        (PreflightOptions(preflight="mesure"), None, "--preflight mesure: did you mean measure"),
        (PreflightOptions(replan=True), None, "--replan needs --preflight measure"),
        (PreflightOptions("measure", True), "p.json", "--plan p.json is"),
    ],
)
def test_flags_that_make_no_sense_are_refused(options: PreflightOptions, plan: str, named: str) -> None:
    with pytest.raises(InputError) as refusal:
        options.check(plan)
    assert named in str(refusal.value)


def test_ranks_of_two_nodes_measure_their_groups(pool: WorkerPool, tmp_path: Path) -> None:
    tables = pool.run(work.measure, 4, str(tmp_path))
    assert tables == [str(tmp_path / "network.csv")] * 4
    rows = {(row.collective, row.devices, row.nodes) for row in read_network_table(tables[0])}
    groups = [(2, 1), (2, 2), (4, 2)]
    expected = {(name, *group) for name in ("all_reduce", "all_gather", "all_to_all") for group in groups}
    assert rows == expected | {("send", 2, 2)}
    refusals = pool.run(work.differ, 4)
    assert all("other flags than most ranks: --seed 1, --seed 3" in refusal for refusal in refusals)
