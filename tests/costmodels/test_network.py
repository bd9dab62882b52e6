"""Collectives on the tiers that a group spans."""

import numpy as np
import pytest

from costmodels.network.collectives import all_gather, all_reduce, all_to_all, group, reduce_scatter, send
from costmodels.spec.hardware import MeasuredCollective

INTRA, INTER = 300e9, 25e9


@pytest.fixture
def ideal(engine):
    """An engine that reaches the whole bandwidth of every link."""
    return engine("megatron", network_efficiency=1.0, devices={})


@pytest.fixture
def one(ideal):
    """The group of one size and stride on a cluster."""

    def make(cluster, size, stride, executed_by=ideal):
        return group(cluster, executed_by, np.array([size]), np.array([stride]))

    return make


@pytest.mark.parametrize(
    ("size", "stride", "local", "bandwidth"),
    [
        (1, 1, 1, INTRA),
        (8, 1, 8, INTRA),
        (2, 4, 2, INTRA),
        (8, 8, 1, INTER),  # one member a node: its own card
        (4, 4, 2, 2 * INTER),  # two members a node, two cards
        (64, 1, 8, 8 * INTER),
        (3, 1, 1, INTER),  # does not divide the node: some group has one of its members in a node
        (6, 1, 2, 2 * INTER),  # some group has two
        (12, 1, 4, 4 * INTER),
        (4, 3, 1, INTER),  # ranks 0, 3 and 6, and rank 9 alone
    ],
)
def test_a_group_uses_the_tier_and_the_cards_that_it_spans(cluster, one, size, stride, local, bandwidth):
    found = one(cluster(192), size, stride)
    assert (found.local[0], found.bandwidth[0]) == (local, bandwidth)


def test_one_node_has_no_network_between_nodes(cluster, one):
    assert one(cluster(6), 3, 1).bandwidth[0] == INTRA


def test_all_reduce_is_the_ring_of_the_textbook(cluster, one):
    payload = np.array([1e9])
    inside = one(cluster(8), 8, 1)
    assert all_reduce(inside, payload)[0] == pytest.approx(2 * 7 / 8 * 1e9 / INTRA + 2 * 3 * 3e-6)
    across = one(cluster(64), 8, 8)
    assert all_gather(across, payload)[0] == pytest.approx(7 / 8 * 1e9 / INTER + 7 * 5e-6)
    assert all_gather(across, payload, calls=10.0)[0] == pytest.approx(7 / 8 * 1e9 / INTER + 70 * 5e-6)


def test_small_all_reduces_between_many_nodes_take_a_tree(cluster, one):
    across = one(cluster(8192), 1024, 8)
    small, large = all_reduce(across, np.array([1e3])), all_reduce(across, np.array([1e12]))
    assert small[0] == pytest.approx(2 * 10 * 5e-6, rel=0.01)
    assert large[0] == pytest.approx(2 * 1023 / 1024 * 1e12 / INTER + 2 * 1023 * 5e-6)
    assert reduce_scatter(across, np.array([1e3]))[0] == pytest.approx(1023 * 5e-6, rel=0.01)


def test_a_group_of_one_is_free(cluster, one, ideal):
    slow = ideal.with_constants({"network.collective_latency": 1.0})
    alone = one(cluster(64), 1, 8, slow)
    payload = np.array([1e9])
    assert all_reduce(alone, payload)[0] == all_to_all(alone, payload)[0] == 0
    assert send(cluster(64), slow, payload, np.array([1]), np.array([8]))[0] == 0


def test_every_call_takes_the_time_that_the_engine_needs_for_one(cluster, one, ideal):
    slow = ideal.with_constants({"network.collective_latency": 1.0})
    payload = np.array([1e6])
    for collective in (all_gather, reduce_scatter, all_reduce, all_to_all):
        added = collective(one(cluster(64), 8, 8, slow), payload) - collective(
            one(cluster(64), 8, 8), payload
        )
        assert added[0] == pytest.approx(1.0)
    calls = all_reduce(one(cluster(64), 8, 1, slow), payload, calls=5.0)
    assert calls[0] == pytest.approx(5.0, rel=1e-3)


def test_each_tier_has_its_own_efficiency(cluster, one, ideal):
    poor = ideal.with_constants({"network.inter_node_efficiency": 0.5})
    assert one(cluster(64), 8, 1, poor).bandwidth[0] == INTRA
    assert one(cluster(64), 8, 8, poor).bandwidth[0] == 0.5 * INTER


def test_all_to_all_is_bound_by_the_slower_tier(cluster, one):
    payload = np.array([1e9])
    inside = all_to_all(one(cluster(16), 8, 1), payload)[0]
    across = all_to_all(one(cluster(16), 16, 1), payload)[0]
    assert inside == pytest.approx(7 / 8 * 1e9 / INTRA, rel=0.01)
    assert across == pytest.approx(8 / 16 * 1e9 / INTER, rel=0.01)


def test_stages_of_one_node_send_over_its_links(cluster, ideal):
    near = send(cluster(64), ideal, np.array([1e9]), np.array([4]), np.array([2]))[0]
    far = send(cluster(64), ideal, np.array([1e9]), np.array([4]), np.array([16]))[0]
    assert near == pytest.approx(1e9 / INTRA, rel=0.01)
    assert far == pytest.approx(1e9 / INTER, rel=0.01)


def with_table(cluster, *rows):
    """The cluster with rows (collective, devices, nodes, GB/s[, bytes])."""
    names = ("collective", "devices", "nodes", "bus_bandwidth", "message_bytes")
    fields = [dict(zip(names, row, strict=False)) for row in rows]
    measured = tuple(
        MeasuredCollective.model_validate({**row, "bus_bandwidth": row["bus_bandwidth"] * 1e9})
        for row in fields
    )
    return cluster.model_copy(update={"measured": measured})


SWEEP = (
    ("all_gather", 8, 1, 240),
    ("all_gather", 16, 2, 160),
    ("all_gather", 128, 16, 40),
    ("all_reduce", 8, 1, 400),
    ("all_reduce", 16, 2, 320),
    ("all_reduce", 128, 16, 80),
)


@pytest.mark.parametrize(
    ("size", "stride", "gathered", "reduced"),
    [
        (8, 1, 240, 400),
        (4, 2, 240, 400),
        (16, 1, 160, 320),  # the row itself
        (128, 1, 40, 80),
        (512, 1, 40, 80),  # beyond the table: its last row
        (32, 1, 120, 240),  # 4 nodes: a third of the way from 2 to 16, in the logarithm
        (64, 1, 80, 160),
        (2, 8, 20, 40),  # one of the 8 ranks of a node: an eighth of the node's network
        (8, 4, 30, 60),  # two ranks on each of 4 nodes
    ],
)
def test_a_measured_table_replaces_links(cluster, one, engine, size, stride, gathered, reduced):
    measured = with_table(cluster(512), *SWEEP)
    # Efficiencies are about links: what was measured needs none.
    found = one(measured, size, stride, engine("megatron", network_efficiency=0.5))
    assert found.bandwidth[0] == found.scatter_bandwidth[0] == pytest.approx(gathered * 1e9)
    assert found.reduce_bandwidth[0] == pytest.approx(reduced * 1e9)
    payload = np.array([1e12])
    assert all_gather(found, payload)[0] == pytest.approx((1 - 1 / size) * 1e3 / gathered, rel=0.01)
    assert all_reduce(found, payload)[0] == pytest.approx(2 * (1 - 1 / size) * 1e3 / reduced, rel=0.01)


def test_a_tier_without_rows_keeps_its_links(cluster, one):
    within = with_table(cluster(64), ("all_reduce", 8, 1, 200))
    assert one(within, 8, 1).bandwidth[0] == pytest.approx(200e9)  # an all-reduce stands in for a gathering
    assert one(within, 8, 8).bandwidth[0] == INTER
    across = with_table(cluster(64), ("reduce_scatter", 64, 8, 80))
    assert one(across, 8, 1).bandwidth[0] == INTRA
    assert one(across, 8, 8).bandwidth[0] == pytest.approx(10e9)


def test_a_ring_between_nodes_is_no_faster_than_inside_one(cluster, one):
    measured = with_table(cluster(64), ("all_gather", 8, 1, 50), ("all_gather", 16, 2, 160))
    assert one(measured, 64, 1).bandwidth[0] == pytest.approx(50e9)
    assert one(measured, 8, 8).bandwidth[0] == pytest.approx(20e9)


def test_rows_with_as_many_ranks_a_node_speak_first(cluster, one):
    rows = (("all_gather", 2, 2, 24), ("all_gather", 16, 2, 160))
    measured = with_table(cluster(64), *rows)
    assert one(measured, 4, 8).bandwidth[0] == pytest.approx(24e9)
    assert one(measured, 32, 1).bandwidth[0] == pytest.approx(160e9)


@pytest.mark.parametrize("order", [1, -1])
def test_large_messages_say_the_bandwidth(cluster, one, order):
    rows = (("all_gather", 8, 1, 3, 1e4), ("all_gather", 8, 1, 240, 1e9), ("all_gather", 8, 1, 100, 1e6))
    assert one(with_table(cluster(64), *rows[::order]), 8, 1).bandwidth[0] == pytest.approx(240e9)


def test_measured_exchanges_and_messages(cluster, one, ideal):
    rows = (("all_to_all", 8, 1, 200), ("all_to_all", 16, 2, 30), ("send", 2, 1, 150), ("send", 2, 2, 12))
    measured = with_table(cluster(64), *rows)
    payload = np.array([1e12])
    assert all_to_all(one(measured, 8, 1), payload)[0] == pytest.approx(7 / 8 * 1e3 / 200, rel=0.01)
    assert all_to_all(one(measured, 16, 1), payload)[0] == pytest.approx(15 / 16 * 1e3 / 30, rel=0.01)
    seconds = send(measured, ideal, payload, np.array([4, 4]), np.array([2, 8]))
    assert seconds == pytest.approx([1e3 / 150, 1e3 / 12], rel=0.01)


def test_nodes_of_an_island_are_measured_as_one(cluster, one):
    rack = cluster(256, devices_per_node=4).model_copy(update={"island": 64})
    measured = with_table(rack, ("all_gather", 64, 16, 600), ("all_gather", 128, 32, 320))
    assert one(measured, 64, 1).bandwidth[0] == pytest.approx(600e9)
    assert one(measured, 128, 1).bandwidth[0] == pytest.approx(320e9)
    assert one(measured, 2, 64).bandwidth[0] == pytest.approx(5e9)


def test_a_measured_latency_grows_with_the_nodes_of_a_group(cluster, one, ideal):
    row = MeasuredCollective(collective="all_reduce", devices=64, nodes=8, bus_bandwidth=200e9, latency=8e-3)
    measured = cluster(64).model_copy(update={"measured": (row,)})
    nothing = np.array([0.0])
    for collective in (all_gather, reduce_scatter, all_reduce):
        assert collective(one(measured, 8, 8), nothing, 5.0)[0] == pytest.approx(5 * 8e-3)
        assert collective(one(measured, 16, 1), nothing)[0] == pytest.approx(2e-3)
        assert collective(one(measured, 8, 1), nothing)[0] < 1e-4
        assert collective(one(measured, 1, 8), nothing)[0] == 0


def test_a_measured_latency_counts_islands_as_groups_do(cluster, one, ideal):
    rack = cluster(256, devices_per_node=4).model_copy(update={"island": 64})
    row = MeasuredCollective(collective="all_reduce", devices=256, nodes=64, bus_bandwidth=2e11, latency=8e-3)
    measured = rack.model_copy(update={"measured": (row,)})
    assert all_gather(one(measured, 256, 1), np.array([0.0]))[0] == pytest.approx(8e-3)


def test_a_message_between_two_devices_is_not_as_slow_as_a_collective(cluster, ideal):
    measured = with_table(cluster(64), ("all_reduce", 64, 8, 8))
    seconds = send(measured, ideal, np.array([1e9]), np.array([4]), np.array([16]))[0]
    assert seconds == pytest.approx(1e9 / INTER, rel=0.01)
    slow = ideal.with_constants({"network.message_latency": 0.5})
    late = send(measured, slow, np.array([1e9]), np.array([4]), np.array([16]))[0]
    assert late == pytest.approx(seconds + 0.5)


def test_a_measured_message_takes_what_it_did_and_not_what_a_collective_takes_besides(cluster, ideal):
    row = MeasuredCollective(collective="send", devices=2, nodes=1, bus_bandwidth=1e9, latency=6e-5)
    measured = cluster(8).model_copy(update={"measured": (row,)})
    slow = ideal.with_constants({"network.collective_latency": 0.5, "network.message_latency": 0.25})
    pair = np.array([2]), np.array([1])
    assert send(measured, slow, np.array([1e6]), *pair)[0] == pytest.approx(1e-3 + 6e-5 + 0.25)
    assert send(cluster(8), slow, np.array([0.0]), *pair)[0] > 0.75
