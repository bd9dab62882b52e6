"""Initial weights: their distribution, and what a seed changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from costmodels import ModelSpec
from runtime.model.transformer import Transformer
from runtime.parallel.initialisation import initialise, name_seed
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
