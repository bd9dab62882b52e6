"""Dry runs that repeat what passes of microbatches do to memory find what those find that run all of them."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from costmodels import Layout, ModelSpec
from runtime.dryrun.memory_trace import MemoryTrace
from runtime.dryrun.run import trace
from runtime.model.transformer import Transformer
from tests.runtime.test_few_layers import EXPERTS, SMALL
from tests.support.layouts import layout_of

INTERLEAVED = {"pipeline_parallel": 4, "virtual_pipeline_parallel": 2, "schedule": "interleaved"} | {
    "precision": "bf16",
    "global_batch_size": 16,
}

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    "1f1b": ({}, {"pipeline_parallel": 8, "precision": "bf16", "global_batch_size": 16}, False),
    "interleaved": ({}, INTERLEAVED, False),
    "sharded": (
        {},
        {**INTERLEAVED, "data_parallel": 2, "zero_stage": 1, "tensor_parallel": 2, "sequence_parallel": True}
        | {"global_batch_size": 32},
        False,
    ),
    "recomputed": ({}, {**INTERLEAVED, "recompute": "full"}, True),
    "experts": (
        EXPERTS,
        {**INTERLEAVED, "data_parallel": 2, "expert_parallel": 2, "global_batch_size": 32},
        False,
    ),
}


def compared(
    spec: ModelSpec, layout: Layout, rank: int, compiled: bool = False
) -> tuple[MemoryTrace, MemoryTrace]:
    """A dry run, and one that runs everything."""
    found, whole = (
        trace(spec, layout, pipeline_rank=rank, compiled=compiled, whole=whole) for whole in (False, True)
    )
    return found, whole


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_what_is_repeated_is_what_passes_do(name: str) -> None:
    fields, degrees, compiled = CASES[name]
    spec = ModelSpec(**{**SMALL, "layers": 8, **fields})
    found, whole = compared(spec, layout_of(spec, **degrees), 0, compiled)
    assert found == whole
    assert found.operations < 0.9 * whole.operations


def test_passes_run_where_they_leave_something() -> None:
    """A stage that keeps memory of each forward pass to the end of the step cannot be repeated."""
    spec = ModelSpec(**{**SMALL, "layers": 8})
    layout = layout_of(spec, **INTERLEAVED)
    kept: list[Any] = []
    forward = Transformer.forward

    def keeping(self: Transformer, x: torch.Tensor) -> torch.Tensor:
        kept.append(torch.empty(1 << 20, device=x.device))
        return forward(self, x)

    found = []
    for whole in (False, True):
        with patch.object(Transformer, "forward", keeping):
            found.append(trace(spec, layout, whole=whole))
        kept.clear()
    assert found[0].peak.total == found[1].peak.total > 24 << 22
