"""Clusters refuse sizes that do not fill their nodes; devices know their usual precision."""

import pytest
from pydantic import ValidationError

from costmodels import Cluster, Device, Link

DEVICE = Device(
    name="d",
    vendor="v",
    peak_flops={"fp16": 1e12, "bf16": 1e12},
    memory_bytes=1e9,
    memory_bandwidth=1e9,
    cores=1,
    intra_node=Link(name="near", bandwidth=1e9, latency=1e-6),
    inter_node=Link(name="far", bandwidth=1e8, latency=1e-5),
)


def cluster(world_size: int, devices_per_node: int) -> Cluster:
    return Cluster(device=DEVICE, world_size=world_size, devices_per_node=devices_per_node, memory_bytes=1e9)


@pytest.mark.parametrize(
    ("world", "local", "nodes"), [(64, 8, 8), (8, 8, 1), (4, 8, 1), (1, 1, 1), (72, 4, 18)]
)
def test_nodes(world: int, local: int, nodes: int) -> None:
    assert cluster(world, local).nodes == nodes


def test_a_partly_filled_node_is_refused_with_the_nearest_sizes() -> None:
    with pytest.raises(ValidationError, match="20 is not a multiple of local world size 8; use 16 or 24"):
        cluster(20, 8)


@pytest.mark.parametrize(("world", "local", "sizes"), [(12, 8, "6 or 4"), (127, 8, "1"), (18, 8, "6 or 3")])
def test_local_world_sizes_that_divide_are_named_and_work(world: int, local: int, sizes: str) -> None:
    with pytest.raises(ValidationError, match=rf"or a local world size of {sizes}") as caught:
        cluster(world, local)
    named = caught.value.errors()[0]["msg"].rpartition(" of ")[2]
    assert all(cluster(world, int(size)).nodes == world // int(size) for size in named.split(" or "))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"island": 3}, "island 3: expected whole nodes of 8 devices, or a part that divides a node"),
        ({"island": 20}, "island 20: expected whole nodes"),
        ({"oversubscription": 2.0}, "oversubscription 2 needs nodes_per_pod"),
        ({"oversubscription": 0.5}, "greater than or equal to 1"),
        ({"nics_per_node": 0}, "nics_per_node"),
        (
            {"measured": [{"collective": "all_reduce", "devices": 9, "nodes": 2, "bus_bandwidth": 1}]},
            "9 devices",
        ),
        (
            {"measured": [{"collective": "gossip", "devices": 8, "nodes": 2, "bus_bandwidth": 1}]},
            "all_reduce",
        ),
    ],
)
def test_a_network_that_cannot_be_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Cluster.model_validate({**cluster(64, 8).model_dump(), **fields})


def test_links_are_the_devices_own_unless_given() -> None:
    plain = cluster(64, 8)
    assert (plain.fast_link, plain.slow_link, plain.joined) == (DEVICE.intra_node, DEVICE.inter_node, 8)
    fast = Link(name="mine", bandwidth=2e9, latency=1e-6)
    given = plain.model_copy(update={"intra_node": fast, "inter_node": fast, "nics_per_node": 2, "island": 4})
    assert (given.fast_link, given.joined) == (fast, 4)
    assert given.slow_link == fast.model_copy(update={"bandwidth": 0.5e9})


def test_a_cluster_with_all_fields_survives_json() -> None:
    row = {"collective": "all_reduce", "devices": 8, "nodes": 2, "bus_bandwidth": 1e9}
    link = {"name": "mesh", "bandwidth": 2e9, "latency": 1e-6, "wiring": "mesh"}
    fields = {"intra_node": link, "inter_node": link, "island": 4, "nics_per_node": 3, "measured": [row]}
    whole = {**cluster(64, 8).model_dump(), **fields, "nodes_per_pod": 4, "oversubscription": 1.5}
    found = Cluster.model_validate(whole)
    assert Cluster.model_validate_json(found.model_dump_json()) == found
    assert found.measured[0].message_bytes is None


@pytest.mark.parametrize(
    ("kind", "formats", "precision"),
    [("gpu", ["fp16", "bf16"], "bf16"), ("npu", ["fp16"], "fp16"), ("cpu", ["fp32", "bf16"], "fp32")],
)
def test_default_precision(kind: str, formats: list[str], precision: str) -> None:
    peaks = dict.fromkeys(formats, 1e12)
    device = Device.model_validate({**DEVICE.model_dump(), "kind": kind, "peak_flops": peaks})
    assert device.default_precision == precision


@pytest.mark.parametrize(
    "wrong",
    [
        {"memory_bytes": 0},
        {"memory_bytes": float("inf")},
        {"peak_flops": {"int8": 1e12}},
        {"cores": 0},
        {"memory_bandwith": 1e9},
        {"kind": "dsp"},
    ],
)
def test_a_device_refuses_wrong_fields(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Device.model_validate({**DEVICE.model_dump(), **wrong})
