"""Products in 8 bits with one scale per 32 elements."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from costmodels import ModelSpec
from costmodels.errors import InputError
from runtime.dryrun.fake_gpu import fake_gpu
from runtime.model.transformer import Transformer
from runtime.parallel.float8 import check_float8, float8
from runtime.parallel.mxfp8 import mxfp8_linear, narrow, tiled, wide
from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks.parity import losses_of, relative_difference
from tests.support.worker_pool import WorkerPool

pytestmark = pytest.mark.oldest

LLAMA = MODELS["llama"]


def matrix(rows: int, columns: int, seed: int = 0, spread: float = 0.0) -> torch.Tensor:
    """Rows whose sizes are apart by as many powers."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(spread * torch.randn(rows, 1, generator=generator))
    return (torch.randn(rows, columns, generator=generator) * sizes).bfloat16()


@given(st.floats(2.0**-120, 2.0**120), st.integers(0, 31))
def test_no_element_leaves_the_range_and_factors_are_the_least_powers_that_keep_it(
    largest: float, place: int
) -> None:
    block = torch.zeros(1, 32)
    block[0, place] = largest
    found = narrow(block)
    factor = 2.0 ** (int(found.exponents) - 127)
    held = float(block.max())
    assert held <= 448 * factor and (held > 224 * factor or factor <= 2.0**-126)
    assert float(wide(found).max()) == pytest.approx(held, rel=2**-4)


def test_casts_and_tiles_are_those_of_torchao() -> None:
    formats = pytest.importorskip("torchao.prototype.mx_formats")
    if not hasattr(formats, "ScaleCalculationMode"):
        pytest.skip("this torchao rounds scales in one way alone")
    from torchao.prototype.mx_formats.mx_tensor import to_mx
    from torchao.prototype.mx_formats.utils import to_blocked

    x = matrix(70, 160, spread=6.0)
    factors, elements = to_mx(x, torch.float8_e4m3fn, 32, formats.ScaleCalculationMode.RCEIL)
    found = narrow(x)
    assert torch.equal(found.exponents, factors.view(torch.uint8).view_as(found.exponents))
    assert torch.equal(found.elements.view(torch.uint8), elements.view(torch.uint8))
    assert torch.equal(tiled(found.exponents).view(torch.uint8), to_blocked(factors.view(torch.uint8)))


def test_products_and_gradients_are_near_those_of_16_bits() -> None:
    x, weight, bias = matrix(45, 64).requires_grad_(), matrix(96, 64, 1).requires_grad_(), torch.zeros(96)
    given = matrix(45, 96, 2)
    found = torch.autograd.grad(mxfp8_linear(x, weight, bias), (x, weight), given.float())
    exact = torch.autograd.grad(torch.nn.functional.linear(x, weight), (x, weight), given)
    for one, other in zip(found, exact, strict=True):
        # Four binary digits of both operands.
        assert 0 < float((one - other).float().norm() / other.float().norm()) < 0.05


def test_a_gpu_multiplies_by_its_kernel() -> None:
    with fake_gpu(), FakeTensorMode():
        x, weight = (torch.empty(rows, 96, device="cuda", dtype=torch.bfloat16) for rows in (3 * 37, 160))
        result = mxfp8_linear(x.view(3, 37, 96).requires_grad_(), weight.requires_grad_())
        assert (result.shape, result.dtype) == ((3, 37, 160), torch.bfloat16)
        result.sum().backward()
        assert weight.grad is not None and weight.grad.shape == weight.shape


def test_layers_whose_sides_are_no_multiples_of_32_stay_in_16_bits() -> None:
    spec = ModelSpec(name="odd", layers=1, hidden=32, heads=2, ffn=48, vocab=64, seq=16)
    stage = Transformer(spec, 64).bfloat16()
    float8(stage, "mxfp8")
    converted = [name for name, module in stage.named_modules() if hasattr(module, "product")]
    assert converted == [f"layers.0.attention.{name}" for name in ("query", "key", "value", "output")]


@pytest.mark.parametrize("text", ["", "dp=2,zero=3", "tp=2,sp=1"])
def test_losses_follow_those_of_16_bits(pool: WorkerPool, text: str) -> None:
    spec = LLAMA.model_copy(update={"hidden": 64, "ffn": 128, "head_dim": 32})
    layout = parse_layout("gbs=2,precision=mxfp8" + ("," + text if text else ""), spec)
    bf16 = layout.model_copy(update={"precision": "bf16"})
    losses = pool.run(losses_of, layout.world_size, spec, layout, 6)
    expected = pool.run(losses_of, layout.world_size, spec, bf16, 6)
    assert all(one == losses[0] for one in losses)
    assert 1e-5 < relative_difference(losses[0], expected[0]) < 2e-2


def test_other_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"precision mxfp8: device cpu has no mxfp8 GEMMs; pin"):
        check_float8(torch.device("cpu"), "mxfp8")
    capability = [9, 0]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: tuple(capability))
    with pytest.raises(InputError, match=r"a GPU has no mxfp8 .*since Blackwell.*; pin precision=bf16"):
        check_float8(torch.device("cuda"), "mxfp8")
    capability[0] = 10
    check_float8(torch.device("cuda"), "mxfp8")
