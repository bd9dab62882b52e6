"""What grouped products of compiled layers get on a GPU, whose kernel has rules about it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from costmodels import ModelSpec
from runtime.dryrun.run import trace
from runtime.train import stages
from tests.support.autograd_functions import drawn
from tests.support.gpu_lowering import lowered_products, products_of
from tests.support.layouts import parse_layout
from tests.support.models import FORMS, MODELS, llama

pytestmark = pytest.mark.oldest

MIXTRAL = llama("mixtral", layers=1, hidden=64, heads=4, kv_heads=2, ffn=96, vocab=64, seq=32).model_copy(
    update={"experts": 8, "top_k": 2, "expert_ffn": 96}
)

QWEN3 = MIXTRAL.model_copy(update={"name": "qwen3-moe", "qk_norm": True, "head_dim": 32})

DEEPSEEK = MODELS["deepseek"].model_copy(update={"layers": 1, "dense_layers": 0})


def one_layer(name: str, **fields: Any) -> ModelSpec:
    return FORMS[name].model_copy(update={"layers": 1, **fields})


SELECTIVE = "recompute=selective,recompute_modules="


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
    assert len(found) >= 3 * (2 + spec.gated)
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
