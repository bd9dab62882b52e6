"""CUDA graphs of passes: what they are priced at, and when a search chooses them."""

from __future__ import annotations

from typing import Any

import pytest

import planner
from costmodels import ModelSpec
from costmodels.errors import InputError
from costmodels.pricing import price
from planner.inputs.model import resolve_model
from planner.space.rule import Rule
from tests.support.layouts import layouts_of

MEASURED = {"h100": 164_427, "h200": 171_786}
"""Tokens/s of gpt2-medium with graphs, 32 sequences of 1,024 tokens in 4 microbatches on one GPU."""


def small() -> ModelSpec:
    return resolve_model("gpt2-medium")


def suggest(**words: Any) -> planner.Plan:
    """The first plan of four microbatches of eight sequences."""
    usual: dict[str, Any] = {
        "model": small(),
        "world_size": 1,
        "device": "h100",
        "global_batch_size": 32,
        "pin": "mbs=8",
    }
    return planner.suggest(**(usual | words))


@pytest.mark.parametrize("device", MEASURED)
def test_steps_with_graphs_take_what_was_measured(device: str) -> None:
    words: dict[str, Any] = {"world_size": 1, "device": device, "global_batch_size": 32, "precision": "bf16"}
    found = planner.evaluate("dp=1 mbs=8 x 4 cuda_graphs", model=small(), **words)
    assert 32 * 1024 / found.step_time_s == pytest.approx(MEASURED[device], rel=0.1)


def test_small_layers_get_graphs_and_pins_decide() -> None:
    assert suggest().layout.cuda_graphs
    plain = suggest(pin=["mbs=8", "cuda_graphs=false"])
    assert not plain.layout.cuda_graphs
    assert suggest().estimate.step_time_s < plain.estimate.step_time_s
    assert not suggest(engine="megatron").layout.cuda_graphs


def test_what_graphs_save_of_large_layers_is_in_doubt() -> None:
    """Graphs save less than a hundredth of layers of Llama 3 8B with 8,192 tokens."""
    large = resolve_model("llama3-8b").model_copy(update={"layers": 8})
    words: dict[str, Any] = {"model": large, "global_batch_size": 8, "pin": "mbs=1"}
    assert not suggest(**words).layout.cuda_graphs
    assert suggest(**words, prefer="fastest").layout.cuda_graphs


def test_graphs_of_several_gpus_hold_no_collective_unless_pinned() -> None:
    parallel: dict[str, Any] = {"world_size": 8, "global_batch_size": 256}
    assert not suggest(**parallel, pin=["tp=2", "dp=4", "mbs=8"]).layout.cuda_graphs
    assert suggest(**parallel, pin=["tp=2", "dp=4", "mbs=8", "zero=0", "cuda_graphs"]).layout.cuda_graphs


def test_jobs_that_rule_graphs_out_get_none() -> None:
    rule = Rule("no_graphs", lambda model, d: d.cuda_graphs, lambda model, d: "none", of_mesh=True)
    assert not suggest(rules=[rule]).layout.cuda_graphs
    with pytest.raises(InputError, match="none"):
        suggest(rules=[rule], pin=["mbs=8", "cuda_graphs"])


def test_layouts_with_and_without_graphs_are_priced_apart() -> None:
    job: dict[str, Any] = {"world_size": 1, "device": "h100", "global_batch_size": 32}
    result = planner.search(small(), **job)
    problem, table = result.problem, result.table.take(result.order)
    assert 0 < table.cuda_graphs.sum() < len(table)
    together = price(problem.model, problem.cluster, problem.constants, table).step_time_s
    each = layouts_of(table)
    alone = [planner.evaluate(one, model=small(), device="h100").step_time_s for one in each]
    assert together.tolist() == pytest.approx(alone, rel=1e-9)


def test_kinds_that_have_run_on_no_gpu_get_graphs_by_a_pin_alone() -> None:
    experts = resolve_model("qwen3-30b-a3b").model_copy(update={"layers": 2, "experts": 8})
    for other in ({"precision": "fp16"}, {"model": experts}):
        assert not suggest(**other, prefer="fastest").layout.cuda_graphs
        assert suggest(**other, pin=["mbs=8", "cuda_graphs"]).layout.cuda_graphs
