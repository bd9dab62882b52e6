"""Proposals where nothing fits, beside searches of every change by hand."""

from __future__ import annotations

import random
from typing import Any

import pytest

from costmodels import ModelSpec
from costmodels.catalogue import load_device
from costmodels.errors import InputError, NoLayoutFits
from costmodels.spec.record import GIB
from planner import search, suggest
from planner.inputs.model import resolve_model
from planner.proposals.proposal import Proposal
from tests.support.models import SMALL, SMALL_EXPERTS

ON_THE_DEVICE = ["offload_activations=false", "offload_optimizer=false"]

QUESTIONS: list[tuple[ModelSpec, dict[str, Any]]] = [
    (SMALL, {"world_size": 2, "device_memory_gib": 1.6, "global_batch_size": 16, "pin": ON_THE_DEVICE}),
    (SMALL, {"world_size": 8, "device_memory_gib": 1.1, "global_batch_size": 64, "pin": ["zero=0", "pp=1"]}),
    (SMALL, {"world_size": 4, "device_memory_gib": 1.6, "max_global_batch_size": 32, "engine": "megatron"}),
    (SMALL_EXPERTS, {"world_size": 4, "device_memory_gib": 1.3, "global_batch_size": 16}),
    (
        SMALL,
        {"world_size": 1, "device_memory_gib": 1.6, "global_batch_size": 8, "forbid": ["recompute=full"]},
    ),
]


def fits(model: ModelSpec, job: dict[str, Any]) -> bool:
    """Return whether a search of everything finds a plan."""
    try:
        return search(model, **job).feasible > 0
    except InputError:
        return False  # No layout is legal.


def asked(model: ModelSpec, job: dict[str, Any]) -> NoLayoutFits:
    with pytest.raises(NoLayoutFits) as caught:
        suggest(model, **job)
    return caught.value


def kinds(error: NoLayoutFits, kind: str) -> list[Proposal]:
    return [one for one in error.proposals if one.kind == kind]


@pytest.mark.parametrize(("model", "job"), QUESTIONS)
def test_every_proposal_is_what_its_keywords_give(model: ModelSpec, job: dict[str, Any]) -> None:
    error = asked(model, job)
    assert error.proposals and not error.closest.fits
    for one in error.proposals:
        found = suggest(**{"model": model, **job, **one.keywords})
        assert found.fits and found.layout == one.plan.layout and found.estimate == one.plan.estimate
        assert one.is_first and f"{one.what} ({' '.join(one.flags)})" in str(error)


@pytest.mark.parametrize(("model", "job"), QUESTIONS)
def test_changes_are_the_smallest_and_none_is_missed(model: ModelSpec, job: dict[str, Any]) -> None:
    error, world = asked(model, job), job["world_size"]
    sizes = [one.keywords["world_size"] for one in kinds(error, "devices")]
    # A node has eight devices.
    tried = [size for size in (2, 4, 8, 16, 24, 32, 48, 64) if size > world]
    first = next(
        size for size in tried if fits(model, {**job, "world_size": size, "local_world_size": min(size, 8)})
    )
    assert sizes[0] == first
    lengths = [one.keywords["model"].seq for one in kinds(error, "sequence")]
    shorter = [size for size in (1536, 1024, 768, 512, 384, 256) if size < model.seq]
    fitting = [size for size in shorter if fits(resolve_model(model, seq=size), job)]
    assert lengths == fitting[:1]
    pins = job.get("pin", [])
    alone = [pin for pin in pins if fits(model, {**job, "pin": [other for other in pins if other != pin]})]
    named = [one.what for one in kinds(error, "pin")]
    for pin in alone:
        assert any(pin.split("=")[1] in what for what in named)
    if not alone and pins:
        assert bool(named) == fits(model, {**job, "pin": []})


def test_what_takes_fewer_bytes_comes_first() -> None:
    job: dict[str, Any] = {"world_size": 8, "device_memory_gib": 3, "global_batch_size": 64}
    pins = ["pp=1", "tp=1", "recompute=none", "zero=0", *ON_THE_DEVICE]
    found = asked(SMALL, {**job, "pin": pins}).proposals
    order = ["pin", "optimizer", "adapters", "devices", "sequence", "precision", "device"]
    assert [one.kind for one in found] == sorted((one.kind for one in found), key=order.index)


def test_pins_that_have_to_go_together_are_as_few_as_help() -> None:
    job: dict[str, Any] = {"world_size": 8, "device_memory_gib": 1.2, "global_batch_size": 64}
    pins = ["tp=1", "pp=1", "zero=0", "mbs=1", "recompute=none", *ON_THE_DEVICE]
    error = asked(SMALL, {**job, "pin": pins})
    [one] = kinds(error, "pin")
    left = one.keywords["pin"]
    assert fits(SMALL, {**job, "pin": left})
    dropped = [pin for pin in search(SMALL, **{**job, "pin": pins}).problem.pins if pin not in left]
    assert len(dropped) > 1
    every = search(SMALL, **{**job, "pin": pins}).problem.pins
    for name in dropped:
        assert not fits(SMALL, {**job, "pin": {**left, name: every[name]}})


def test_where_the_fewest_devices_offload_more_of_them_need_not() -> None:
    found = asked(
        resolve_model("llama2-70b"), {"world_size": 2, "device": "a100-80g", "global_batch_size": 16}
    )
    few, more = kinds(found, "devices")
    assert few.plan.layout.offload_optimizer and few.keywords["world_size"] < more.keywords["world_size"]
    assert not (more.plan.layout.offload_optimizer or more.plan.layout.offload_activations)


def test_a_number_format_of_fewer_bits_is_named_where_it_helps() -> None:
    job: dict[str, Any] = {"world_size": 1, "device": "a100-80g", "global_batch_size": 4}
    pins = ["recompute=none", *ON_THE_DEVICE]
    least = [
        suggest(SMALL, objective="memory", precision=kind, pin=pins, **job).estimate.peak_memory_bytes / GIB
        for kind in ("bf16", "fp32")
    ]
    assert least[0] < least[1]
    error = asked(SMALL, {**job, "device_memory_gib": sum(least) / 2, "pin": ["precision=fp32", *pins]})
    [one] = kinds(error, "precision")
    assert one.flags == ("--unpin", "precision") and one.plan.layout.precision == "bf16"


def test_drawn_questions_have_true_proposals() -> None:
    draw = random.Random(7)
    checked = 0
    while checked < 3:
        job: dict[str, Any] = {
            "world_size": draw.choice([1, 2, 3, 4, 6]),
            "device_memory_gib": draw.choice([0.9, 1.4, 2.0]),
            "global_batch_size": draw.choice([6, 12, 24]),
            "engine": draw.choice([None, "megatron", "fsdp", "deepspeed"]),
            "pin": draw.sample(["tp=1", "zero=0..1", "recompute=none", "mbs=1", "pp=1"], draw.randint(0, 2)),
        }
        model = draw.choice([SMALL, SMALL_EXPERTS])
        try:
            if search(model, **job).feasible:
                continue
        except InputError:
            continue
        checked += 1
        for one in asked(model, job).proposals:
            plan = suggest(**{"model": model, **job, **one.keywords})
            assert plan.layout == one.plan.layout, (job, one)


def test_devices_of_the_same_maker_come_first() -> None:
    found = asked(
        resolve_model("llama3-8b"),
        {"world_size": 1, "device": "rtx-4090", "global_batch_size": 4, "pin": ON_THE_DEVICE},
    )
    [one] = kinds(found, "device")
    assert load_device(one.keywords["device"]).vendor == load_device("rtx-4090").vendor
    assert one.plan.cluster.memory_bytes > 24 * GIB
