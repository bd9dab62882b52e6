"""Settings of FSDP2 for each stage: its ranks, its formats, and when it lets go of parameters."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import Shard

from runtime.dryrun.run import fake_process_group
from runtime.model.experts import Experts
from runtime.model.transformer import Block, Transformer
from runtime.parallel import data
from runtime.parallel.data import data_parallel, needs_data_parallel, wraps_stages
from runtime.parallel.mesh import build_grid
from tests.support.layouts import parse_layout
from tests.support.models import FORMS, MODELS

SPECS = MODELS | FORMS


def told(
    name: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[list[tuple[Any, dict[str, Any], dict[str, Any]]], Transformer]:
    """Modules in the order in which they are wrapped, what FSDP2 is told of each, and what is set on it."""
    found: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []

    def wrapped(module: Any, **settings: Any) -> Any:
        later: dict[str, Any] = {}
        names = ("set_gradient_divide_factor", "set_force_sum_reduction_for_comms")
        setters = {one: lambda value, one=one: later.update({one: value}) for one in names}
        prefetch = {"set_modules_to_forward_prefetch": lambda given: later.update(prefetch=given)}
        for one, setter in (setters | prefetch).items():
            object.__setattr__(module, one, setter)
        found.append((module, settings, later))
        return module

    monkeypatch.setattr(data, "fully_shard", wrapped)
    spec = SPECS[name]
    layout = parse_layout(text, spec)
    with fake_process_group(layout.world_size, 0):
        grid = build_grid(spec, layout, torch.device("cpu"))
        with torch.device("meta"):
            stage = Transformer(spec, 256)
        data_parallel(stage, layout, grid)
        for _, settings, _ in found:
            settings["mesh"] = dict(zip(settings["mesh"].mesh_dim_names, settings["mesh"].shape, strict=True))
    return found, stage


@pytest.mark.parametrize(
    ("text", "mesh", "after_forward", "stage_after"),
    [
        ("dp=2,zero=1", {"dp_shard": 2}, False, False),
        ("dp=2,zero=2", {"dp_shard": 2}, False, False),
        # PyTorch's default keeps what backward gathers first.
        ("dp=2,zero=3", {"dp_shard": 2}, True, None),
        ("dp=4,zero=3,zero_replicas=2", {"dp_replicate": 2, "dp_shard": 2}, True, None),
        ("dp=2,cp=2,zero=1", {"dp_shard": 4}, False, False),
        ("dp=2,offload_optimizer=1", {"dp_replicate": 2, "dp_shard": 1}, False, False),
        ("offload_optimizer=1", {"dp_replicate": 1, "dp_shard": 1}, False, False),
    ],
)
def test_layers_are_wrapped_over_the_ranks_that_split_them(
    text: str,
    mesh: dict[str, int],
    after_forward: bool,
    stage_after: bool | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, stage = told("further-tied", f"gbs=8,precision=bf16,{text}", monkeypatch)
    assert [module for module, _, _ in found] == [*stage.blocks, *stage.mtp, stage]
    for module, settings, later in found:
        assert settings["mesh"] == mesh
        assert settings["reshard_after_forward"] == (stage_after if module is stage else after_forward)
        policy = settings["mp_policy"]
        assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
        assert isinstance(settings["offload_policy"], CPUOffloadPolicy) == ("offload" in text)
        if "offload" in text:
            assert not settings["offload_policy"].pin_memory
        # Sums, not means; nothing is said where there is nobody to sum with.
        alone = all(size == 1 for size in mesh.values())
        sums = {"set_gradient_divide_factor": 1.0, "set_force_sum_reduction_for_comms": True}
        assert later == ({} if alone else sums)


@pytest.mark.parametrize(
    ("text", "mesh", "split"),
    [
        ("dp=2,zero=1", {"e_shard": 2}, 0),
        ("dp=4,ep=2,zero=3", {"e_shard": 2}, 0),
        # Three ranks divide no four experts, but a width of 96.
        ("gbs=6,dp=3,zero=1", {"e_shard": 3}, 1),
        ("dp=4,ep=4,zero=1", {"e_shard": 1}, 0),
        ("dp=4,zero=1,zero_replicas=2", {"e_replicate": 2, "e_shard": 2}, 0),
    ],
)
def test_experts_are_wrapped_apart_and_gathered_ahead(
    text: str, mesh: dict[str, int], split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = told("mixtral", text if "gbs" in text else f"gbs=8,{text}", monkeypatch)
    kinds = [type(module) for module, _, _ in found]
    assert kinds == [Experts, Block] * 4 + [Transformer]
    for (experts, own, _), (_, settings, later) in zip(found[:8:2], found[1:8:2], strict=True):
        assert own["mesh"] == mesh
        assert own["reshard_after_forward"] == settings["reshard_after_forward"] == ("zero=3" in text)
        assert later["prefetch"] == [experts]
        assert own["shard_placement_fn"](experts.up) == Shard(split)


def test_an_odd_number_of_ranks_splits_the_first_dimension() -> None:
    parameter: Any = torch.nn.Parameter(torch.empty(4, 10))
    assert data._expert_placement(parameter, 7) == Shard(0)
    assert data._expert_placement(parameter, 5) == Shard(1)
    assert data._expert_placement(parameter, 2) == Shard(0)


@pytest.mark.parametrize(
    ("name", "text", "needs", "wraps"),
    [
        ("llama", "", False, False),
        ("llama", "tp=2", False, False),
        ("llama", "dp=2", True, False),
        ("llama", "cp=2", True, False),
        ("llama", "dp=2,zero=1", True, True),
        ("llama", "offload_optimizer=1", True, True),
        # Tensor-parallel ranks hold the same experts whole, unless these are spread over them.
        ("mixtral", "tp=2", True, False),
        ("mixtral", "tp=2,ep=2", False, False),
        ("mixtral", "tp=2,etp=2", False, False),
    ],
)
def test_parameters_are_shared_where_several_ranks_hold_them(
    name: str, text: str, needs: bool, wraps: bool
) -> None:
    layout = parse_layout(f"gbs=4,{text}" if text else "gbs=4", SPECS[name])
    grid: Any = SimpleNamespace(expert_mesh="there" if SPECS[name].experts else None)
    assert (needs_data_parallel(layout, grid), wraps_stages(layout)) == (needs, wraps)
