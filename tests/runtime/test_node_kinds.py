"""A plan for nodes of two kinds is refused where the nodes were started in another order."""

from __future__ import annotations

import pytest

import planner
from costmodels import ModelSpec
from costmodels.catalogue import load_device
from costmodels.errors import InputError
from runtime.job import devices
from runtime.parallel.ranks import Ranks

MODEL = {"name": "tiny", "layers": 4, "hidden": 256, "heads": 4, "vocab": 1000, "seq": 512}


def test_ranks_on_the_other_kind_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planner.suggest(
        ModelSpec.model_validate(MODEL),
        world_size=4,
        local_world_size=2,
        device="h100:1,a100-80g:1",
        global_batch_size=8,
        pin="pp=2",
    )
    first, second = (part.device.name for part in plan.cluster.parts)
    for rank, name in ((0, first), (3, second)):
        ranks = Ranks(rank=rank, world_size=4, local_rank=rank % 2, local_world_size=2)
        devices.check_kind(plan, ranks)  # On CPUs there is nothing to tell.
        with monkeypatch.context() as patch:
            patch.setattr(devices, "local_device_count", lambda: 2)
            patch.setattr(devices, "detect_device", lambda ranks, name=name: load_device(name))
            devices.check_kind(plan, ranks)
            other = second if name == first else first
            patch.setattr(devices, "detect_device", lambda ranks, other=other: load_device(other))
            with pytest.raises(InputError, match=f"rank {rank} is on {other}, where the plan has {name}"):
                devices.check_kind(plan, ranks)
