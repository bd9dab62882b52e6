"""Upper bounds of the operands of tensor-wise GEMMs: no operand exceeds its own, and gradients stay right."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from costmodels import ModelSpec
from runtime.dryrun.run import fake_process_group
from runtime.model.mlp import ACTIVATIONS, MLP
from runtime.model.norms import NormFromOne
from runtime.model.transformer import Block, Transformer
from runtime.parallel.mesh import build_grid
from runtime.train.stages import build_stage
from tests.support.layouts import parse_layout
from tests.support.models import MODELS, llama

pytest.importorskip("torchao")

from runtime.parallel import float8_tensorwise
from runtime.parallel.float8 import float8
from runtime.parallel.float8_bounds import norm_bound, output_bound
from runtime.parallel.float8_tensorwise import Narrow, Options

pytestmark = pytest.mark.oldest

SPEC = llama("bounds", layers=1, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=64, seq=16)

NORMS = {
    "rms": lambda: nn.RMSNorm(64),
    "from one": lambda: NormFromOne(64),
    "layer": lambda: nn.LayerNorm(64),
}


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("outliers", [False, True])
def test_norms_give_no_element_above_their_bound(kind: str, outliers: bool) -> None:
    norm: Any = NORMS[kind]()
    with torch.no_grad():
        for seed, parameter in enumerate(norm.parameters()):
            parameter.copy_(drawn(64, seed=seed))
    # One element of a row that is all of its mean square, in turn; 1 % is what 16 bits may round up.
    rows = 1e4 * torch.eye(64) if outliers else drawn(256, 64)
    largest, bound = float(norm(rows).detach().abs().max()), float(norm_bound(norm))
    assert largest <= bound * 1.01
    # The largest weight and the largest bias may be those of different elements.
    apart = 2 * float(norm.bias.detach().abs().max()) if kind == "layer" else 0.0
    assert not outliers or largest > 0.9 * bound - apart


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("aligned", [False, True])
def test_no_output_of_a_layer_after_a_norm_is_above_its_bound(kind: str, aligned: bool) -> None:
    norm: Any = NORMS[kind]()
    linear = nn.Linear(64, 48).bfloat16()
    linear.product = float8_tensorwise.tensorwise_linear  # type: ignore[assignment]
    with torch.no_grad():
        for seed, parameter in enumerate((*norm.parameters(), *linear.parameters())):
            parameter.copy_(drawn(*parameter.shape, seed=seed))
        factors = 1.0 + norm.weight if kind == "from one" else norm.weight
        # Tokens with the directions of the rows that multiply them.
        tokens = linear.weight.float() * factors if aligned else drawn(256, 64)
        x = norm(tokens).bfloat16()
        narrow = float8_tensorwise.tensorwise_linear(x, linear.weight, linear.bias)
    largest = max(float(result.abs().max()) for result in (narrow, F.linear(x, linear.weight, linear.bias)))
    assert largest <= float(output_bound(norm, linear)) < 2 ** (2 if aligned else 5) * largest


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("spread", [0.0, 2.0])
def test_gradients_of_a_gated_mlp_are_within_bounds_that_fit_their_format(
    activation: str, spread: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where sizes of tokens and channels are apart by several powers of two."""
    mlp = gated(activation)
    with torch.no_grad():
        mlp.up.weight.mul_(16)
    seen: list[tuple[Tensor, Tensor | None]] = []
    plain = float8_tensorwise.narrow

    def narrow(matrix: Tensor, dtype: torch.dtype, bound: Tensor | None = None) -> Narrow:
        seen.append((matrix.detach(), bound))
        return plain(matrix, dtype, bound)

    monkeypatch.setattr(float8_tensorwise, "narrow", narrow)
    x = drawn(3, 40, 64) * torch.exp(spread * drawn(3, 40, 1, seed=2))
    x = F.rms_norm(x, (64,)).bfloat16().requires_grad_()
    result = mlp(x)
    result.backward(
        drawn(3, 40, 64, seed=1).bfloat16() * torch.exp(spread * drawn(3, 40, 1, seed=3)).bfloat16()
    )
    bounded = [(matrix, bound) for matrix, bound in seen if bound is not None]
    # Both inputs, that of the last matrix, its gradient and those of up and gate.
    assert len(bounded) == 6
    for matrix, bound in bounded:
        assert 0 < float(matrix.abs().max()) <= 1.01 * float(bound)
    for matrix, bound in bounded[-2:]:
        # Elements of a typical size have the format's full precision: 16 powers of two above 1, 14 below.
        typical = float(matrix[matrix != 0].abs().float().median())
        assert float(bound) / typical < 2**26


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_gated_mlp_in_8_bits_is_near_one_in_16_bits(activation: str) -> None:
    found: list[list[Tensor]] = []
    for narrow in (True, False):
        mlp = gated(activation) if narrow else made(activation)
        x = F.rms_norm(drawn(3, 40, 64), (64,)).bfloat16().requires_grad_()
        result = mlp(x)
        result.backward(drawn(3, 40, 64, seed=1).bfloat16())
        gradients = [parameter.grad for parameter in mlp.parameters()]
        found.append([result.detach(), x.grad, *gradients])  # type: ignore[list-item]
    for one, other in zip(*found, strict=True):
        assert 0 < float((one - other).float().norm() / other.float().norm()) < 0.15


def made(activation: str) -> MLP:
    spec = SPEC.model_copy(update={"activation": activation})
    torch.manual_seed(0)
    mlp = MLP(spec, spec.ffn).bfloat16()
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.normal_(std=0.2)
    return mlp


def gated(activation: str) -> MLP:
    """An MLP in 8 bits."""
    mlp = made(activation)
    stage = Transformer(SPEC, 64)
    [block] = stage.blocks
    block.mlp = mlp
    mlp.activation.function = ACTIVATIONS[activation]
    float8(stage)
    return mlp


def places(block: Block) -> dict[str, tuple[bool, Options]]:
    """The options of each layer by its name, after True where weights bound the layer's input."""
    found: dict[str, tuple[bool, Options]] = {}
    for name, module in block.named_modules():
        product = module.__dict__.get("product")
        if isinstance(product, partial):
            given, above, options = product, False, Options()
            while isinstance(given, partial):
                above = above or "above" in given.keywords
                options = given.keywords.get("options", options)
                given = given.func  # type: ignore[assignment]
            found[name] = above, options
    return found


ROWS, SLOT, NEITHER = Options(by_rows=True), Options(slotted=True), Options()


@pytest.mark.parametrize(
    "text", ["", ",tp=2", ",tp=2,sp=1", ",recompute=selective,recompute_modules=activation"]
)
def test_layers_after_a_norm_and_after_attention_get_bounds(text: str) -> None:
    layout = parse_layout(f"gbs=2,precision=fp8{text}", SPEC)
    with fake_process_group(layout.world_size, 0):
        grid = build_grid(SPEC, layout, torch.device("cpu"))
        (block,) = build_stage(SPEC, layout, grid, 0, compiled=False).blocks
        assert places(block) == {
            **{f"attention.{name}": (True, NEITHER) for name in ("query", "key", "value")},
            "attention.output": (True, ROWS),
            "mlp.up": (True, SLOT),
            "mlp.gate": (True, SLOT),
            "mlp.down": (False, ROWS),
        }


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_with_a_bound_multiplies_what_that_norm_or_layer_returns(name: str) -> None:
    """The layer multiplies the output of the norm, or averages or activations of the output of a layer."""
    spec: ModelSpec = MODELS[name]
    if spec.lora is not None:
        pytest.skip("fp8 is refused with adapters")
    torch.manual_seed(0)
    stage = Transformer(spec, spec.padded_vocab(1)).bfloat16()
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.normal_(std=0.1)
    float8(stage)
    returned: dict[nn.Module, Tensor] = {}
    checked = []

    def check(module: nn.Module, given: tuple[Any, ...]) -> None:
        product = module.__dict__["product"]
        while isinstance(product, partial):
            if "above" in product.keywords:
                above = product.keywords["above"]
                norm, *linear = above.args
                if not linear:
                    assert torch.equal(given[0], returned[norm])
                assert 0 < float(given[0].abs().max()) <= 1.01 * float(above())
                checked.append(module)
            product = product.func

    def keep(module: nn.Module, _: Any, result: Tensor) -> None:
        returned[module] = result

    for module in stage.modules():
        if isinstance(module, nn.Linear) and "product" in module.__dict__:
            module.register_forward_pre_hook(check)
        elif isinstance(module, (nn.RMSNorm, nn.LayerNorm)):
            module.register_forward_hook(keep)
    with torch.no_grad():
        stage(torch.randint(0, spec.vocab, (2, spec.seq)))
    norms = any(block.attention_norm is not None for block in stage.blocks)
    narrow = any("product" in module.__dict__ for module in stage.modules() if isinstance(module, nn.Linear))
    assert bool(checked) == (norms and narrow)


def test_a_bias_is_added_before_the_result_is_rounded_and_gets_the_sum_of_its_gradients() -> None:
    """The scale of the gradient is that of its largest element, as without a bias."""
    x, weight = drawn(40, 64), drawn(32, 64, seed=1)
    bias, pull = drawn(32, seed=2), drawn(40, 32, seed=3).bfloat16()
    found = []
    for given in (None, bias):
        leaves = [
            one.bfloat16().requires_grad_() for one in (x, weight, *(() if given is None else (given,)))
        ]
        result = float8_tensorwise.tensorwise_linear(*leaves)
        result.backward(pull)
        found.append([result.detach(), *(one.grad for one in leaves)])
    (plain, *gradients), (biased, *biased_gradients) = found
    of_bias = biased_gradients.pop()
    assert all(map(torch.equal, gradients, biased_gradients))
    assert of_bias is not None
    torch.testing.assert_close(of_bias, pull.sum(0))
    # Two roundings are off by at most one more.
    torch.testing.assert_close(biased, plain + bias.bfloat16(), rtol=2**-7, atol=2**-6)
