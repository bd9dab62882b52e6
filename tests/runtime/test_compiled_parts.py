"""Parts of a stage that go to a compiler, and layers that run as chains; nothing is compiled here."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from costmodels import MultiTokenPrediction
from runtime.model.experts import MixtureOfExperts
from runtime.model.transformer import Block, Transformer
from runtime.train import stages
from runtime.train.stages import (
    _chain_layers,
    _compile,
    _compile_within_experts,
    _is_one_graph,
    _is_whole,
)
from tests.support.layouts import parse_layout
from tests.support.models import FORMS, MODELS

SPECS = MODELS | FORMS


def last_block(name: str, is_whole: bool = False) -> Block:
    with torch.device("meta"):
        block = Transformer(SPECS[name], 256).blocks[-1]
    if isinstance(block.mlp, MixtureOfExperts):
        block.mlp.is_whole = is_whole
    return block


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Functions that are given to a compiler, or kept from it, by their original class and name."""
    found: dict[str, list[str]] = {"compile": [], "disable": []}

    def noting(what: str) -> Any:
        def note(function: Any, **_: Any) -> Any:
            owner = getattr(function, "__self__", None)
            found[what].append(f"{type(owner).__name__}.{function.__name__}")
            return function

        return note

    monkeypatch.setattr(torch, "compile", noting("compile"))
    monkeypatch.setattr(torch.compiler, "disable", noting("disable"))
    return found


@pytest.mark.parametrize(
    ("name", "is_whole", "one_graph", "within"),
    [
        ("llama", False, True, []),
        ("mixtral", True, True, []),
        ("mixtral", False, False, ["Activation.forward"]),
        ("deepseek", True, True, []),
        ("deepseek", False, False, ["MLP.forward", "Activation.forward"]),
        ("capped", False, False, []),
    ],
)
def test_a_compiler_gets_what_can_be_one_graph(
    name: str, is_whole: bool, one_graph: bool, within: list[str], asked: dict[str, list[str]]
) -> None:
    assert _is_one_graph(last_block(name, is_whole)) == one_graph
    _compile_within_experts(last_block(name, is_whole))
    assert asked == {"compile": within, "disable": []}
    kept_out = (
        ["CoreAttention.forward"] if name == "capped" else ["MixtureOfExperts.forward"] if within else []
    )
    for has_compiled_within in (True, False):
        asked["compile"].clear()
        asked["disable"].clear()
        _compile(last_block(name, is_whole), in_two=False, has_compiled_within=has_compiled_within)
        parts = [] if has_compiled_within else within
        assert asked == {"compile": [*parts, "Block.forward"], "disable": kept_out}
    asked["compile"].clear()
    asked["disable"].clear()
    _compile(last_block(name, is_whole), in_two=True)
    assert asked == {"compile": [*within, "Block.up_to_core", "Block.from_core"], "disable": kept_out}


def test_two_parts_of_a_layer_make_what_it_makes(asked: dict[str, list[str]]) -> None:
    spec = MODELS["llama"]
    block = Transformer(spec, 256).blocks[0]
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=torch.Generator().manual_seed(parameter.numel()))
    x = torch.randn(2, 8, spec.hidden, generator=torch.Generator().manual_seed(0))
    block.attention.tables = block.attention.position_tables(8, torch.device("cpu"))
    expected = block(x)
    _compile(block, in_two=True)
    torch.testing.assert_close(block(x), expected)


def _noted(block: Block, before: list[Block]) -> list[Block]:
    return [*before, block]


@pytest.mark.parametrize(
    ("name", "text", "chains"),
    [
        ("llama", "", [4]),
        ("llama", "cp=2,cp_form=all_gather", [4]),
        ("llama", "cp=2,cp_form=ring", None),
        ("llama", "offload_activations=1", None),
        ("llama", "recompute=full,recompute_num_layers=2", None),
        ("llama", "recompute=full,recompute_method=block,recompute_num_layers=1", [3]),
        ("llama", "recompute=full,recompute_method=block,recompute_num_layers=2", [2, 2]),
        # One dense layer, which is alone, and three whose experts no compiler takes.
        ("deepseek", "", []),
        ("capped", "", []),
        ("sinks", "", []),
    ],
)
def test_neighbours_that_are_alike_run_as_chains(
    name: str, text: str, chains: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SPECS[name]
    with torch.device("meta"):
        stage = Transformer(spec, 256)
    made: list[list[Any]] = []

    def chain(alike: list[Any], copies: Any) -> Any:
        made.append(alike)
        return SimpleNamespace(run=lambda x: [*x, *alike])

    monkeypatch.setattr(stages, "LayerChain", chain)
    for block in stage.stack:
        noting: Any = partial(_noted, block)
        block.forward = noting  # type: ignore[method-assign]
    copies: Any = None
    _chain_layers(stage, spec, parse_layout(text, spec), copies)
    assert [len(alike) for alike in made] == (chains or [])
    assert ("run_layers" in stage.__dict__) == (chains is not None)
    if chains is not None:
        empty: Any = []
        assert list(stage.run_layers(empty)) == list(stage.stack), "each layer once, in their order"


@pytest.mark.parametrize(
    ("text", "pattern", "whole"),
    [
        ("precision=bf16", ("full",), [True] * 5),
        # The layer of multi-token prediction, the fifth, is as the last one.
        ("precision=bf16", ("linear", "full"), [False, True, False, True, True]),
        ("precision=bf16", ("full", "full", "full", "linear"), [True, True, True, False, False]),
        ("precision=bf16,ep=2,dp=2", ("full",), [False] * 5),
        ("precision=bf16,dp=2,zero=1", ("full",), [False] * 5),
        ("precision=fp32", ("full",), [stages.COMPILES_WIDE] * 5),
    ],
)
def test_layers_of_experts_are_whole_where_no_size_depends_on_routers(
    text: str, pattern: Any, whole: list[bool]
) -> None:
    spec = FORMS["delta"].model_copy(
        update={
            "attention_pattern": pattern,
            "experts": 4,
            "top_k": 2,
            "expert_ffn": 96,
            "mtp": MultiTokenPrediction(depths=1),
        }
    )
    with torch.device("meta"):
        stage = Transformer(spec, 256)
    layout, grid = parse_layout(text, spec), SimpleNamespace(device=torch.device("cpu"))
    any_grid: Any = grid
    found = [
        _is_whole(block.mlp, spec, number, layout, any_grid)
        for number, block in zip(stage.numbers, stage.blocks, strict=True)
        if isinstance(block.mlp, MixtureOfExperts)
    ]
    assert found == whole
    # GEMMs of groups take rows of 16 bytes.
    odd = MixtureOfExperts(spec.model_copy(update={"expert_ffn": 92}))
    assert not _is_whole(odd, spec, 1, layout, any_grid)
