"""Flags that do nothing beside others are named, with the reason."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from costmodels.catalogue import load_model
from planner.inputs.cluster import resolve_cluster
from planner.options.cluster import ClusterOptions
from planner.options.search import idle_links
from runtime.faults.fault_options import FaultOptions
from runtime.generation.generate_options import GenerateOptions
from runtime.settings.idle_flags import REASONS, idle_flag_notes
from runtime.settings.training_options import DataOptions, OutputOptions, TrainingOptions
from tests.support.layouts import parse_layout

DENSE = load_model("llama2-7b")
EXPERTS = load_model("mixtral-8x7b")

GROUPS = (TrainingOptions, DataOptions, OutputOptions, FaultOptions)


def told(pins: str = "", experts: bool = False, **given: Any) -> list[str]:
    """Notes on a job of these flags."""
    spec = EXPERTS if experts else DENSE
    groups = [
        kind(**{f.name: given[f.name] for f in dataclasses.fields(kind) if f.name in given})
        for kind in GROUPS
    ]
    return idle_flag_notes(*groups, spec=spec, layout=parse_layout(pins, spec))


@pytest.mark.parametrize(
    ("pins", "given", "line"),
    [
        ("optimizer=sgd", {"adam_beta1": 0.8}, "--adam-beta1 0.8 has no effect: the optimizer is sgd"),
        ("", {"sgd_momentum": 0.5}, "--sgd-momentum 0.5 has no effect: the optimizer is adam"),
        (
            "",
            {"no_muon_nesterov": True, "muon_momentum": 0.9},
            "--muon-momentum 0.9, --no-muon-nesterov have no effect: the optimizer is adam",
        ),
        ("", {"lr_decay_style": "constant", "min_lr": 1e-5}, "--min-lr 1e-05 has no effect"),
        ("", {"lr_decay_style": "constant", "lr_decay_iters": 9}, "--lr-decay-iters 9 has no effect"),
        ("", {"lr_wsd_decay_style": "linear"}, "--lr-wsd-decay-style linear has no effect"),
        ("", {"lr_warmup_init": 1e-6}, "--lr-warmup-init 1e-06 has no effect: there is no warm-up"),
        ("precision=bf16", {"loss_scale": 8.0}, "--loss-scale 8 has no effect: precision bf16 needs none"),
        ("precision=bf16", {"hysteresis": 4}, "--hysteresis 4 has no effect: precision bf16 needs no loss"),
        (
            "precision=fp16",
            {"loss_scale": 8.0, "loss_scale_window": 9},
            "--loss-scale-window 9 has no effect: --loss-scale 8 is constant",
        ),
        (
            "",
            {"moe_aux_loss_coeff": 0.01},
            "--moe-aux-loss-coeff 0.01 has no effect: llama2-7b has no experts",
        ),
        ("", {"split": "9,1", "train_data_path": ["x"]}, "--split 9,1 has no effect: --train-data-path"),
        ("", {"vocab_file": "v", "tokenizer_type": "ByteTokenizer"}, "--vocab-file v has no effect"),
        ("", {"tokenizer_model": "t", "tokenizer_type": "GPT2BPETokenizer"}, "--tokenizer-model t has no"),
        ("", {"allow_data_change": True}, "--allow-data-change has no effect: there is no --load"),
        ("", {"save_interval": 5}, "--save-interval 5 has no effect: there is no --save"),
        ("", {"eval_interval": 5, "eval_iters": 0}, "--eval-interval 5 has no effect: --eval-iters is 0"),
        (
            "",
            {"max_skipped_steps": 5, "no_check_for_nan_in_loss_and_grad": True},
            "--max-skipped-steps 5 has no effect",
        ),
        ("", {"straggler_factor": 3.0}, "--straggler-factor 3 has no effect: one rank"),
        (
            "",
            {
                "weight_decay": 0.1,
                "weight_decay_incr_style": "linear",
                "start_weight_decay": 0.0,
                "end_weight_decay": 0.1,
            },
            "--weight-decay 0.1 has no effect: it grows from --start-weight-decay",
        ),
    ],
)
def test_a_flag_without_effect_is_named(pins: str, given: dict[str, Any], line: str) -> None:
    (only,) = told(pins, **given)
    assert only.startswith(line)


def test_experts_have_reasons_of_their_own() -> None:
    none: dict[str, Any] = {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "none"}
    assert told(experts=True, **none)[0].endswith("--moe-router-load-balancing-type is none")
    (line,) = told(experts=True, moe_router_bias_update_rate=0.1)
    assert line.endswith("experts of mixtral-8x7b have no biases")


def test_nothing_is_said_of_flags_that_are_carried_out() -> None:
    assert told() == []
    assert told("optimizer=muon", adam_beta1=0.8, muon_momentum=0.9) == []
    assert told("optimizer=came", came_beta3=0.9, came_clip_threshold=2.0) == []
    assert told("precision=fp16", hysteresis=4) == []
    assert told("dp=2", straggler_factor=3.0, save="x", save_interval=5, eval_interval=7) == []
    assert told(experts=True, moe_aux_loss_coeff=0.01, moe_router_load_balancing_type="seq_aux_loss") == []


def test_reasons_name_fields_that_exist() -> None:
    fields = {field.name for kind in GROUPS for field in dataclasses.fields(kind)}
    assert {name for names, _ in REASONS for name in names} <= fields


def test_draws_and_networks_that_nobody_uses_are_named() -> None:
    greedy = GenerateOptions(load="x", temperature=0.0, top_k=5, seed=3)
    assert greedy.notes() == ["--top-k, --seed have no effect: --temperature 0 takes the likeliest token"]
    assert GenerateOptions(load="x", top_p=0.5, seed=3).notes() == []
    options = ClusterOptions(inter_node_gbps=400.0)
    one, two = (resolve_cluster("a100-80g", size) for size in (8, 16))
    (line,) = idle_links(options, one)
    assert line == "--inter-node-gbps has no effect: the job's 8 devices are in one node"
    assert idle_links(options, two) == []
