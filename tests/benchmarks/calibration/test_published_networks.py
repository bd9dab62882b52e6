"""The network in the notes of nanotron's rows."""

from __future__ import annotations

import pytest

from benchmarks.calibration.measurements import source_notes
from benchmarks.calibration.published_devices import published_cluster
from benchmarks.calibration.published_networks import cluster_state, job_collectives

KNOWN = {
    "message_bytes": 2**28,
    "bus_bandwidth": 300e9,
    "states": [
        {"first": 1e-3, "more": 1e-4, "switches": {"network.ring_step": 1.0}},
        {"first": 4e-3, "more": 1e-4, "nodes": 4, "switches": {"network.ring_step": 2.0}},
    ],
}


def notes(reduced: float, gathered: float) -> str:
    return f"grads fp32; collective busbw GB/s on job nodes AR/AG/RS={reduced}/{gathered}/{gathered}; x"


def test_a_card_that_notes_print_joins_the_nodes():
    def joined(said: str) -> float:
        row = {"gpu": "H800", "gpus": "32", "gpus_per_node": "8", "notes": said}
        return published_cluster(row, {}, {}).slow_link.bandwidth

    assert joined("engine=FlagScale; IB 200 Gb/s; script has --recompute-activations") == 25e9
    assert joined("engine=megatron-core 0.6.0; TE; IB 400 Gb/s") == joined("TE") == 50e9


def test_one_node_has_bandwidth_alone():
    rows = job_collectives(notes(458, 262), KNOWN, 8, 1)
    assert [row.collective for row in rows] == ["all_reduce", "all_gather", "reduce_scatter"]
    # Printed in two units, all three are the bandwidth of the same links.
    assert [row.bus_bandwidth / 1e9 for row in rows] == pytest.approx([458, 458.5, 458.5])
    assert {row.latency for row in rows} == {0}


@pytest.mark.parametrize("nodes", [2, 16, 64])
def test_bandwidth_and_latency_give_back_the_time_that_was_seen(nodes):
    world, message = 8 * nodes, 2**28
    share = (world - 1) / world
    rows = {row.collective: row for row in job_collectives(notes(13, 6.4), KNOWN, world, nodes)}
    reduced, gathered = rows["all_reduce"], rows["all_gather"]
    assert 2 * message * share / reduced.bus_bandwidth + reduced.latency == pytest.approx(
        2 * message * share / 13e9
    )
    assert message * share / gathered.bus_bandwidth + gathered.latency == pytest.approx(message / 12.8e9)
    assert reduced.bus_bandwidth == 300e9


def test_what_is_faster_than_links_has_no_latency():
    rows = job_collectives(notes(433, 224), KNOWN, 16, 2)
    assert [row.latency for row in rows] == [0, 0, 0]
    assert rows[0].bus_bandwidth == 433e9


@pytest.mark.parametrize("text", ["", "AR/AG/RS=0/0/0;", "AR/AG/RS=1.2.3/4/5;"])
def test_rows_that_print_nothing_have_no_table_and_no_state(text):
    assert job_collectives(text, KNOWN, 64, 8) == ()
    assert cluster_state(text, KNOWN, 8) == {}


def test_one_device_has_no_collectives():
    assert job_collectives(notes(458, 262), KNOWN, 1, 1) == ()


@pytest.mark.parametrize(
    ("gathered", "nodes", "changes"),
    [
        (262, 1, {}),
        (100, 1, {"network.ring_step": 1.0}),
        (100, 8, {}),  # 1.3 ms is little for eight nodes
        (30, 4, {"network.ring_step": 2.0}),
        (30, 8, {"network.ring_step": 1.0}),
    ],
)
def test_the_last_state_that_matches_counts(gathered, nodes, changes):
    assert cluster_state(notes(100, gathered), KNOWN, nodes) == changes


def test_states_of_the_catalogue_tell_jobs_apart():
    network = source_notes()["sources"]["hf_ultrascale"]["network"]
    healthy = [(1, 260), (2, 211), (4, 198), (8, 154), (16, 109), (32, 63), (64, 43)]
    congested = [(1, 242), (2, 176), (4, 102), (8, 58), (16, 29), (32, 15), (64, 7)]
    stalled = [(1, 41.8), (2, 41.8), (4, 40.7), (8, 33.5)]
    assert not any(cluster_state(notes(1, gathered), network, nodes) for nodes, gathered in healthy)
    for nodes, gathered in congested:
        assert set(cluster_state(notes(1, gathered), network, nodes)) == {
            "host.tensor_parallel_step",
            "host.nodes",
        }
    assert all(
        "network.message_latency" in cluster_state(notes(1, gathered), network, nodes)
        for nodes, gathered in stalled
    )
