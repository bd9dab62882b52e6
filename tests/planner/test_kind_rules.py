"""Layers of other kinds: what the bundled runtime does not split is not proposed, and said in one line."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest

from costmodels import ModelSpec
from costmodels.errors import InputError
from costmodels.spec.table import value_of
from planner.api import search, suggest
from planner.space import kind_rules
from runtime.settings.checks import check_job
from runtime.settings.job_rules import check_rules, job_rules
from tests.support.layouts import parse_layout
from tests.support.models import FORMS, LLAMA, MODELS

JOB: dict[str, Any] = {"world_size": 4, "max_global_batch_size": 8, "device": "h100"}

SINKS = LLAMA.model_copy(update={"attention_sinks": True})
CAPPED = LLAMA.model_copy(update={"attention_softcap": 30.0})


@dataclass(frozen=True)
class DataFlags:
    """The flag of a job that is asked about."""

    reset_attention_mask: bool = True


@cache
def forms(model: ModelSpec) -> set[object]:
    """Forms of context parallelism that a search goes through."""
    table = search(model, **JOB).table
    several = table.context_parallel > 1
    return {value_of("context_parallel_form", int(code)) for code in table.context_parallel_form[several]}


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (
            FORMS["windows"],
            "ring has no windows, and layers of parity-windows see 7 of 32 tokens; use all_ga",
        ),
        (CAPPED, "ring has no caps of attention's scores, as parity-llama has them; use all_gather or all"),
        (SINKS, "ring has no attention sinks, as parity-llama has them; use all_gather or all_to_all"),
    ],
)
def test_a_ring_takes_plain_attention_alone(model: ModelSpec, words: str) -> None:
    assert forms(model) == {"all_gather", "all_to_all"}
    assert "ring" in forms(LLAMA)
    with pytest.raises(InputError, match=words):
        check_job(model, parse_layout("cp=2,context_parallel_form=ring,gbs=4", model), 2)
    with pytest.raises(InputError, match=words):
        suggest(model, pin={"context_parallel": 2, "context_parallel_form": "ring"}, **JOB)
    # A window that covers the sequence is none.
    check_job(
        FORMS["windows"].model_copy(update={"window": 32}),
        parse_layout("cp=2,context_parallel_form=ring,gbs=4", LLAMA),
        2,
    )


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ("cp=2", "context_parallel 2: layers of linear attention of parity-delta hand a state from token to"),
        (
            "tp=8",
            "tensor_parallel 8 does not divide the 4 key heads of parity-delta's linear attention; use one",
        ),
    ],
)
def test_linear_attention_is_split_by_heads_alone(layout: str, words: str) -> None:
    model = FORMS["delta"]
    split = parse_layout(f"{layout},gbs=8", model)
    with pytest.raises(InputError, match=words):
        check_job(model, split, split.world_size)
    table = search(model, **JOB | {"world_size": 8}).table
    assert set(table.context_parallel.tolist()) == {1}
    assert set(table.tensor_parallel.tolist()) == {1, 2, 4}


def test_a_ring_has_no_gate_of_what_it_gives() -> None:
    gated = LLAMA.model_copy(update={"attention_gate": True})
    with pytest.raises(InputError, match="ring has no gate of attention's output, as parity-llama has it"):
        check_job(gated, parse_layout("cp=2,context_parallel_form=ring,gbs=4", gated), 2)


def test_states_are_not_reset_between_documents() -> None:
    rules = job_rules(DataFlags())
    with pytest.raises(
        InputError, match="--reset-attention-mask: layers of linear attention carry their sta"
    ):
        check_rules(rules, FORMS["delta"], parse_layout("gbs=4", FORMS["delta"]))
    check_rules(rules, FORMS["sinks"], parse_layout("gbs=4", FORMS["sinks"]))


@pytest.mark.parametrize(
    ("model", "changes", "part"),
    [
        (MODELS["deepseek"], {"attention_softcap": 30.0}, "capped or growing scores of latent attention"),
        (FORMS["sinks"], {"attention_softcap": 30.0}, "capped scores beside sinks"),
        (FORMS["after"], {"qk_norm_weights": False}, "norms over all heads without weights"),
    ],
)
def test_what_no_trained_model_has_is_refused(model: ModelSpec, changes: dict[str, Any], part: str) -> None:
    odd = model.model_copy(update=changes)
    with pytest.raises(InputError, match=part):
        check_job(odd, parse_layout("gbs=4", odd), 1)
    check_job(model, parse_layout("gbs=4", model), 1)


def test_before_pytorch_2_13_no_backward_is_split_in_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = parse_layout("pp=2,vpp=2,schedule=interleaved_zb,gbs=8,precision=fp8", LLAMA)
    check_job(LLAMA, layout, 2)
    monkeypatch.setattr(kind_rules, "installed_version", lambda: "2.11")
    words = "interleaved_zb splits backward passes, in which PyTorch 2.11 loses GEMMs in 8 bits; install"
    with pytest.raises(InputError, match=words):
        check_job(LLAMA, layout, 2)
    check_job(LLAMA, layout.model_copy(update={"precision": "bf16"}), 2)
    # One that is not there is any.
    monkeypatch.setattr(kind_rules, "installed_version", lambda: "")
    check_job(LLAMA, layout, 2)
