"""Chunks that a dry run makes where they are looked at: against those of PyTorch."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Literal

import pytest
import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import _chunk_with_empty
from torch.distributed.tensor import Shard

from costmodels import Layout
from costmodels.catalogue import load_model
from runtime.dryrun import run
from runtime.dryrun.lazy_chunks import Chunks, lazy_chunks

SIZES = ((12, 4), (12, 5), (3, 8), (1, 2), (7, 7), (9, 2), (5, 4))


@pytest.mark.parametrize(("size", "count"), SIZES)
@pytest.mark.parametrize("dim", [0, 1])
def test_chunks_are_those_of_pytorch(size: int, count: int, dim: int) -> None:
    tensor = torch.arange(6 * size).view(*((size, 6) if dim == 0 else (6, size)))
    for found, expected in (
        (Chunks(tensor, count, dim), list(torch.chunk(tensor, count, dim))),
        (Chunks(tensor, count, dim, pad=True), _chunk_with_empty(tensor, count, dim)),
    ):
        assert len(found) == len(expected)
        for number in (*range(len(expected)), -1):
            assert torch.equal(found[number], expected[number])
        with pytest.raises(IndexError):
            found[len(expected)]


@pytest.mark.parametrize("dim", [0, 1])
def test_joined_chunks_have_the_shape_of_pytorchs(dim: int) -> None:
    tensor = torch.zeros(8, 12)
    for split in (0, 1):
        chunks = Chunks(tensor, 4, split)
        expected = torch.cat(torch.chunk(tensor, 4, split), dim)
        assert chunks.is_even and chunks.joined(dim).shape == expected.shape
        assert chunks.joined(dim).is_contiguous()
    assert not Chunks(tensor, 3, 0).is_even


@pytest.mark.parametrize(("size", "count"), SIZES)
def test_a_selected_shard_is_that_of_pytorch(size: int, count: int) -> None:
    tensor, shard = torch.arange(2 * size).view(2, size), Shard(1)
    every: tuple[dict[str, Any], ...] = (
        {},
        {"with_padding": False},
        {"with_padding": False, "clone": False},
        {"with_padding": False, "clone": False, "contiguous": False},
    )
    for flags in every:
        for index in range(count):
            expected = shard._select_split_tensor(tensor, count, index, **flags)
            with lazy_chunks():
                found = shard._select_split_tensor(tensor, count, index, **flags)
            assert torch.equal(found, expected) and found.is_contiguous() == expected.is_contiguous()
            assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes()


@pytest.mark.parametrize("zero", [1, 3])
def test_the_peak_is_that_with_all_chunks(zero: Literal[1, 3], monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that FSDP2 splits along their second dimension, over 16 ranks."""
    spec = load_model("qwen3-30b-a3b").model_copy(update={"layers": 2})
    layout = Layout(
        data_parallel=32,
        expert_parallel=2,
        zero_stage=zero,
        micro_batch_size=1,
        global_batch_size=64,
        layers_per_stage=(2,),
    )
    lazily = run.trace(spec, layout)
    monkeypatch.setattr(run, "lazy_chunks", nullcontext)
    assert run.trace(spec, layout).moments == lazily.moments
