"""The flags of adapters."""

from __future__ import annotations

import pytest

from costmodels.errors import InputError
from costmodels.spec.model_parts import LORA_TARGETS
from planner.options.lora import parse_targets
from planner.options.model import ModelOptions


def test_a_rank_is_enough() -> None:
    options = ModelOptions(model="llama3-8b", lora_rank=16)
    lora = options.spec().lora
    assert lora is not None and (lora.rank, lora.alpha, lora.targets) == (16, 32.0, LORA_TARGETS)
    assert any("41.9 M parameters train" in note for note in options.notes())
    assert ModelOptions(model="llama3-8b").spec().lora is None


def test_a_base_in_4_bits_is_told_with_its_share() -> None:
    options = ModelOptions(model="llama3-8b", lora_rank=16, quantize_base="nf4")
    lora = options.spec().lora
    assert lora is not None and lora.quantize_base == "nf4"
    # All matrices of 32 layers: h x (2 h + 2 x 1024) of attention, and 3 h x 14336.
    matrices = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    assert any(f"{matrices / 1e6:,.1f} M of them in nf4" in note for note in options.notes())


def test_targets_have_our_names_those_of_peft_and_of_groups() -> None:
    assert parse_targets("v_proj,q_proj") == ("query", "value")
    assert parse_targets("mlp query") == ("query", "up", "gate", "down")
    assert parse_targets("all") == LORA_TARGETS


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"lora_alpha": 8.0}, "--lora-alpha 8.0 needs --lora-rank"),
        ({"lora_targets": "query"}, "--lora-targets query needs --lora-rank"),
        ({"quantize_base": "nf4"}, "--quantize-base nf4 needs --lora-rank"),
        ({"lora_rank": 4, "quantize_base": "int4"}, "--quantize-base int4: expected nf4"),
        ({"lora_rank": 4, "lora_targets": "router"}, "--lora-targets router: expected all, attention, mlp"),
        ({"lora_rank": 4, "lora_targets": ","}, "--lora-targets is empty"),
    ],
)
def test_wrong_flags_are_told_in_one_line(flags: dict[str, object], line: str) -> None:
    with pytest.raises(InputError) as error:
        ModelOptions(model="llama3-8b", **flags).spec()  # type: ignore[arg-type]
    assert line in str(error.value) and "\n" not in str(error.value)
