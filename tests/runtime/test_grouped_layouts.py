"""Operands of grouped and scaled GEMMs in compiled layers on a GPU, whose kernels have rules about them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from costmodels import ModelSpec
from runtime.dryrun.run import trace
from runtime.parallel import summing_products
from runtime.train import stages
from tests.support.autograd_functions import drawn
from tests.support.gpu_lowering import SCALED, Operand, Product, lowered_products, products_of
from tests.support.layouts import parse_layout
from tests.support.models import FORMS, MODELS, llama

pytestmark = pytest.mark.oldest

MIXTRAL = llama("mixtral", layers=1, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=64, seq=32).model_copy(
    update={"experts": 8, "top_k": 2, "expert_ffn": 96}
)

QWEN3 = MIXTRAL.model_copy(update={"name": "qwen3-moe", "qk_norm": True, "head_dim": 32})

DENSE = MIXTRAL.model_copy(update={"name": "dense", "experts": 0, "top_k": 0, "expert_ffn": 0})

BIASED = DENSE.model_copy(update={"name": "biased", "linear_bias": True})

DEEPSEEK = MODELS["deepseek"].model_copy(update={"layers": 1, "dense_layers": 0})


def one_layer(name: str, **fields: Any) -> ModelSpec:
    return FORMS[name].model_copy(update={"layers": 1, **fields})


SELECTIVE = "recompute=selective,recompute_modules="


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (DENSE, "precision=fp8"),
        (BIASED, "precision=fp8"),
        (DENSE, "precision=fp8,tp=2"),
        (DENSE, "precision=fp8,fp8_recipe=rowwise"),
        (DENSE, "precision=mxfp8"),
    ],
)
def test_kernels_of_products_in_8_bits_take_what_compiled_layers_give(spec: ModelSpec, text: str) -> None:
    if "mxfp8" not in text:
        pytest.importorskip("torchao")
    with lowered_products() as found:
        trace(spec, parse_layout(f"mbs=1,{text}", spec), compiled=True)
    # Seven matrices, each in three products, by the kernel of 8 bits, or that which adds to a sum. Forward
    # adds biases.
    own = summing_products.SCALED
    assert [product.kernel in (*SCALED, own) for product in found] == [True] * 21
    sums = [product.kernel for product in found].count(own)
    assert sums == 7 * ("rowwise" not in text and "mxfp8" not in text)
    assert {product: product.fault for product in found if product.fault} == {}
    biased = [product for product in found if product.kernel != own and len(product.further) == 3]
    assert len(biased) == 7 * (spec is BIASED)


def operand(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> Operand:
    return Operand(shape, strides, offset, dtype)


E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
LEFT, RIGHT = operand((32, 64), (64, 1), E4M3), operand((64, 96), (1, 64), E4M3)
WHOLE = operand((), (), torch.float32)
BLOCKS = operand((128 * 4,), (1,), E8M0)


@pytest.mark.parametrize(
    ("left", "right", "scales", "fault"),
    [
        (LEFT, RIGHT, (WHOLE, WHOLE), ""),
        (LEFT, RIGHT, (BLOCKS, BLOCKS), ""),
        (
            LEFT,
            RIGHT,
            (operand((32, 1), (1, 1), torch.float32), operand((1, 96), (96, 1), torch.float32)),
            "",
        ),
        (operand((32, 64), (1, 32), E4M3), RIGHT, (WHOLE, WHOLE), "not rows times columns"),
        (LEFT, operand((64, 96), (96, 1), E4M3), (WHOLE, WHOLE), "not rows times columns"),
        (LEFT, operand((64, 90), (1, 64), E4M3), (WHOLE, WHOLE), "no multiple of 16"),
        (
            operand((32, 40), (48, 1), E4M3),
            operand((40, 96), (1, 48), E4M3),
            (WHOLE, WHOLE),
            "multiple of 16",
        ),
        (operand((32, 64), (72, 1), E4M3), RIGHT, (WHOLE, WHOLE), "rows begin at no multiple of 16 bytes"),
        (operand((32, 64), (64, 1), E4M3, 8), RIGHT, (WHOLE, WHOLE), "rows begin at no multiple"),
        (operand((32, 64), (64, 1), E5M2), operand((64, 96), (1, 64), E5M2), (WHOLE, WHOLE), "in E5M2"),
        (LEFT, RIGHT, (WHOLE,), "not a scale for each operand"),
        (LEFT, RIGHT, (WHOLE, WHOLE, operand((96,), (1,), torch.bfloat16)), ""),
        (LEFT, RIGHT, (WHOLE, WHOLE, operand((96,), (1,), torch.float32)), "a bias is no dense row"),
        (LEFT, RIGHT, (WHOLE, WHOLE, operand((64,), (1,), torch.bfloat16)), "a bias is no dense row"),
        (LEFT, RIGHT, (WHOLE, operand((), (), torch.bfloat16)), "not in fp32"),
        (LEFT, RIGHT, (operand((1, 32), (32, 1), torch.float32), WHOLE), "for each row of the left"),
        (LEFT, RIGHT, (operand((32, 1), (2, 1), torch.float32), WHOLE), "do not follow each other"),
        (LEFT, RIGHT, (operand((64,), (1,), E8M0), BLOCKS), "in whole tiles"),
    ],
)
def test_rules_of_products_in_8_bits(
    left: Operand, right: Operand, scales: tuple[Operand, ...], fault: str
) -> None:
    found = Product(left, right, "_scaled_mm", scales).fault
    assert fault in found and bool(fault) == bool(found)


def test_rules_of_grouped_products() -> None:
    rows, columns = (operand((96, 64), (1, 96), torch.bfloat16), operand((64, 32), (32, 1), torch.bfloat16))
    ends = operand((8,), (1,), torch.int32)
    assert Product(rows, columns, "_grouped_mm", (ends,)).fault == ""
    dense = rows._replace(strides=(64, 1))
    assert "any element of a dense dimension" in Product(dense, columns, "_grouped_mm", (ends,)).fault
    wide = ends._replace(dtype=torch.int64)
    assert "numbers of 32 bits" in Product(rows, columns, "_grouped_mm", (wide,)).fault


def test_rules_of_products_that_add_to_sums() -> None:
    rows, more = operand((64, 96), (96, 1), torch.bfloat16), operand((64, 32), (32, 1), torch.bfloat16)
    ends, place = operand((8,), (1,), torch.int32), operand((0,), (1,), torch.float32)
    grouped = Product(rows, more, summing_products.GROUPED, (ends, place))
    assert grouped.fault == ""
    assert "rows are not dense" in grouped._replace(left=rows._replace(strides=(1, 64))).fault
    assert "multiple of 16 bytes" in grouped._replace(right=more._replace(strides=(33, 1))).fault
    assert "32 bits" in grouped._replace(further=(ends._replace(dtype=torch.int64), place)).fault
    left, right = operand((96, 64), (64, 1), E5M2), operand((32, 64), (64, 1), E4M3)
    scaled = Product(left, right, summing_products.SCALED, (WHOLE, WHOLE, place))
    assert scaled.fault == ""
    assert "rows are not dense" in scaled._replace(right=right._replace(strides=(1, 32))).fault
    short = left._replace(shape=(96, 40))
    assert "no multiple of 16" in scaled._replace(left=short, right=right._replace(shape=(32, 40))).fault
    wide = operand((96,), (1,), torch.float32)
    assert "not a scale" in scaled._replace(further=(wide, WHOLE, place)).fault


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (MIXTRAL, "precision=bf16"),
        (MIXTRAL, f"precision=bf16,{SELECTIVE}mlp"),
        (MIXTRAL, f"precision=bf16,{SELECTIVE}activation;norm"),
        (MIXTRAL, "precision=bf16,recompute=full"),
        (MIXTRAL, "precision=fp8"),
        (MIXTRAL, "precision=bf16,tp=2"),
        (QWEN3, "precision=bf16"),
        (DEEPSEEK, "precision=bf16"),
        (one_layer("sigmoid"), "precision=bf16"),
        (one_layer("chunks", mlp_pattern=("experts",)), "precision=bf16"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_kernels_of_grouped_products_take_what_compiled_layers_give(spec: ModelSpec, text: str) -> None:
    if "fp8" in text:
        pytest.importorskip("torchao")
    with lowered_products() as found:
        trace(spec, parse_layout(f"mbs=1,{text}", spec), compiled=True)
    # Forward, and in backward gradients of rows and of weights.
    matrices = 2 + spec.gated
    assert len(found) >= 3 * matrices
    assert [product.kernel for product in found].count(summing_products.GROUPED) >= matrices
    assert {product: product.fault for product in found if product.fault} == {}


def test_a_weight_gradient_alone_reads_what_eager_code_gives() -> None:
    """Inductor would copy the gradient into rows, which no graph of ours is known to let it do."""
    stages._keep_operands_of_grouped_products()

    def weight_gradient(grad: Tensor, places: Tensor, rows: Tensor, ends: Tensor) -> Tensor:
        result: Tensor = torch._grouped_mm(
            torch.ops.aten.index.Tensor(grad, [places]).permute(1, 0), rows, offs=ends
        )
        return result

    grad, rows = (drawn(*shape).bfloat16() for shape in ((64, 96), (64, 32)))
    ends = torch.tensor([5, 64], dtype=torch.int32)
    graph = make_fx(weight_gradient, tracing_mode="fake")(grad, torch.arange(64), rows, ends)
    (product,) = products_of(graph)
    assert product.fault == ""
    assert product.left.strides == (1, 96)
