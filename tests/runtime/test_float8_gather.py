"""Weights that FSDP2 gathers in 8 bits: the same numbers as gathered in 16."""

from __future__ import annotations

import shutil
from functools import partial
from importlib.util import find_spec

import pytest
import torch

from runtime.model.routing import KEEPS_PYTHON_NODES
from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks import precision as work
from tests.support.ranks.parity import losses_of
from tests.support.worker_pool import WorkerPool

pytestmark = [
    pytest.mark.oldest,
    pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed"),
]


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ("llama", "gbs=2,dp=2,zero=3"),
        ("llama", "gbs=8,dp=2,zero=1"),
        ("llama", "gbs=4,dp=2,zero=2,recompute=full"),
        ("gpt2", "gbs=8,dp=2,zero=3,gradient_reduction=bf16"),
        ("llama", "gbs=4,dp=2,zero=3,cp=2"),
        ("llama", "gbs=4,dp=4,zero=1,zero_replicas=2"),
        ("llama", "gbs=4,dp=2,zero=3,tp=2,sp=1"),
        ("gpt2", "gbs=8,dp=2,zero=1,pp=2"),
        pytest.param(
            *("gpt2", "gbs=8,dp=2,zero=1,pp=2,vpp=2,schedule=zbv"),
            marks=pytest.mark.skipif(not KEEPS_PYTHON_NODES, reason="refused before PyTorch 2.13"),
        ),
        ("mixtral", "gbs=4,dp=2,zero=3,ep=2"),
    ],
)
def test_losses_are_those_of_weights_that_are_gathered_in_bf16(
    pool: WorkerPool, model: str, text: str
) -> None:
    """To the bit: a weight is cast by the same scale, on one side of the gathering or on the other."""
    spec = MODELS[model]
    plain = parse_layout(f"{text},precision=fp8,fp8_recipe=tensorwise", spec)
    narrow = plain.model_copy(update={"fp8_param_gather": True})
    assert narrow.gathers_fp8
    run = partial(losses_of, evaluates=True)
    losses = pool.run(run, plain.world_size, spec, narrow, 4)
    assert losses == pool.run(run, plain.world_size, spec, plain, 4)


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_losses_are_the_same_but_for_what_compilers_do_not_round(pool: WorkerPool) -> None:
    """A compiler keeps fp32 in what it fuses, and fuses the two otherwise; told to round, it has the same."""
    spec = MODELS["llama"].model_copy(update={"layers": 1})
    plain = parse_layout("gbs=4,dp=2,zero=3,precision=fp8,fp8_recipe=tensorwise", spec)
    narrow = plain.model_copy(update={"fp8_param_gather": True})
    losses = pool.run(work.exactly_compiled_losses, 2, spec, narrow, 3)
    expected = pool.run(work.exactly_compiled_losses, 2, spec, plain, 3)
    if KEEPS_PYTHON_NODES:
        assert losses == expected
    # Compilers of PyTorch 2.11 do not round all that they are told to.
    assert losses[0] == pytest.approx(expected[0], rel=1e-4)


def test_what_is_gathered_has_a_byte_for_each_weight(pool: WorkerPool) -> None:
    spec = MODELS["llama"]
    plain = parse_layout("gbs=2,dp=2,zero=3,precision=fp8,fp8_recipe=tensorwise", spec)
    wide = pool.run(work.gathered, 2, spec, plain)[0]
    narrow = pool.run(work.gathered, 2, spec, plain.model_copy(update={"fp8_param_gather": True}))[0]
    head, kv = spec.hidden // spec.heads, spec.kv_heads or spec.heads
    layer = spec.hidden * (2 * spec.hidden + 2 * kv * head + 3 * spec.ffn)
    assert (wide.narrow, narrow.narrow) == (0, spec.layers * layer)
    assert set(wide.sent) == {torch.bfloat16}
    assert sum(wide.sent.values()) - sum(narrow.sent.values()) == spec.layers * layer
    # Norms travel among the weights, as bytes; embedding and head as they did.
    norms = spec.layers * 2 * spec.hidden * torch.bfloat16.itemsize
    assert narrow.sent[torch.uint8] == spec.layers * layer + norms


def test_products_by_one_scale_are_those_of_rounded_operands() -> None:
    """Weights and activations have E4M3, gradients of results E5M2, each scaled so that its largest fits."""
    # The module imports PyTorch's compiler.
    from runtime.parallel.float8_tensorwise import narrow, tensorwise_linear

    generator = torch.Generator().manual_seed(0)
    x, weight, pull = (torch.randn(*sides, generator=generator) for sides in ((32, 48), (16, 48), (32, 16)))

    def rounded(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        scale = torch.finfo(dtype).max / matrix.abs().max()
        return (matrix * scale).to(dtype).float() / scale

    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        # The largest element is the largest of the format: no bit of its range is lost.
        assert narrow(x, dtype).elements.float().abs().max() == torch.finfo(dtype).max
        # Rounded once, of numbers in 16 bits too.
        small = narrow(x.bfloat16(), dtype)
        assert torch.equal(small.elements, (x.bfloat16().float() * small.scale).to(dtype))
    narrow_x, narrow_weight = (rounded(one, torch.float8_e4m3fn) for one in (x, weight))
    narrow_pull = rounded(pull, torch.float8_e5m2)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    result = tensorwise_linear(leaves[0], leaves[1])
    torch.testing.assert_close(result, narrow_x @ narrow_weight.T)
    to_x, to_weight = torch.autograd.grad(result, leaves, pull)
    torch.testing.assert_close(to_x, narrow_pull @ narrow_weight)
    torch.testing.assert_close(to_weight, narrow_pull.T @ narrow_x)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_matrix_of_zeros_stays_one(dtype: torch.dtype) -> None:
    """The first gradients of an adapter are zero."""
    from runtime.parallel.float8_tensorwise import narrow

    found = narrow(torch.zeros(3, 16), dtype)
    assert found.scale.isfinite() and not found.elements.float().any()
