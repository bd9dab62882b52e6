"""Groups in which ranks meet, by the order in which layouts number ranks."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from costmodels import ModelSpec
from runtime.dryrun.run import fake_process_group
from runtime.parallel.mesh import _own_group, build_grid, expert_mesh_shape
from tests.support.layouts import parse_layout
from tests.support.models import FORMS, MODELS


def members(group: Any) -> list[int] | None:
    return None if group is None else dist.get_process_group_ranks(group)


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (MODELS["gpt2"], "dp=2,cp=2,tp=2,pp=2"),
        (MODELS["llama"].model_copy(update={"kv_heads": 1}), "dp=2,tp=4"),
        (MODELS["mixtral"], "dp=2,tp=2"),
        (MODELS["mixtral"], "dp=2,cp=2,tp=2"),
        (MODELS["mixtral"], "dp=2,cp=2,pp=2"),
        (FORMS["further"], "pp=4,tp=2"),
        # The ends of a V are on one rank.
        (FORMS["further-tied"], "pp=2,vpp=2,schedule=zbv"),
        (FORMS["further-tied"], "pp=2,vpp=2,schedule=interleaved"),
    ],
)
def test_ranks_meet_whose_numbers_differ_in_one_kind_alone(spec: ModelSpec, text: str) -> None:
    """Tensor parallelism numbers neighbours, then context, data and pipeline parallelism."""
    layout = parse_layout(f"gbs=8,{text}", spec)
    tp, cp, dp, pp = (
        *(layout.tensor_parallel, layout.context_parallel),
        *(layout.data_parallel, layout.pipeline_parallel),
    )
    places = list(product(range(pp), range(dp), range(cp), range(tp)))
    for rank, (stage, replica, chunk, part) in enumerate(places):
        with fake_process_group(layout.world_size, rank):
            grid = build_grid(spec, layout, torch.device("cpu"))
            assert (grid.pp_rank, grid.dp_rank, grid.cp_rank, grid.tp_rank) == (stage, replica, chunk, part)

            def alike(*kinds: int, own: tuple[int, ...] = places[rank]) -> list[int] | None:
                """Ranks that differ from this one in these kinds at most; None if that is this one alone."""
                kept = [n for n in range(4) if n not in kinds]
                found = [n for n, place in enumerate(places) if all(place[k] == own[k] for k in kept)]
                return found if len(found) > 1 else None

            assert members(grid.pp_group) == (alike(0) or [rank])
            assert members(grid.cp_group) == alike(2)
            assert members(grid.sequence_group) == (alike(2, 3) if spec.experts else None)
            sharers = max(1, tp // spec.kv_heads)
            first = rank // sharers * sharers
            assert members(grid.kv_group) == (list(range(first, first + sharers)) if sharers > 1 else None)
            shares = (spec.tied or spec.mtp is not None) and pp > 1 and layout.schedule != "zbv"
            ends = [n for n in alike(0) or [] if places[n][0] in (0, pp - 1)]
            assert members(grid.embedding_group) == (ends if shares and stage in (0, pp - 1) else None)
            assert (grid.expert_mesh is None) == (not spec.experts)


def test_groups_that_meet_at_once_have_names_of_their_own() -> None:
    """Members alone know of a group: a name that counts groups would be that of another one, too."""
    rows, names = torch.arange(6).view(3, 2), []
    for rank in (0, 2, 5):
        with fake_process_group(6, rank):
            group = _own_group(rows)
            assert group is not None and members(group) == rows[rank // 2].tolist()
            names.append(group.group_name)
            assert _own_group(rows[:, :1]) is None
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("dp=8,ep=2,zero=1", (1, 1, 4, 2, 1)),
        ("dp=8,ep=2", (1, 4, 1, 2, 1)),
        ("dp=8,ep=2,zero=3,zero_replicas=2", (1, 2, 2, 2, 1)),
        ("dp=4,ep=4,zero=1,zero_replicas=2", (1, 1, 1, 4, 1)),
        ("dp=2,tp=2,ep=2,etp=2,pp=2,zero=1", (2, 1, 1, 2, 2)),
        ("dp=2,tp=2,pp=2,zero=1", (2, 1, 4, 1, 1)),
    ],
)
def test_experts_have_a_mesh_of_their_own(text: str, sizes: tuple[int, ...]) -> None:
    assert expert_mesh_shape(parse_layout(f"gbs=16,{text}", MODELS["mixtral"])) == sizes
