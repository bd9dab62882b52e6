"""Initial weights: their distribution, and what a seed changes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from costmodels import ModelSpec
from runtime.model.transformer import Transformer
from runtime.parallel.initialisation import initialise, name_seed
from tests.support.models import MODELS

WIDE = ModelSpec(name="wide", layers=8, hidden=128, heads=4, vocab=500, seq=64, max_positions=256)


def weights(spec: ModelSpec, seed: int = 1, std: float = 0.02) -> dict[str, torch.Tensor]:
    model = Transformer(spec, spec.padded_vocab(1))
    initialise(model, spec, seed, std)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("std", [0.02, 0.1])
def test_weights_are_normal_and_those_that_write_to_the_residual_are_smaller(std: float) -> None:
    values = weights(WIDE, std=std)
    values["embedding.tokens.weight"] = values["embedding.tokens.weight"][: WIDE.vocab]
    for name, value in values.items():
        if name.endswith("bias"):
            assert not value.any(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        else:
            scaled = name.endswith(("attention.output.weight", "mlp.down.weight"))
            expected = std / math.sqrt(2 * WIDE.layers) if scaled else std
            assert value.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(value.mean().item()) < 4 * expected / math.sqrt(value.numel()), name


def test_a_seed_decides_every_weight() -> None:
    one, same, other = weights(WIDE, 1), weights(WIDE, 1), weights(WIDE, 2)
    drawn = {name for name, value in one.items() if value.std() > 0}
    assert len(drawn) == 2 + 6 * WIDE.layers
    for name, value in one.items():
        assert torch.equal(value, same[name])
        assert torch.equal(value, other[name]) == (name not in drawn)


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
