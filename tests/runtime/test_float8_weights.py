"""Weights in 8 bits that a rank casts once a step: their elements, their memory and their gradients."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import nn

from runtime.dryrun.run import fake_process_group
from runtime.model.routing import KEEPS_PYTHON_NODES
from runtime.model.transformer import Transformer
from runtime.parallel.local_tensors import local_part
from runtime.parallel.mesh import build_grid
from runtime.parallel.narrow_weight import NarrowWeight
from runtime.parallel.working_copies import WorkingCopies, computing
from runtime.train.stages import build_stage
from tests.support.layouts import parse_layout
from tests.support.models import MODELS, llama
from tests.support.ranks.parity import losses_of
from tests.support.ranks.precision import exactly_compiled_losses, losses_by_gemm
from tests.support.worker_pool import WorkerPool

pytest.importorskip("torchao")

pytestmark = pytest.mark.oldest

SPEC = llama("shared", layers=2, hidden=64, heads=8, kv_heads=2, head_dim=16, ffn=128, vocab=64, seq=16)

FOUR = MODELS["gpt2"]

LAYOUT = "precision=fp8,fp8_recipe=tensorwise"


def built(text: str) -> tuple[Transformer, WorkingCopies]:
    """A stage with random weights, as rank 0 holds it."""
    layout = parse_layout(f"gbs=4,{LAYOUT}{text}", SPEC)
    with fake_process_group(layout.world_size, 0):
        grid = build_grid(SPEC, layout, torch.device("cpu"))
        stage = build_stage(SPEC, layout, grid, 0, compiled=False)
        stage.to_empty(device="cpu")
        torch.manual_seed(0)
        with torch.no_grad():
            for one in stage.parameters():
                local_part(one).normal_()
        return stage, WorkingCopies(stage, layout)


def kept(stage: Transformer) -> Iterator[tuple[nn.Linear, NarrowWeight]]:
    for module in stage.modules():
        if isinstance(module, nn.Linear) and hasattr(module, "narrow"):
            assert isinstance(module.narrow, NarrowWeight)
            yield module, module.narrow


@pytest.mark.parametrize(("text", "count"), [("", 7), (",tp=2", 7), (",tp=4", 5)])
def test_elements_are_those_of_weights_that_were_rounded_to_16_bits(text: str, count: int) -> None:
    """In both orientations. Ranks that share a head join its rows before they cast them."""
    stage, copies = built(text)
    masters = {id(linear): local_part(linear.weight.detach()) for linear, _ in kept(stage)}
    assert len(masters) == count * SPEC.layers
    with computing([copies]):
        for linear, narrow in kept(stage):
            weight = masters[id(linear)].bfloat16().float()
            scale = (448 / weight.abs().max().double()).float()
            expected = (weight * scale).to(torch.float8_e4m3fn).float()
            assert torch.equal(narrow.rows.float(), expected)
            assert torch.equal(narrow.columns.float(), expected.t()) and narrow.columns.is_contiguous()
            assert float(narrow.scale) == float(scale)
            assert float(narrow.inverse) == pytest.approx(1 / float(scale))


def test_memory_is_that_of_copies_in_16_bits_while_a_step_computes_and_none_after_it() -> None:
    stage, copies = built("")

    def held() -> int:
        parts = [one for _, narrow in kept(stage) for one in (narrow.rows, narrow.columns)]
        return sum(one.untyped_storage().nbytes() for one in (*parts, *copies.copies.values()))

    assert held() == 0
    with computing([copies]):
        assert held() == sum(2 * one.numel() for one in copies.copies.values())
    assert held() == 0


@pytest.mark.skipif(not KEEPS_PYTHON_NODES, reason="refused before PyTorch 2.13")
def test_split_backward_has_the_losses_of_weights_that_each_product_casts(pool: WorkerPool) -> None:
    layout = parse_layout(f"gbs=8,dp=2,pp=2,schedule=zbv,{LAYOUT}", FOUR)
    losses = pool.run(partial(losses_of, evaluates=True), layout.world_size, FOUR, layout, 3)
    assert losses == pool.run(losses_by_gemm, layout.world_size, FOUR, layout, 3)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_losses_are_those_of_weights_that_each_product_casts(pool: WorkerPool) -> None:
    # Of few tokens alone, one rounding moves the loss.
    layout = parse_layout(f"gbs=64,mbs=64,{LAYOUT}", SPEC)
    [losses] = pool.run(exactly_compiled_losses, 1, SPEC, layout, 3)
    [expected] = pool.run(losses_by_gemm, 1, SPEC, layout, 3, True)
    if KEEPS_PYTHON_NODES:
        assert losses == pytest.approx(expected, rel=1e-4)
    # Compilers of PyTorch 2.11 do not round all that they are told to.
    assert losses[0] == pytest.approx(expected[0], rel=1e-4)
