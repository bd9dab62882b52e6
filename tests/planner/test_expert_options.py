"""Flags of experts and latent attention: the model they describe, and the lines that refuse wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from costmodels.catalogue import load_model
from costmodels.errors import InputError
from costmodels.spec.model_parts import Router
from planner.inputs.expert_loads import expert_loads
from planner.options.model import ModelOptions
from tests.support.commands import Command

SIZES: dict[str, Any] = {
    "num_layers": 6,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 128,
    "num_experts": 8,
}

DEEPSEEK: dict[str, Any] = {
    "num_layers": 61,
    "hidden_size": 7168,
    "ffn_hidden_size": 18432,
    "num_attention_heads": 128,
    "seq_length": 4096,
    "max_position_embeddings": 163840,
    "position_embedding_type": "rope",
    "rotary_base": 10000.0,
    "normalization": "RMSNorm",
    "norm_epsilon": 1e-6,
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "qk_layernorm": True,
    "vocab_size": 129280,
    "num_experts": 256,
    "moe_ffn_hidden_size": 2048,
    "moe_shared_expert_intermediate_size": 2048,
    "moe_layer_freq": "([0]*3+[1]*58)",
    "moe_router_topk": 8,
    "moe_router_num_groups": 8,
    "moe_router_group_topk": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_topk_scaling_factor": 2.5,
    "multi_latent_attention": True,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}


def test_the_flags_of_deepseek_describe_it() -> None:
    """The flags are those of Megatron-Core's published recipe for DeepSeek-V3."""
    # No flag is for MTP layers: nobody trains them here.
    leave = {"name", "source", "published_parameters", "rope_scaling", "mtp_layers"}
    found = ModelOptions(**DEEPSEEK).spec().model_dump(exclude=leave)
    assert found == load_model("deepseek-v3").model_dump(exclude=leave)


@pytest.mark.parametrize(
    ("flags", "router"),
    [
        ({}, {"score": "softmax", "normalised": True, "scale": 1.0, "expert_bias": False}),
        ({"moe_router_pre_softmax": True}, {"score": "softmax", "normalised": False}),
        ({"moe_router_score_function": "sigmoid"}, {"score": "sigmoid", "normalised": True}),
        (
            {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
            {"score": "sigmoid", "normalised": False},
        ),
        ({"moe_router_topk_scaling_factor": 2.5}, {"scale": 2.5}),
        ({"moe_expert_capacity_factor": 1.25}, {"capacity_factor": 1.25}),
        ({"moe_expert_capacity_factor": -1.0}, {"capacity_factor": 0.0}),
        ({"moe_router_topk": 1, "moe_router_pre_softmax": True}, {"score": "softmax", "normalised": False}),
        ({"moe_router_num_groups": 1, "moe_router_group_topk": 1}, {"groups": 1, "top_groups": 1}),
        (
            {"moe_router_num_groups": 4, "moe_router_group_topk": 4, "moe_router_topk": 3},
            {"groups": 1, "top_groups": 1, "group_score": "max"},
        ),
        (
            {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
            {"score": "sigmoid", "expert_bias": True},
        ),
        (
            {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 2},
            {"groups": 4, "top_groups": 2, "group_score": "max"},
        ),
        (
            {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 4},
            {"groups": 4, "top_groups": 2, "group_score": "top2"},
        ),
    ],
)
def test_routers_are_megatrons(flags: dict[str, Any], router: dict[str, Any]) -> None:
    found = ModelOptions(**SIZES | flags).spec().router.model_dump()
    assert {name: found[name] for name in router} == router


def test_flags_change_one_field_of_a_named_models_router() -> None:
    usual = load_model("deepseek-v3")
    limited = ModelOptions(model="deepseek-v3", moe_expert_capacity_factor=1.0).spec()
    assert limited.router == usual.router.model_copy(update={"capacity_factor": 1.0})
    assert ModelOptions(model="deepseek-v3", kv_lora_rank=256).spec().latent_attention == (
        usual.latent_attention.model_copy(update={"kv_lora_rank": 256}) if usual.latent_attention else None
    )
    fewer = ModelOptions(model="deepseek-v3", moe_router_topk=4).spec()
    assert fewer.router == usual.router.model_copy(update={"group_score": "max"})
    # DeepSeek-V2 ranks groups by their best expert, whatever top_k is.
    best = ModelOptions(model="deepseek-v2", moe_router_topk=7).spec()
    assert best.router == load_model("deepseek-v2").router
    single = ModelOptions(
        model="deepseek-v3", moe_router_topk=1, moe_router_num_groups=1, moe_router_group_topk=1
    ).spec()
    assert single.router == usual.router.model_copy(
        update={"normalised": False, "groups": 1, "top_groups": 1, "group_score": "max"}
    )
    narrow = ModelOptions(model="deepseek-v3", num_attention_heads=64).spec()
    assert (narrow.kv_heads, narrow.head_dim) == (64, 192)


@pytest.mark.parametrize("name", ["mixtral-8x7b", "deepseek-v3", "qwen1.5-moe-a2.7b"])
def test_no_experts_make_a_model_dense(name: str) -> None:
    usual, dense = load_model(name), ModelOptions(model=name, num_experts=0).spec()
    assert (dense.experts, dense.moe_layers, dense.shared_expert_ffn) == (0, 0, 0)
    assert dense.parameters == dense.active_parameters < usual.parameters
    assert dense.ffn == usual.ffn and dense.attention_parameters() == usual.attention_parameters()
    sizes = SIZES | {"num_experts": 0}
    assert ModelOptions(**sizes).spec() == ModelOptions(**DENSE).spec()
    assert ModelOptions(model="llama2-7b", num_experts=0).spec() == load_model("llama2-7b")


def test_experts_as_wide_as_the_mlp_follow_it() -> None:
    wide = ModelOptions(model="mixtral-8x7b", ffn_hidden_size=8192).spec()
    assert (wide.ffn, wide.expert_ffn) == (8192, 8192)
    apart = ModelOptions(model="mixtral-8x7b", ffn_hidden_size=8192, moe_ffn_hidden_size=1024).spec()
    assert (apart.ffn, apart.expert_ffn) == (8192, 1024)
    some_dense = ModelOptions(model="deepseek-v3", ffn_hidden_size=8192).spec()
    assert (some_dense.ffn, some_dense.expert_ffn) == (8192, 2048)
    # No layer of this one has the width of the dense MLP, which need not be given.
    narrow = ModelOptions(model="qwen3-30b-a3b", hidden_size=1024).spec()
    assert (narrow.hidden, narrow.expert_ffn) == (1024, 768)
    both = ModelOptions(model="qwen3-30b-a3b", ffn_hidden_size=6144, moe_ffn_hidden_size=512).spec()
    assert both.expert_ffn == 512


def test_norms_of_latents_that_megatron_would_not_have_are_said() -> None:
    latent: dict[str, Any] = DEEPSEEK | {"moe_layer_freq": None}
    assert ModelOptions(**latent).notes() == []
    (note,) = ModelOptions(**latent | {"qk_layernorm": False}).notes()
    assert note == "latent attention normalises its latents (Megatron-LM: with --qk-layernorm only)"


@pytest.mark.parametrize(
    ("pattern", "dense"),
    [
        ("1", 0),
        ("[1]*6", 0),
        ("([0]*2+[1]*4)", 2),
        ("[0]+[1]*5", 1),
        ("[0,0,0,1,1,1]", 3),
        ("[0]+([1]*5)", 1),
    ],
)
def test_leading_layers_may_be_dense(pattern: str, dense: int) -> None:
    assert ModelOptions(**SIZES, moe_layer_freq=pattern).spec().dense_layers == dense


def test_latent_attention_has_megatrons_defaults() -> None:
    options = ModelOptions(**SIZES, multi_latent_attention=True, position_embedding_type="rope")
    spec = options.spec()
    assert spec.latent_attention is not None
    assert spec.latent_attention.model_dump() == {
        "q_lora_rank": 0,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    assert (spec.head_dim, spec.kv_heads, spec.qk_norm) == (192, 8, False)


DENSE = {name: value for name, value in SIZES.items() if name != "num_experts"}
LATENT = {"multi_latent_attention": True, "position_embedding_type": "rope"}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (DENSE | {"moe_router_topk": 2}, "--moe-router-topk needs a mixture of experts; give --num-experts"),
        ({"model": "llama2-7b", "moe_layer_freq": "1"}, "--moe-layer-freq needs a mixture of experts"),
        (SIZES | {"moe_router_topk": 9}, "--moe-router-topk 9: expected 1 to 8, the number of experts"),
        (SIZES | {"moe_router_topk": 0}, "--moe-router-topk 0: expected a whole number of at least 1"),
        (SIZES | {"num_experts": -1}, "--num-experts -1: expected a whole number of at least 0"),
        (SIZES | {"num_experts": 1}, "--num-experts 1: each token uses 2 of them; give --moe-router-topk"),
        ({"model": "deepseek-v3", "num_experts": 4}, "--num-experts 4: each token uses 8 of them"),
        (SIZES | {"moe_ffn_hidden_size": 0}, "--moe-ffn-hidden-size 0: expected a whole number of at least"),
        (
            SIZES | {"num_experts": 0, "moe_router_topk": 2},
            "--moe-router-topk needs a mixture of experts, and --num-experts 0 is none",
        ),
        (
            SIZES | {"moe_router_topk": 1},
            "--moe-router-topk 1 needs --moe-router-pre-softmax: the weight of one expert would always be 1",
        ),
        ({"model": "mixtral-8x7b", "moe_router_topk": 1}, "--moe-router-topk 1 needs --moe-router-pre-soft"),
        (
            SIZES | {"moe_router_enable_expert_bias": True},
            "--moe-router-enable-expert-bias needs --moe-router-score-function sigmoid, not softmax",
        ),
        (
            {"model": "deepseek-v3", "moe_router_score_function": "softmax"},
            "--moe-router-score-function softmax: the model's experts have biases, which need sigmoid",
        ),
        (
            SIZES | {"moe_expert_capacity_factor": 0.0},
            "--moe-expert-capacity-factor 0: experts would take in nothing",
        ),
        (
            SIZES | {"moe_router_num_groups": 2, "moe_router_group_topk": 3},
            "--moe-router-group-topk 3: expected 1 to 2, the number of groups",
        ),
        (
            SIZES | {"moe_router_num_groups": 0, "moe_router_group_topk": 0},
            "--moe-router-num-groups 0: expected a whole number of at least 1",
        ),
        (
            {"model": "deepseek-v3", "moe_router_topk": 12},
            "--moe-router-group-topk 4: groups are ranked by their best expert or their two best, which "
            "--moe-router-topk 12",
        ),
        (
            {"model": "qwen3-30b-a3b", "ffn_hidden_size": 8192},
            "--ffn-hidden-size 8192: all layers of qwen3-30b-a3b have experts, which are 768 wide; give "
            "--moe-ffn-hidden-size",
        ),
        (SIZES | {"moe_router_score_function": "tanh"}, "--moe-router-score-function tanh: expected softmax"),
        (
            SIZES | {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": True},
            "--moe-router-pre-softmax needs --moe-router-score-function softmax, not sigmoid",
        ),
        (
            SIZES | {"moe_router_num_groups": 4},
            "--moe-router-num-groups and --moe-router-group-topk go together",
        ),
        (
            SIZES | {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_topk": 3},
            "--moe-router-group-topk 1: groups are ranked by their best expert or their two best",
        ),
        (SIZES | {"moe_router_num_groups": 3, "moe_router_group_topk": 1}, "router groups 3 must divide"),
        (SIZES | {"moe_shared_expert_gate": True}, "shared_expert_gate needs shared experts"),
        (
            SIZES | {"moe_layer_freq": "2"},
            "--moe-layer-freq 2: experts are in every layer but the first ones",
        ),
        (SIZES | {"moe_layer_freq": "[1]*3+[0]*3"}, "experts are in every layer but the first ones; give 1"),
        (SIZES | {"moe_layer_freq": "[0]*6"}, "experts are in every layer but the first ones"),
        (SIZES | {"moe_layer_freq": "[1]*99999999"}, "experts are in every layer but the first ones"),
        (SIZES | {"moe_layer_freq": "open('x')"}, "experts are in every layer but the first ones"),
        (SIZES | {"moe_layer_freq": "[0]+[1]*6"}, "lists 7 layers, but the model has 6"),
        (SIZES | {"kv_lora_rank": 64}, "--kv-lora-rank needs --multi-latent-attention"),
        (SIZES | {"multi_latent_attention": True}, "needs --position-embedding-type rope"),
        (SIZES | LATENT | {"kv_channels": 64}, "--kv-channels 64: heads of latent attention have the widths"),
        (
            SIZES | LATENT | {"group_query_attention": True, "num_query_groups": 2},
            "--num-query-groups 2: heads of latent attention",
        ),
    ],
)
def test_wrong_flags_of_experts_end_in_one_line(flags: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        ModelOptions(**flags).spec()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_number_says_how_full_the_fullest_rank_is() -> None:
    (load,) = expert_loads("1.3", "--flag")
    assert (load.ranks, load.mean, load.peak) == (1, 1.3, 1.3)


def test_metrics_of_a_run_say_it_for_any_number_of_ranks(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    steps = [
        {"iteration": 1, "expert_load": {"0": [2.0, 1.0, 0.5, 0.5], "1": [1.0, 1.0, 1.0, 1.0]}},
        {"iteration": 1, "validation_loss": 5.0},
        {"iteration": 2, "expert_load": {"0": [1.2, 0.8, 1.0, 1.0], "1": [0.0, 0.0, 3.0, 1.0]}},
    ]
    file.write_text("".join(json.dumps(step) + "\n" for step in steps))
    loads = {load.ranks: (load.mean, load.peak) for load in expert_loads(str(file), "--flag")}
    # The fullest of two ranks has 1.5, 1, 1 and 2 times the mean; the fullest of four 2, 1, 1.2 and 3 times.
    assert loads[1] == (1.0, 1.0)
    assert loads[2] == pytest.approx(((1.5 + 1 + 1 + 2) / 4, 2.0))
    assert loads[4] == pytest.approx(((2 + 1 + 1.2 + 3) / 4, 3.0))
    assert Router(loads=expert_loads(str(file), "--flag")).load_of(3).ranks == 2  # type: ignore[union-attr]


def test_natural_routing_is_assumed_and_said_unless_loads_are_given(planner_command: Command) -> None:
    job = ("--model", "qwen3-30b-a3b", "--world-size", 16, "--device", "h100", "--global-batch-size", 64)

    def answer(*more: str) -> tuple[float, list[str]]:
        code, out, _ = planner_command("suggest", *map(str, job), "--pin", "ep=8", "--json", *more)
        assert code == 0
        found = json.loads(out)
        return found["plans"][0]["estimate"]["step_time_s"], found["assumed"]

    natural, said = answer()
    assert any("natural routing: the fullest of 8 expert-parallel ranks" in text for text in said)
    forced, silent = answer("--moe-load-imbalance", "1")
    assert not any("routing" in text for text in silent)
    untrained, early = answer("--moe-load-imbalance", "early")
    assert any("untrained routing" in text for text in early)
    assert forced < natural < untrained


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0.9", "expected a number of at least 1"),
        ("nan", "expected a number of at least 1"),
        ("none.jsonl", "none.jsonl: No such file or directory; give a number"),
        ("dense.jsonl", "no step says expert_load"),
        ("broken.jsonl", "is no metrics.jsonl"),
    ],
)
def test_loads_that_say_nothing_are_refused(
    text: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dense.jsonl").write_text('{"iteration": 1, "loss": 5.0}\n')
    (tmp_path / "broken.jsonl").write_text('{"expert_load": {"0": ["a"]}}\n')
    with pytest.raises(InputError, match=words):
        expert_loads(text, "--moe-load-imbalance")
