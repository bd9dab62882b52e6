"""Our transformer gives the logits and gradients of Hugging Face's models with the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from costmodels import ModelSpec
from runtime.model.transformer import Transformer
from tests.support.hugging_face import (
    BATCH,
    MODELS,
    SEQ,
    VOCAB,
    as_ours,
    gradients_as_ours,
    hugging_face,
    skip_unless_there,
)

LOGITS, GRADIENTS = 1e-5, 1e-4
"""Largest norms of a difference, relative to the norm of the compared tensor."""

NOISE = 1e-7
"""Added to that for a gradient, relative to the norm of all: some are zero but for rounding (key biases)."""


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_hugging_face(name: str, tmp_path: Path) -> None:
    skip_unless_there(name)
    theirs, spec = hugging_face(name, tmp_path)
    ours = Transformer(spec, VOCAB)
    weights = as_ours(theirs, tmp_path)
    missing, unexpected = ours.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing == (["head.weight"] if spec.tied else [])

    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ), generator=generator)
    pull = torch.randn(BATCH, SEQ, VOCAB, generator=generator)
    expected, logits = theirs(tokens).logits, ours(tokens)
    assert (logits - expected).norm() <= LOGITS * expected.norm()

    (expected * pull).sum().backward()
    (logits * pull).sum().backward()
    reference = gradients_as_ours(theirs, tmp_path)
    floor = NOISE * torch.stack([gradient.norm() for gradient in reference.values()]).norm()
    for key, parameter in ours.named_parameters():
        assert parameter.grad is not None, key
        difference = (parameter.grad - reference[key]).norm()
        assert difference <= GRADIENTS * reference[key].norm() + floor, key


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", {"rope_scaling": None}),
        ("mixtral", {"top_k": 1}),
        ("qwen3", {"qk_norm": False}),
        ("qwen2_moe", {"shared_expert_gate": False}),
        ("deepseek_v2", {"rope_scaling": None}),
        ("deepseek_v2", {"router": {"score": "softmax", "normalised": False, "scale": 4.0}}),
        (
            "deepseek_v3",
            {"router": {"score": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5, "expert_bias": True}},
        ),
    ],
)
def test_every_option_shows_in_the_logits(name: str, change: dict[str, object], tmp_path: Path) -> None:
    skip_unless_there(name)
    theirs, spec = hugging_face(name, tmp_path)
    other = ModelSpec.model_validate(spec.model_dump() | change)
    ours = Transformer(other, VOCAB)
    ours.load_state_dict(as_ours(theirs, tmp_path), strict=False)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (ours(tokens) - expected).norm() > 1000 * LOGITS * expected.norm()
