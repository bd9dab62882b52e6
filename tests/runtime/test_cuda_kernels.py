"""Code that runs on CUDA devices alone, on tensors that stand in for theirs: the numbers of a CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from runtime.model import attention_kernels, flash_linear_attention, routing
from runtime.model.attention import CoreAttention
from runtime.model.attention_kernels import masked_attention, suffix_attention, takes_flash
from runtime.model.fused_attention import _Reaching, fused_backward, fused_forward, reaching_attention
from runtime.model.reach import Reach
from runtime.parallel import mxfp8
from runtime.parallel.documents import document_mask
from tests.support.stand_in_cuda import Called, StandIn, on_cuda
from tests.support.stand_in_cuda import cuda as cuda

pytestmark = pytest.mark.usefixtures("cuda")

KEYS, HEAD = 20, 12
"""Tokens, and elements of a head, which kernels need a multiple of 8 of."""

KERNELS = ("flash", "efficient")


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernel that takes fp32 here, so that numbers can be compared to seven digits."""
    dtypes = (torch.float32,) if request.param == "flash" else ()
    monkeypatch.setattr(attention_kernels, "FLASH_DTYPES", dtypes)
    return str(request.param)


def drawn(tokens: int, heads: tuple[int, int] = (4, 2), head: int = HEAD) -> list[Tensor]:
    """Queries of the last tokens, keys and values of all, and a sink for each head."""
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    kv = (2, heads[1], KEYS, head)
    return [draw(2, heads[0], tokens, head), draw(*kv), draw(*kv), draw(heads[0])]


def mask_of(tokens: int, reach: Reach) -> Tensor:
    """A document begins at the tenth token of the second row."""
    at_BS, begins = torch.arange(KEYS).expand(2, -1), torch.tensor([[0], [9]])
    starts_BS = torch.where(at_BS >= begins, begins, 0)
    return document_mask(starts_BS, torch.arange(KEYS - tokens, KEYS), KEYS, torch.float32, reach)


@pytest.mark.parametrize("reach", [Reach(), Reach(5), Reach(1), Reach(0, 7), Reach(50)])
@pytest.mark.parametrize("tokens", [KEYS, 13])
@pytest.mark.parametrize("has_mask", [False, True])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_attention_within_a_reach_and_its_gradients_are_those_of_a_cpu(
    kernel: str, reach: Reach, tokens: int, has_mask: bool, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    *leaves, sinks = drawn(tokens)
    leaves += [sinks] if has_sinks else []
    mask = mask_of(tokens, reach) if has_mask else None
    with torch.enable_grad():
        own = [x.clone().requires_grad_() for x in leaves]
        expected = reaching_attention(own[0], own[1], own[2], reach, own[3] if has_sinks else None, mask)
        pull = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
        gradients = torch.autograd.grad(expected, own, pull)
    call = Called(_Reaching)
    monkeypatch.setattr(_Reaching, "apply", call.forward)
    q, k, v, *more = (on_cuda(x) for x in leaves)
    found = reaching_attention(q, k, v, reach, more[0] if more else None, on_cuda(mask))
    assert isinstance(found, StandIn)
    torch.testing.assert_close(found.held, expected.detach())
    if not call.saved_tensors:
        assert reach.chunk and not has_mask and not has_sinks, "PyTorch's own backward runs"
        return
    filled = torch.nn.functional.pad(pull, (0, call.saved_tensors[0].shape[-1] - HEAD))  # type: ignore[union-attr]
    to = call.backward(on_cuda(filled))
    for one, other in zip(to, gradients, strict=False):
        torch.testing.assert_close(one.held[..., : other.shape[-1]], other)


@pytest.mark.parametrize("tokens", [KEYS, 13])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_the_last_tokens_attend_as_on_a_cpu(kernel: str, tokens: int, heads: tuple[int, int]) -> None:
    q, k, v, _ = drawn(tokens, heads)
    found = suffix_attention(on_cuda(q), on_cuda(k), on_cuda(v))
    assert isinstance(found, StandIn)
    torch.testing.assert_close(found.held, suffix_attention(q, k, v))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_documents_are_kept_apart_as_on_a_cpu(kernel: str, heads: tuple[int, int]) -> None:
    (q, k, v, _), mask = drawn(KEYS, heads), mask_of(KEYS, Reach())
    found = masked_attention(on_cuda(q), on_cuda(k), on_cuda(v), on_cuda(mask))
    assert isinstance(found, StandIn)
    torch.testing.assert_close(found.held, masked_attention(q, k, v, mask))


@pytest.mark.parametrize(("causal", "tokens", "keys"), [(True, 16, 16), (False, 16, 8), (False, 8, 16)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_parts_of_a_ring_are_those_of_a_cpu(
    kernel: str, causal: bool, tokens: int, keys: int, heads: tuple[int, int]
) -> None:
    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    q, k, v = draw(2, heads[0], tokens, 8), draw(2, heads[1], keys, 8), draw(2, heads[1], keys, 8)
    pull = draw(q.shape)

    def both(*given: Any) -> list[Tensor]:
        q, k, v, pull = given
        out, lse, *state = fused_forward(q, k, v, is_causal=causal, scale=0.3)
        known = {"query": q, "key": k, "value": v, "out": out, "logsumexp": lse, "grad_out": pull}
        return [out, lse, *fused_backward(**known, is_causal=causal, scale=0.3, state=state)]

    for one, other in zip(both(*map(on_cuda, (q, k, v, pull))), both(q, k, v, pull), strict=True):
        assert isinstance(one, StandIn)
        torch.testing.assert_close(one.held, other)


@pytest.mark.parametrize("values", [HEAD, 8, 16])
def test_heads_of_two_sizes_go_to_the_kernel_as_they_are(values: int) -> None:
    q, k, _, _ = drawn(KEYS, (4, 4))
    v = torch.randn(2, 4, KEYS, values, generator=torch.Generator().manual_seed(1))
    core = CoreAttention()
    found = core(on_cuda(q), on_cuda(k), on_cuda(v))
    torch.testing.assert_close(found.held, core(q, k, v))


@pytest.mark.parametrize(
    ("dtype", "size", "capability", "taken"),
    [
        (torch.bfloat16, 256, (8, 0), True),
        (torch.float16, 64, (9, 0), True),
        (torch.float32, 64, (9, 0), False),
        (torch.bfloat16, 264, (9, 0), False),
        (torch.bfloat16, 64, (7, 5), False),
    ],
)
def test_the_flash_kernel_takes_16_bits_heads_up_to_256_and_gpus_since_ampere(
    dtype: torch.dtype, size: int, capability: tuple[int, int], taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q = torch.zeros(1, 1, 1, size, dtype=dtype)
    assert takes_flash(on_cuda(q)) == (dtype != torch.float32 and size <= 256), "without a GPU: one of today"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    assert takes_flash(on_cuda(q)) == taken
    assert not takes_flash(q)


def matrix(rows: int, columns: int, seed: int) -> Tensor:
    """Rows whose sizes are apart by several powers."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(3 * torch.randn(rows, 1, generator=generator))
    return (torch.randn(rows, columns, generator=generator) * sizes).bfloat16()


def assert_products_are_those_of_a_cpu(function: Any, *more: Any) -> None:
    """Results of a GEMM in 8 bits and both gradients, of rows that are no multiple of the needed number."""
    given, pull = (matrix(37, 160, 0), matrix(192, 160, 1)), matrix(37, 192, 2)
    here, there = Called(function), Called(function)
    results = [here.forward(*given, *more), *here.backward(pull)]
    found = [there.forward(*map(on_cuda, given), *more), *there.backward(on_cuda(pull))]
    for one, other in zip(found, results, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one.held, other, rtol=1e-2, atol=1e-3)


def test_products_in_mxfp8_are_those_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    # The operator knows a CPU and a GPU; what it computes is asked of neither.
    monkeypatch.setattr(mxfp8, "mxfp8_product", mxfp8.mxfp8_product._init_fn)
    assert_products_are_those_of_a_cpu(mxfp8._Product)


def test_products_by_one_scale_are_those_of_a_cpu() -> None:
    pytest.importorskip("torchao")
    from runtime.parallel import float8_tensorwise

    assert_products_are_those_of_a_cpu(float8_tensorwise._Product, float8_tensorwise.formats())


def test_sums_of_weight_gradients_lose_no_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fast sums of Hopper's tensor cores are for results alone, as in torchao's recipe."""
    pytest.importorskip("torchao")
    from runtime.parallel import float8_tensorwise

    fast: list[bool] = []
    multiply = float8_tensorwise.multiply_narrow
    monkeypatch.setattr(
        torch, "_scaled_mm", lambda *given, use_fast_accum, **rest: fast.append(use_fast_accum) or given[0]
    )
    call = Called(float8_tensorwise._Product)
    call.forward(on_cuda(matrix(32, 48, 0)), on_cuda(matrix(16, 48, 1)), float8_tensorwise.formats())
    call.backward(on_cuda(matrix(32, 16, 2)))
    assert fast == [True, False, False] and multiply is float8_tensorwise.multiply_narrow


@pytest.mark.parametrize(
    ("hip", "major", "garbage"), [(None, 9, False), (None, 10, True), (None, 12, True), ("6.4", 9, True)]
)
def test_experts_without_rows_get_zeros_where_kernels_write_nothing(
    hip: str | None, major: int, garbage: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 0))
    assert routing._leaves_garbage(torch.device("cuda")) == garbage
    assert not routing._leaves_garbage(torch.device("cpu"))


@pytest.mark.parametrize(
    ("dtype", "widths", "majors"),
    [
        (torch.bfloat16, (8, 64), (9, 10)),
        (torch.bfloat16, (4, 64), ()),
        (torch.bfloat16, (64, 12), ()),
        (torch.float32, (8, 64), ()),
        (torch.float16, (8, 64), ()),
    ],
)
def test_grouped_gemms_are_for_bf16_on_hopper_and_data_centre_blackwell(
    dtype: torch.dtype, widths: tuple[int, ...], majors: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cuda")
    assert routing.takes_grouped(dtype, device, *widths) == bool(majors), "without a GPU: one of today"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for major in (7, 8, 9, 10, 12):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, major=major: (major, 0))
        assert routing.takes_grouped(dtype, device, *widths) == (major in majors)
    aligned = all(width * dtype.itemsize % 16 == 0 for width in widths)
    assert routing.takes_grouped(dtype, torch.device("cpu"), *widths) == aligned


def test_kernels_of_fla_take_16_bits_of_cuda_devices_with_memory() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        v = torch.zeros(1, 2, 3, 4, dtype=dtype)
        assert flash_linear_attention.takes(on_cuda(v)) == (dtype.itemsize == 2)
        assert not flash_linear_attention.takes(v)
    with FakeTensorMode():
        fake = torch.empty(1, 2, 3, 4, dtype=torch.bfloat16, device="cuda")
    assert not flash_linear_attention.takes(fake)
