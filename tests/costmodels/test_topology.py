"""Tiers in closed form against the graph itself: every ring drawn, every link's load counted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise

import networkx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels import Cluster, Device, Engine, Link
from costmodels.catalogue import load_device, load_engine
from costmodels.errors import InputError
from costmodels.network.collectives import group, send
from costmodels.network.topology import describe, device_pair, graph, group_span, island_ranks, tiers

pytestmark = pytest.mark.oldest

DEVICE = Device(
    name="d",
    vendor="v",
    peak_flops={"bf16": 1e12},
    memory_bytes=1e9,
    memory_bandwidth=1e9,
    cores=1,
    host_bandwidth=60e9,
    intra_node=Link(name="near", bandwidth=300e9, latency=3e-6),
    inter_node=Link(name="far", bandwidth=25e9, latency=1e-5),
)
IDEAL: Engine = load_engine("megatron").with_constants(
    {"network.efficiency": 1.0, "network.inter_node_efficiency": 1.0, "network.collective_latency": 0.0}
)


def cluster(world: int, local: int, **fields: object) -> Cluster:
    return Cluster.model_validate(
        {"device": DEVICE, "world_size": world, "devices_per_node": local, "memory_bytes": 1e9, **fields}
    )


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    local = draw(st.sampled_from([2, 3, 4, 6, 8]))
    nodes = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    # Islands and pods that fill the cluster; what else happens is tested apart.
    island = draw(st.sampled_from([*divisors(local), *(local * size for size in divisors(nodes))]))
    whole = [size for size in divisors(nodes) if size * local % island == 0]
    return cluster(
        local * nodes,
        local,
        island=island,
        nics_per_node=draw(st.sampled_from([None, 1, 2, 3, 4, 8, 12])),
        nodes_per_pod=draw(st.sampled_from(whole or [nodes])),
        oversubscription=draw(st.sampled_from([1.0, 2.0, 7.0])),
    )


@st.composite
def groups(draw: st.DrawFn) -> tuple[Cluster, int, int]:
    found = draw(clusters())
    size = draw(st.sampled_from(divisors(found.world_size)[1:] or [1]))
    return found, size, draw(st.sampled_from(divisors(found.world_size // size)))


def members(world: int, size: int, stride: int) -> Iterator[list[int]]:
    for block in range(0, world, size * stride):
        for offset in range(stride):
            yield [block + offset + stride * place for place in range(size)]


class Drawn:
    """The graph of a cluster, with what groups send over each of its edges."""

    def __init__(self, found: Cluster) -> None:
        self.graph = graph(found)
        self.loads: dict[tuple, float] = defaultdict(float)
        inside = [tier.reach for tier in tiers(found) if not tier.between_nodes]
        self.island, self.home = inside[0], inside[-1]
        self.pod = (found.nodes_per_pod or found.nodes) * found.devices_per_node

    def out(self, rank: int, kind: str, amount: float) -> None:
        """`rank` sends an amount to its island, host or cards, each card by the bandwidth of its wire."""
        device = ("device", rank)
        wires = {end: self.graph.edges[device, end]["bandwidth"] for end in self.graph[device]}
        wires = {end: wire for end, wire in wires.items() if end[0] == kind}
        assert wires
        for end, wire in wires.items():
            self.loads[device, end] += amount * wire / sum(wires.values())

    def leave(self, pod: int) -> None:
        self.loads[("pod", pod), ("spine",)] += 1.0

    def slowest(self) -> float:
        return min(self.graph.edges[edge]["bandwidth"] / load for edge, load in self.loads.items())


def blocks(ranks: list[int], reach: int) -> list[list[int]]:
    found: dict[int, list[int]] = defaultdict(list)
    for rank in ranks:
        found[rank // reach].append(rank)
    return list(found.values())


def ring_bandwidth(found: Cluster, size: int, stride: int) -> float:
    """Every group passes a byte along its ring: from rank to rank of an island, from island to island of a
    node, and from node to node. All members of the part that the ring leaves send their share."""
    drawn = Drawn(found)
    for ranks in members(found.world_size, size, stride):
        homes = blocks(ranks, drawn.home)
        for home in homes:
            islands = blocks(home, drawn.island)
            for part in islands:
                for rank in part:
                    if len(part) > 1:
                        drawn.out(rank, "island", 1.0)
                    if len(islands) > 1:
                        drawn.out(rank, "host", 1.0 / len(part))
                    if len(homes) > 1:
                        drawn.out(rank, "nic", 1.0 / len(home))
        pods = [home[0] // drawn.pod for home in homes]
        for pod, following in zip(pods, [*pods[1:], pods[0]], strict=True):
            if pod != following:
                drawn.leave(pod)
    return drawn.slowest()


def message_bandwidth(found: Cluster, size: int, stride: int) -> float:
    """Every rank sends a byte to the next one of its group."""
    drawn = Drawn(found)
    for ranks in members(found.world_size, size, stride):
        for rank, following in pairwise(ranks):
            if rank // drawn.island == following // drawn.island:
                drawn.out(rank, "island", 1.0)
            elif rank // drawn.home == following // drawn.home:
                drawn.out(rank, "host", 1.0)
            else:
                drawn.out(rank, "nic", 1.0)
            if rank // drawn.pod != following // drawn.pod:
                drawn.leave(rank // drawn.pod)
    return drawn.slowest()


def closed_form(found: Cluster, size: int, stride: int) -> float:
    return group(found, IDEAL, np.array([size]), np.array([stride])).bandwidth[0]


def check(closed: float, explicit: float, found: Cluster, size: int, stride: int) -> None:
    """The two agree, but where groups lie across the borders of oversubscribed pods: there fewer cross than
    the closed form allows for."""
    pod, extent = (found.nodes_per_pod or 1) * found.devices_per_node, size * stride
    even = max(pod, stride) % min(pod, stride) == 0 and max(pod, extent) % min(pod, extent) == 0
    if found.oversubscription == 1 or even:
        assert closed == pytest.approx(explicit, rel=1e-4)
    else:
        assert closed <= explicit * 1.0001


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(groups())
def test_rings_are_as_fast_as_the_slowest_link_of_the_graph(drawn: tuple[Cluster, int, int]) -> None:
    found, size, stride = drawn
    if size == 1:
        return
    check(closed_form(found, size, stride), ring_bandwidth(found, size, stride), found, size, stride)


@settings(max_examples=200, deadline=None)
@given(groups())
def test_messages_are_as_fast_as_the_slowest_link_of_the_graph(drawn: tuple[Cluster, int, int]) -> None:
    found, size, stride = drawn
    if size == 1:
        return
    seconds = send(found, IDEAL, np.array([1e15]), np.array([size]), np.array([stride]))
    check(1e15 / seconds[0], message_bandwidth(found, size, stride), found, size, stride)


@settings(max_examples=100, deadline=None)
@given(
    nodes=st.integers(2, 13),
    local=st.sampled_from([2, 4, 8]),
    rack=st.integers(2, 6),
    data=st.data(),
)
def test_islands_that_do_not_divide_a_job_are_never_too_fast(
    nodes: int, local: int, rack: int, data: st.DataObject
) -> None:
    found = cluster(nodes * local, local, island=rack * local)
    size = data.draw(st.sampled_from(divisors(nodes * local)[1:]))
    stride = data.draw(st.sampled_from(divisors(nodes * local // size)))
    assert closed_form(found, size, stride) <= ring_bandwidth(found, size, stride) * (1 + 1e-9)


@settings(max_examples=300, deadline=None)
@given(
    unit=st.integers(1, 24),
    size=st.integers(1, 24),
    stride=st.integers(1, 12),
    more=st.integers(1, 3),
)
def test_groups_fall_on_blocks_as_when_they_are_counted(unit: int, size: int, stride: int, more: int) -> None:
    world = more * int(np.lcm(unit, size * stride))
    counted = [[len(part) for part in blocks(ranks, unit)] for ranks in members(world, size, stride)]
    least, most = group_span(world, unit, np.array([size]), np.array([stride]))
    assert least[0] == min(min(parts) for parts in counted)
    assert most[0] == max(len(parts) for parts in counted)


@settings(max_examples=60, deadline=None)
@given(found=clusters(), data=st.data())
def test_pairs_of_the_graph(found: Cluster, data: st.DataObject) -> None:
    if found.world_size == 1:
        return
    drawn, count = graph(found), found.world_size
    first, second = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    bandwidth, latency = device_pair(found, first, second)
    assert device_pair(found, second, first) == (bandwidth, latency)
    ends = ("device", first), ("device", second)
    assert networkx.is_connected(drawn)
    found_latency = networkx.shortest_path_length(drawn, *ends, weight="latency")
    assert found_latency == pytest.approx(latency)
    cards = sum(drawn.edges[ends[0], end]["bandwidth"] for end in drawn[ends[0]] if end[0] == "nic")
    tier = next(tier for tier in tiers(found) if first // tier.reach == second // tier.reach)
    if tier.between_nodes:
        beyond = found.oversubscription if tier.name.endswith("spine") else 1.0
        assert bandwidth == pytest.approx(cards / beyond)


def test_a_mesh_gives_a_group_the_wires_between_its_members() -> None:
    found = cluster(16, 8, intra_node=Link(name="wires", bandwidth=70e9, latency=1e-6, wiring="mesh"))
    assert [closed_form(found, size, 1) for size in (2, 4, 8)] == pytest.approx([10e9, 30e9, 70e9])
    assert device_pair(found, 0, 5)[0] == pytest.approx(10e9)
    wires = [ends for ends in graph(found).edges if {end[0] for end in ends} == {"device"}]
    assert len(wires) == 2 * 8 * 7 // 2
    members = group(found, IDEAL, np.array([4]), np.array([1]))
    # A quarter of the payload goes to each of three others, by a wire of its own.
    assert members.exchange[0] == pytest.approx(1 / 4 / 10e9)


def test_racks_of_72() -> None:
    gb200 = load_device("gb200")
    rack = cluster(288, 4, device=gb200)
    assert [tier.reach for tier in tiers(rack)] == [72, 288]
    assert closed_form(rack, 72, 1) == gb200.intra_node.bandwidth
    assert closed_form(rack, 4, 72) == gb200.inter_node.bandwidth
    assert closed_form(rack, 144, 1) == min(72 * gb200.inter_node.bandwidth, gb200.intra_node.bandwidth)
    small = cluster(16, 4, device=gb200)
    assert closed_form(small, 16, 1) == gb200.intra_node.bandwidth


@pytest.mark.parametrize(
    ("world", "local", "island", "reach"),
    [
        (64, 4, 72, 64),  # in one rack
        (256, 4, 72, 64),  # four blocks of 64
        (144, 4, 72, 72),
        (96, 4, 72, 48),
        (76, 4, 72, 40),  # 19 nodes: 10 and 9
        (64, 8, 4, 4),
        (64, 8, None, 8),
    ],
)
def test_jobs_take_equal_blocks_of_islands(world: int, local: int, island: int | None, reach: int) -> None:
    assert island_ranks(cluster(world, local, island=island)) == reach


def test_pods_of_racks_hold_what_a_job_takes_of_each_rack() -> None:
    racks = cluster(512, 4, island=72, nodes_per_pod=36, oversubscription=2.0)
    assert [tier.reach for tier in tiers(racks)] == [64, 128, 512]
    assert closed_form(racks, 2, 64) == 25e9
    assert closed_form(racks, 4, 128) == 12.5e9
    assert len([node for node in graph(racks) if node[0] == "pod"]) == 4


def test_an_island_of_a_server_ends_with_the_part_that_is_used() -> None:
    quads = DEVICE.model_copy(update={"island": 4})
    assert [island_ranks(cluster(16, local, device=quads)) for local in (2, 4, 8)] == [2, 4, 4]
    assert [tier.name for tier in tiers(cluster(16, 8, device=quads))] == ["near", "host", "far"]


@pytest.mark.parametrize(
    ("usual", "cards", "share"),
    [(None, None, 25e9), (None, 4, 12.5e9), (None, 16, 50e9), (4, None, 25e9), (4, 4, 25e9), (4, 2, 12.5e9)],
)
def test_cards_are_shared_by_the_devices_of_a_node(
    usual: int | None, cards: int | None, share: float
) -> None:
    device = DEVICE.model_copy(update={"nics_per_node": usual})
    found = cluster(64, 8, device=device, nics_per_node=cards)
    assert closed_form(found, 8, 8) == share
    # A link that is given is that of one card.
    given = Link(name="card", bandwidth=10e9, latency=1e-5)
    named = cluster(64, 8, device=device, nics_per_node=cards, inter_node=given)
    assert closed_form(named, 8, 8) == 10e9 * (1 if cards is None else cards / 8)


def test_oversubscription_slows_groups_with_few_ranks_in_a_pod() -> None:
    found = cluster(256, 8, nodes_per_pod=8, oversubscription=4.0)
    assert closed_form(found, 8, 8) == 25e9  # in one pod
    assert closed_form(found, 4, 64) == 25e9 / 4
    assert closed_form(found, 16, 16) == 25e9  # four ranks of a pod share its way out
    exchange = group(found, IDEAL, np.array([32]), np.array([8])).exchange[0]
    assert exchange == pytest.approx(24 / 32 / (25e9 / 4))


def test_what_is_said_of_a_cluster() -> None:
    found = cluster(256, 8, nodes_per_pod=8, oversubscription=4.0)
    assert describe(found) == (
        "near 300 GB/s a device, joins 8; far 25 GB/s a device, joins 64; "
        "far spine 6.25 GB/s a device, joins 256"
    )


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [(0, 16, "rank 16: the cluster has ranks 0 to 15"), (-1, 3, "rank -1"), (3, 3, "rank 3 twice")],
)
def test_pairs_that_do_not_exist(first: int, second: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        device_pair(cluster(16, 8), first, second)


def test_large_clusters_are_not_drawn() -> None:
    with pytest.raises(InputError, match="16384 devices"):
        graph(cluster(32768, 8))
