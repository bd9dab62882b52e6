"""The network of a caller: links, islands, cards, pods, and measured tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from costmodels import Cluster, Link
from costmodels.catalogue import load_device
from costmodels.errors import InputError
from costmodels.network.network_table import read_network_table
from costmodels.spec.hardware import MeasuredCollective
from planner import Plan, evaluate, search, suggest
from planner.inputs.cluster import resolve_cluster
from planner.options.cluster import ClusterOptions
from tests.support.models import TINY

TABLE = """collective,devices,nodes,bytes,busbw_gbs,gpu
all_reduce,8,1,1073741824,230,A100
AllGather,16,2,,150,A100
reduce_scatter_perf,16,2,1e9,149.5,A100
alltoall,16,2,1e9,20,A100
sendrecv,2,2,1e9,11,A100
"""


@pytest.fixture
def table(tmp_path: Path) -> Path:
    file = tmp_path / "nccl.csv"
    file.write_text(TABLE)
    return file


def test_a_cluster_is_as_in_the_catalogue_unless_told_otherwise() -> None:
    plain = resolve_cluster("a100-80g", 64)
    assert (plain.fast_link, plain.slow_link) == (plain.device.intra_node, plain.device.inter_node)
    assert plain.measured == ()
    given = resolve_cluster(
        "a100-80g",
        64,
        intra_node_gbps=4800,
        inter_node_gbps=400,
        island=4,
        nodes_per_pod=2,
        oversubscription=3,
    )
    assert (given.fast_link.bandwidth, given.slow_link.bandwidth) == (600e9, 50e9)
    assert given.slow_link.latency == plain.slow_link.latency
    assert (given.island, given.nodes_per_pod, given.oversubscription) == (4, 2, 3)
    assert resolve_cluster("a100-80g", 64, inter_node_gbps=400, nics_per_node=4).slow_link.bandwidth == 25e9


def test_a_table_is_read_as_measurers_spell_it(table: Path) -> None:
    rows = read_network_table(table)
    assert [row.collective for row in rows] == [
        "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send",
    ]  # fmt: skip
    assert rows[0] == MeasuredCollective(
        collective="all_reduce", devices=8, nodes=1, bus_bandwidth=230e9, message_bytes=2**30
    )
    assert rows[1].message_bytes is None
    assert resolve_cluster("a100-80g", 64, network_table=table).measured == rows
    assert resolve_cluster("a100-80g", 64, network_table=rows).measured == rows


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("broadcast,8,1,,230,", "line 2: collective 'broadcast' is not one of all_reduce, all_gather"),
        ("all_reduce,eight,1,,230,", "line 2: devices 'eight' is not a number"),
        ("all_reduce,,1,,230,", "line 2: devices '' is not a number"),
        ("all_reduce,8.5,1,,230,", "line 2: devices 8.5: "),
        ("all_reduce,8,1,,-3,", "line 2: busbw_gbs -3: "),
        ("all_reduce,8,1,,nan,", "line 2: busbw_gbs nan: "),
        ("all_reduce,8,1,0,230,", "line 2: bytes 0: "),
        ("all_reduce,8,3,,230,", "line 2: 8 devices on 3 nodes: expected at least 2"),
        ("all_reduce,1,1,,230,", "line 2: 1 devices on 1 nodes: expected at least 2"),
        ("", "no rows below the first line"),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "nccl.csv"
    file.write_text(f"collective,devices,nodes,bytes,busbw_gbs,gpu\n{line}\n")
    with pytest.raises(InputError) as error:
        read_network_table(file)
    assert str(file) in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"collective,gpus,nodes,busbw_gbs\n", "no column devices in the first line"),
        (b"", "no column collective, devices, nodes, busbw_gbs"),
        (b"\xff\xfe", "it is not UTF-8 text"),
    ],
)
def test_a_file_that_is_no_table_is_named(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "nccl.csv"
    file.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_network_table(file)
    with pytest.raises(InputError, match="No such file"):
        read_network_table(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("network", "message"),
    [
        ({"inter_node_gbps": 0}, "inter_node_gbps 0: expected gigabits per second"),
        ({"inter_node_gbps": float("nan")}, "inter_node_gbps nan"),
        ({"intra_node_gbps": 1e6}, "intra_node_gbps 1e\\+06: .* NVLink has 2400"),
        ({"intra_node_gbps": 100}, "100 gigabits per second .* and 200 between nodes"),
        ({"inter_node_gbps": 2500}, "2400 gigabits per second .* and 2500 between nodes"),
        ({"island": 0}, "island 0: expected a whole number"),
        ({"island": 3}, "island 3: expected whole nodes of 8 devices, or a part"),
        ({"island": 12}, "island 12: expected whole nodes"),
        ({"nics_per_node": -1}, "nics_per_node -1"),
        ({"nodes_per_pod": 0}, "nodes_per_pod 0"),
        ({"oversubscription": 0.5, "nodes_per_pod": 2}, "oversubscription 0.5: expected a number of at"),
        ({"oversubscription": float("inf"), "nodes_per_pod": 2}, "oversubscription inf"),
        ({"oversubscription": 1e300, "nodes_per_pod": 2}, "oversubscription 1e\\+300: .* at most 1000"),
        ({"oversubscription": 2}, "oversubscription 2 needs nodes_per_pod"),
        ({"nics_per_node": 1000}, "2400 gigabits per second .* and 25000 between nodes"),
    ],
)
def test_what_makes_no_sense_is_refused(network: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        resolve_cluster("a100-80g", 64, **network)
    assert "\n" not in str(error.value)


def test_an_unknown_option_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(TypeError, match="inter_node_gbs"):
        search(TINY, world_size=16, max_global_batch_size=16, inter_node_gbs=25)  # type: ignore[call-arg]


def test_search_suggest_and_evaluate_take_the_same_network(table: Path) -> None:
    job: Any = {"model": TINY, "device": "a100-80g"}
    free = suggest(**job, world_size=16, global_batch_size=64, pin=["dp=16"])
    for network in ({"inter_node_gbps": 1}, {"network_table": table}, {"island": 2}, {"nics_per_node": 1}):
        options: Any = network
        found = search(**job, world_size=16, global_batch_size=64, pin=["dp=16"], **options).best
        assert found is not None
        chosen = suggest(**job, world_size=16, global_batch_size=64, pin=["dp=16"], **options)
        assert chosen.layout == found.layout
        assert chosen.estimate.step_time_s > free.estimate.step_time_s
        again = evaluate(chosen.layout, **job, **options)
        assert again.step_time_s == pytest.approx(chosen.estimate.step_time_s, rel=1e-12)


def test_a_plan_keeps_its_network(tmp_path: Path, table: Path) -> None:
    plan = suggest(
        TINY,
        world_size=32,
        global_batch_size=64,
        intra_node_gbps=3600,
        inter_node_gbps=100,
        island=4,
        nics_per_node=4,
        nodes_per_pod=2,
        oversubscription=1.5,
        network_table=table,
    )
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    cluster = loaded.cluster
    assert (cluster.island, cluster.nics_per_node, cluster.nodes_per_pod) == (4, 4, 2)
    assert (cluster.oversubscription, len(cluster.measured)) == (1.5, 5)
    assert cluster.inter_node == Link(name="InfiniBand HDR", bandwidth=12.5e9, latency=14e-6)


def test_plans_from_before_networks_were_described_load(tmp_path: Path) -> None:
    plan = suggest(TINY, world_size=16, global_batch_size=64)
    values = plan.model_dump(mode="json")
    for name in ("intra_node", "inter_node", "island", "nics_per_node"):
        del values["cluster"][name]
    for name in ("nodes_per_pod", "oversubscription", "measured"):
        del values["cluster"][name]
    for name in ("island", "nics_per_node"):
        del values["cluster"]["device"][name]
    for name in ("intra_node", "inter_node"):
        del values["cluster"]["device"][name]["wiring"]
    file = tmp_path / "plan.json"
    file.write_text(json.dumps(values))
    assert Plan.load(file) == plan


def test_flags_say_what_the_options_say() -> None:
    assert ClusterOptions(world_size=8, device="h100").network() == {}
    flags = ClusterOptions(inter_node_gbps=100.0, island=72, network_table="nccl.csv")
    assert flags.network() == {"inter_node_gbps": 100.0, "island": 72, "network_table": "nccl.csv"}


def test_a_rack_is_one_island_by_default() -> None:
    rack = resolve_cluster("gb200", 72)
    assert (rack.devices_per_node, rack.nodes, rack.joined) == (4, 18, 72)
    slow = resolve_cluster("gb200", 72, island=4)
    model: Any = {"model": "llama3-8b", "world_size": 72, "global_batch_size": 72, "pin": ["dp=72"]}
    assert (
        search(**model, device="gb200").plans(1)[0].estimate.step_time_s
        < search(**model, device="gb200", island=4).plans(1)[0].estimate.step_time_s
    )
    assert isinstance(slow, Cluster) and slow.device == load_device("gb200")
