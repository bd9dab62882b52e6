"""Optimizer state on the host: the same numbers, and a checkpoint that either way reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from runtime.parallel.data import needs_data_parallel
from runtime.settings.training_options import TrainingOptions
from runtime.train.trainer import Trainer
from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks import training as work
from tests.support.ranks.parity import losses_of
from tests.support.ranks.training import CPU
from tests.support.worker_pool import WorkerPool

SPEC = MODELS["gpt2"]


@pytest.mark.parametrize(
    "text", ["", "dp=2", "dp=2,zero=1,precision=bf16", "dp=2,zero=3,precision=bf16", "tp=2,pp=2"]
)
def test_offloading_changes_no_loss(pool: WorkerPool, text: str) -> None:
    kept = parse_layout("gbs=4" + ("," + text if text else ""), SPEC)
    offloaded = kept.model_copy(update={"offload_optimizer": True})
    expected = pool.run(losses_of, kept.world_size, SPEC, kept, 5)
    assert pool.run(losses_of, kept.world_size, SPEC, offloaded, 5) == expected
    assert len(set(expected[0])) == 5


def offload_policies() -> tuple[set[str], set[str]]:
    """Places of a model's shards, by FSDP2's policy and by their device."""
    layout = parse_layout("offload_optimizer=1", SPEC)
    trainer = Trainer(SPEC, layout, TrainingOptions(), CPU)
    assert needs_data_parallel(layout, trainer.grid)
    modules = trainer.executor.stages[0].modules()
    states = [m._get_fsdp_state() for m in modules if isinstance(m, FSDPModule)]
    policies = {type(state._fsdp_param_groups[0].offload_policy).__name__ for state in states}
    return policies, {owned.shard.device.type for owned in trainer.optimizer.owned}


def test_every_shard_is_offloaded(pool: WorkerPool) -> None:
    assert pool.run(offload_policies, 1) == [({CPUOffloadPolicy.__name__}, {"cpu"})]


@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_a_checkpoint_goes_on_with_or_without_offloading(
    pool: WorkerPool, tmp_path: Path, before: bool, after: bool
) -> None:
    layouts = [
        parse_layout(f"gbs=4,dp=2,zero=1,precision=bf16,offload_optimizer={int(value)}", SPEC)
        for value in (before, after)
    ]
    for losses, resumed in pool.run(work.resumed_losses, 2, SPEC, *layouts, str(tmp_path), 5, 2):
        assert resumed == losses[2:]


def moments_on_a_mesh_of_another_device() -> tuple[str, bool]:
    """Device of the stand-in for a host tensor that is split like a parameter of another device."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from runtime.parallel.local_tensors import like_parameter, local_part

    mesh = init_device_mesh("cpu", (1,))
    with torch.device("meta"):
        parameter = DTensor.from_local(torch.empty(4, 2), mesh, [Shard(0)], run_check=False)
    local = torch.ones(4, 2)
    found = like_parameter(local, parameter)
    return found.device.type, local_part(found) is local or local_part(found).data_ptr() == local.data_ptr()


def test_what_stands_for_a_moment_shares_its_memory(pool: WorkerPool) -> None:
    assert pool.run(moments_on_a_mesh_of_another_device, 1) == [("cpu", True)]
