"""Initial weights: their distribution, and what a seed changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from costmodels import ModelSpec
from runtime.model.adapters import DOWN, UP
from runtime.model.transformer import Transformer
from runtime.parallel.initialisation import full_weight, initialise, name_seed
from tests.support.models import FORMS, MODELS, llama

WIDE = ModelSpec(name="wide", layers=8, hidden=128, heads=4, vocab=500, seq=64, max_positions=256)


def weights(spec: ModelSpec, seed: int = 1, std: float = 0.02) -> dict[str, torch.Tensor]:
    model = Transformer(spec, spec.padded_vocab(1))
    initialise(model, spec, seed, std)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


SPARSE = llama("wide experts", layers=4, hidden=128, heads=4, ffn=256, vocab=500, seq=64).model_copy(
    update={"dense_layers": 1, "experts": 4, "top_k": 2, "expert_ffn": 96, "shared_expert_ffn": 96}
)

WRITE_TO_THE_RESIDUAL = (
    "attention.output.weight",
    "mlp.down.weight",
    "mlp.experts.down",
    "mlp.shared.down.weight",
)


@pytest.mark.parametrize(("spec", "std"), [(WIDE, 0.02), (WIDE, 0.1), (SPARSE, 0.02)])
def test_weights_are_normal_and_those_that_write_to_the_residual_are_smaller(
    spec: ModelSpec, std: float
) -> None:
    values = weights(spec, std=std)
    for name in values.keys() & {"embedding.tokens.weight", "head.weight"}:
        values[name] = values[name][: spec.vocab]
    for name, value in values.items():
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            scaled = name.endswith(WRITE_TO_THE_RESIDUAL)
            expected = std / math.sqrt(2 * spec.layers) if scaled else std
            # Four standard errors of small ones.
            error = max(0.05, 4 / math.sqrt(2 * value.numel()))
            assert value.std().item() == pytest.approx(expected, rel=error), name
            assert abs(value.mean().item()) < 4 * expected / math.sqrt(value.numel()), name


def test_a_seed_decides_every_weight() -> None:
    one, same, other = weights(WIDE, 1), weights(WIDE, 1), weights(WIDE, 2)
    drawn = {name for name, value in one.items() if value.std() > 0}
    assert len(drawn) == 2 + 6 * WIDE.layers
    for name, value in one.items():
        assert torch.equal(value, same[name])
        assert torch.equal(value, other[name]) == (name not in drawn)


@pytest.mark.parametrize(
    "spec", [WIDE, SPARSE, MODELS["deepseek"], FORMS["delta"]], ids=lambda spec: spec.name
)
def test_no_two_weights_are_drawn_alike(spec: ModelSpec) -> None:
    """Neither of two layers, nor of two matrices of a layer, nor of two experts."""
    names, begins = [], []
    for name, value in weights(spec).items():
        for number, part in enumerate(value if ".experts." in name else [value]):
            if part.std() > 0:
                names.append(f"{name} {number}")
                begins.append(part.flatten()[:8] / part.std())
    alike = torch.cdist(torch.stack(begins), torch.stack(begins)).fill_diagonal_(1.0) < 1e-3
    assert [(names[one], names[other]) for one, other in alike.nonzero().tolist()] == []


def test_a_name_has_its_own_seed_for_ever() -> None:
    # Another value would change every loss that was ever published with a seed.
    assert name_seed(1234, "embedding.tokens.weight") == 778418374335535588
    assert name_seed(1234, "norm.weight") != name_seed(1235, "norm.weight") != name_seed(1235, "norm.bias")


def test_an_untied_head_is_drawn_apart_and_a_tied_stage_head_is_the_embedding() -> None:
    untied = weights(MODELS["llama"])
    assert not torch.equal(untied["head.weight"], untied["embedding.tokens.weight"])
    assert not untied["head.weight"][MODELS["llama"].vocab :].any()
    spec = MODELS["gpt2"]
    last = Transformer(spec, spec.padded_vocab(1), range(3, 4), with_embedding=False)
    initialise(last, spec, 1)
    whole = weights(spec)
    assert last.head is not None
    assert torch.equal(last.head.weight, whole["embedding.tokens.weight"])
    layer: Any = last.layers["3"]
    assert torch.equal(layer.mlp.up.weight, whole["layers.3.mlp.up.weight"])


def test_parts_of_linear_attention_begin_as_in_published_code() -> None:
    """Depthwise convolutions as PyTorch's, decays between exp(-0.01) and exp(-16) times a softplus of one."""
    spec = FORMS["delta"].model_copy(update={"hidden": 256, "norm_from_one": True, "lora": None})
    values = weights(spec)
    ends: dict[str, list[torch.Tensor]] = {}
    for name, value in values.items():
        ends.setdefault(name.rpartition(".")[2] if "norm" not in name else name, []).append(value.flatten())
    assert (torch.cat(ends["step_bias"]) == 1).all()
    rates = torch.cat(ends["rate"]).exp()
    assert (rates >= 0.01).all() and (rates <= 16).all() and rates.std() > 1
    convolutions = [name for name in values if name.endswith("_conv")]
    assert len(convolutions) >= 3
    for name in convolutions:
        taps = values[name].shape[1]
        # A uniform distribution up to the root of 1 / taps has this deviation.
        assert values[name].std().item() == pytest.approx((1 / taps) ** 0.5 / 3**0.5, rel=0.15), name
    norms = {name: value for name, value in values.items() if "norm" in name}
    assert {float(value[0]) for name, value in norms.items() if "gated_norm" in name} == {1.0}
    assert {float(value[0]) for name, value in norms.items() if "gated_norm" not in name} == {0.0}


def test_adapters_begin_as_nothing() -> None:
    name, shape = "layers.0.attention.query.adapter", torch.Size((8, 400))
    down = full_weight(f"{name}{DOWN}", shape, WIDE, 1, 0.02)
    limit = 400**-0.5
    assert 0.97 * limit < float(down.abs().max()) <= limit
    assert float(down.std()) == pytest.approx(limit / 3**0.5, rel=0.05)
    assert not full_weight(f"{name}{UP}", torch.Size((400, 8)), WIDE, 1, 0.02).any()
    assert not full_weight("layers.0.attention.core.sinks", torch.Size((8,)), WIDE, 1, 0.02).any()


def test_buffers_begin_as_zeros_whatever_was_in_their_memory() -> None:
    model = Transformer(MODELS["deepseek"], 256)
    buffers = dict(model.named_buffers())
    assert buffers
    for buffer in buffers.values():
        buffer.fill_(7)
    initialise(model, MODELS["deepseek"], 1)
    assert not any(buffer.any() for buffer in buffers.values())
