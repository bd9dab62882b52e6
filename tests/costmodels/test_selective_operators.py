"""torchtitan's selective recomputation of operators, beside a block under PyTorch's selective checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._functorch.partitioners import get_default_op_list
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from costmodels.catalogue import load_engine
from costmodels.layers.operators import layer as layer_work
from costmodels.memory.unit_sizes import unit_sizes
from costmodels.spec.layout import Layout
from costmodels.spec.model import ModelSpec
from costmodels.spec.table import LayoutTable

TOKENS = 64

PLAIN: dict[str, Any] = {
    "layers": 1,
    "hidden": 96,
    "ffn": 128,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "vocab": 512,
    "seq": TOKENS,
    "gated": True,
    "activation": "silu",
    "norm": "rmsnorm",
    "position": "rope",
    "linear_bias": False,
}
EXPERTS = {"experts": 4, "top_k": 2, "expert_ffn": 64}
LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 24}

MODELS = {
    "dense": PLAIN,
    "experts": PLAIN | EXPERTS,
    "shared expert": PLAIN | EXPERTS | {"shared_expert_ffn": 64},
    "latent attention": PLAIN
    | EXPERTS
    | {"shared_expert_ffn": 64, "latent_attention": {"q_lora_rank": 0} | LATENT},
    "latent queries": PLAIN
    | EXPERTS
    | {"shared_expert_ffn": 64, "latent_attention": {"q_lora_rank": 24} | LATENT},
}


def model_named(name: str) -> ModelSpec:
    return ModelSpec(name="block", **MODELS[name])


class Block:
    """The products of a block in the order in which torchtitan's models make them, with fresh weights."""

    def __init__(self, model: ModelSpec) -> None:
        self.model = model

    def product(self, x: torch.Tensor, width: int) -> torch.Tensor:
        return x @ torch.ones(x.shape[-1], width, dtype=torch.bfloat16)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        model, mla = self.model, self.model.latent_attention
        if mla is None:
            q, k, v = (self.product(x, width) for width in (model.q_size, model.kv_size, model.kv_size))
            widths = [model.head_dim] * 3
        else:
            widths = [mla.qk_nope_head_dim + mla.qk_rope_head_dim] * 2 + [mla.v_head_dim]
            latent = self.product(x, mla.q_lora_rank) if mla.q_lora_rank else x
            q = self.product(latent, model.heads * widths[0])
            down = self.product(x, mla.kv_lora_rank + mla.qk_rope_head_dim)
            up = self.product(
                down[:, : mla.kv_lora_rank], model.heads * (mla.qk_nope_head_dim + mla.v_head_dim)
            )
            v = up[:, : model.heads * mla.v_head_dim]
            k = q * 1
        q, k, v = (
            one.view(1, TOKENS, -1, width).transpose(1, 2)
            for one, width in zip((q, k, v), widths, strict=True)
        )
        return (
            torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            .transpose(1, 2)
            .flatten(2)[0]
        )

    def mlp(self, x: torch.Tensor, width: int) -> torch.Tensor:
        up = torch.nn.functional.silu(self.product(x, width)) * self.product(x, width)
        return self.product(up, self.model.hidden)

    def routed(self, x: torch.Tensor) -> torch.Tensor:
        """The router and the grouped products of experts."""
        model = self.model
        chosen = self.product(x, model.experts).topk(model.top_k).indices.flatten().sort().values
        rows = x.repeat_interleave(model.top_k, 0)
        ends = torch.bincount(chosen, minlength=model.experts).cumsum(0).to(torch.int32)

        def grouped(rows: torch.Tensor, width: int) -> torch.Tensor:
            weight = torch.ones(model.experts, rows.shape[-1], width, dtype=torch.bfloat16)
            return torch._grouped_mm(rows, weight, offs=ends)

        inner = grouped(rows, model.expert_ffn) * grouped(rows, model.expert_ffn)
        return grouped(inner, model.hidden).view(TOKENS, model.top_k, -1).sum(1)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.product(self.attention(x), self.model.hidden)
        if not self.model.experts:
            return x + self.mlp(x, self.model.ffn)
        found = self.routed(x)
        return found + self.mlp(x, self.model.shared_expert_ffn) if self.model.shared_expert_ffn else found


def policy(model: ModelSpec, repeated: list[float]) -> Callable[..., CheckpointPolicy]:
    """Saves every second product and PyTorch's list, as torchtitan/distributed/activation_checkpoint.py does.

    Args:
        repeated: multiplications of each product that is not saved, which the policy appends.
    """
    intensive: Any = get_default_op_list().compute_intensive_ops
    saved = {operator.default for operator in intensive}
    saved |= {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, torch.ops.aten.topk.default}
    mm, grouped = torch.ops.aten.mm.default, torch.ops.aten._grouped_mm.default
    count = 0

    def decide(context: object, function: object, *given: Any, **named: Any) -> CheckpointPolicy:
        nonlocal count
        saves = function in saved
        if function is mm:
            router = tuple(given[1].shape) == (model.hidden, model.experts)
            count += not router
            saves = not router and count % 2 == 1
        if function in (mm, grouped) and not saves:
            repeated.append(float(given[0].shape[0] * given[0].shape[1] * given[1].shape[-1]))
        return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def run(model: ModelSpec) -> tuple[int, float]:
    """Bytes that a block saves, without its input, and multiplications that backward repeats."""
    repeated: list[float] = []
    forward, _ = create_selective_checkpoint_contexts(policy(model, repeated))
    with torch.no_grad(), forward:
        Block(model)(torch.ones(TOKENS, model.hidden, dtype=torch.bfloat16))
    tensors = {
        id(leaf): leaf
        for held in forward.storage.values()
        for leaf in torch.utils._pytree.tree_leaves(
            [getattr(one, "val", one) for one in torch.utils._pytree.tree_leaves(held)]
        )
        if isinstance(leaf, torch.Tensor)
    }
    return sum(one.numel() * one.element_size() for one in tensors.values()), sum(repeated)


def table_of(model: ModelSpec, **more: Any) -> LayoutTable:
    layout = Layout(
        micro_batch_size=1,
        global_batch_size=1,
        layers_per_stage=(1,),
        precision="bf16",
        recompute="selective",
        **more,
    )
    return LayoutTable.of([layout])


@pytest.mark.parametrize("name", MODELS)
def test_saved_bytes_and_repeated_products_are_pytorchs(name: str) -> None:
    model = model_named(name)
    saved, repeated = run(model)
    engine, table = load_engine("torchtitan"), table_of(model)
    sizes = unit_sizes(model, engine, table)
    kept = float((sizes.moe_activations if model.experts else sizes.dense_activations)[0])
    assert kept == pytest.approx(saved + 2 * TOKENS * model.hidden, rel=0.03)
    work = layer_work(model, engine, table, "experts" if model.experts else "dense")
    priced = sum(float((one.m * one.k * one.n * one.times)[0]) for one in work.alternate_gemms)
    assert priced == pytest.approx(repeated)
