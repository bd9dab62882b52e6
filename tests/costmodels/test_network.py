"""Collectives on the tiers that a group spans."""

import numpy as np
import pytest

from costmodels.network import all_gather, all_reduce, all_to_all, group, send

INTRA, INTER = 300e9, 25e9


def one(cluster, size, stride):
    return group(cluster, 1.0, np.array([size]), np.array([stride]))


@pytest.mark.parametrize(
    ("size", "stride", "local", "bandwidth"),
    [
        (1, 1, 1, INTRA),
        (8, 1, 8, INTRA),
        (2, 4, 2, INTRA),
        (8, 8, 1, INTER),  # one member a node: its own card
        (4, 4, 2, 2 * INTER),  # two members a node, two cards
        (64, 1, 8, 8 * INTER),
        (3, 1, 1, INTER),  # does not divide the node: some group straddles two
        (6, 1, 1, INTER),
        (4, 3, 2, 2 * INTER),
    ],
)
def test_a_group_uses_the_tier_and_the_cards_that_it_spans(cluster, size, stride, local, bandwidth):
    found = one(cluster(192), size, stride)
    assert (found.local[0], found.bandwidth[0]) == (local, bandwidth)


def test_one_node_has_no_network_between_nodes(cluster):
    assert one(cluster(6), 3, 1).bandwidth[0] == INTRA


def test_all_reduce_is_the_ring_of_the_textbook(cluster):
    payload = np.array([1e9])
    inside = one(cluster(8), 8, 1)
    assert all_reduce(inside, payload)[0] == pytest.approx(2 * 7 / 8 * 1e9 / INTRA + 2 * 3 * 3e-6)
    across = one(cluster(64), 8, 8)
    assert all_gather(across, payload)[0] == pytest.approx(7 / 8 * 1e9 / INTER + 7 * 5e-6)
    assert all_gather(across, payload, calls=10.0)[0] == pytest.approx(7 / 8 * 1e9 / INTER + 70 * 5e-6)


def test_a_group_of_one_is_free(cluster):
    alone = one(cluster(64), 1, 8)
    payload = np.array([1e9])
    assert all_reduce(alone, payload)[0] == all_to_all(alone, payload)[0] == 0
    assert send(cluster(64), 1.0, payload, np.array([1]), np.array([8]))[0] == 0


def test_all_to_all_is_bound_by_the_slower_tier(cluster):
    payload = np.array([1e9])
    inside = all_to_all(one(cluster(16), 8, 1), payload)[0]
    across = all_to_all(one(cluster(16), 16, 1), payload)[0]
    assert inside == pytest.approx(7 / 8 * 1e9 / INTRA, rel=0.01)
    assert across == pytest.approx(8 / 16 * 1e9 / INTER, rel=0.01)


def test_stages_of_one_node_send_over_its_links(cluster):
    near = send(cluster(64), 1.0, np.array([1e9]), np.array([4]), np.array([2]))[0]
    far = send(cluster(64), 1.0, np.array([1e9]), np.array([4]), np.array([16]))[0]
    assert near == pytest.approx(1e9 / INTRA, rel=0.01)
    assert far == pytest.approx(1e9 / INTER, rel=0.01)
