"""Hugging Face configurations become the catalogue's models; broken ones end in one line."""

import json
from pathlib import Path
from typing import Any

import pytest

from costmodels.catalogue import load_model
from costmodels.errors import InputError
from costmodels.spec.model_flops import flops_per_sequence
from costmodels.spec.model_parts import RopeScaling, Router
from planner.inputs.huggingface.config_file import model_from_hf_config

LLAMA = {
    "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    "vocab_size": 32000, "max_position_embeddings": 4096, "attention_bias": False,
    "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
    "num_key_value_heads": 8,
}  # fmt: skip
QWEN3_MOE = {
    "model_type": "qwen3_moe", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128, "num_hidden_layers": 48,
    "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
    "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "mlp_only_layers": [],
    "decoder_sparse_step": 1, "tie_word_embeddings": False, "norm_topk_prob": True,
}  # fmt: skip
QWEN2_MOE = {
    "model_type": "qwen2_moe", "vocab_size": 151936, "max_position_embeddings": 8192, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "num_hidden_layers": 24, "hidden_size": 2048,
    "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60,
    "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
    "decoder_sparse_step": 1, "norm_topk_prob": False, "tie_word_embeddings": False,
    "use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21,
}  # fmt: skip
YARN = {
    "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
    "mscale": 0.707, "mscale_all_dim": 0.707,
}  # fmt: skip
LLAMA3_ROPE = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
DEEPSEEK_V2 = {
    "model_type": "deepseek_v2", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000,
    "vocab_size": 102400, "max_position_embeddings": 163840, "num_hidden_layers": 60, "hidden_size": 5120,
    "intermediate_size": 12288, "num_attention_heads": 128, "num_key_value_heads": 128,
    "n_routed_experts": 160, "n_shared_experts": 2, "num_experts_per_tok": 6, "moe_intermediate_size": 1536,
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "tie_word_embeddings": False,
    "rope_scaling": YARN, "scoring_func": "softmax", "topk_method": "group_limited_greedy", "n_group": 8,
    "topk_group": 3, "routed_scaling_factor": 16.0, "norm_topk_prob": False,
}  # fmt: skip
DEEPSEEK_V3 = {
    **DEEPSEEK_V2, "model_type": "deepseek_v3", "vocab_size": 129280, "num_hidden_layers": 61,
    "hidden_size": 7168, "intermediate_size": 18432, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "first_k_dense_replace": 3,
    "rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2-xl": {
        "model_type": "gpt2", "n_layer": 48, "n_embd": 1600, "n_head": 25, "n_positions": 1024, "n_ctx": 1024,
        "vocab_size": 50257, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5,
    },
    "llama2-70b": LLAMA,
    "llama3-8b": {
        **LLAMA, "vocab_size": 128256, "max_position_embeddings": 8192, "num_hidden_layers": 32,
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    },
    "llama3.1-8b": {
        **LLAMA, "vocab_size": 128256, "max_position_embeddings": 131072, "num_hidden_layers": 32,
        "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_ROPE,
    },
    "mixtral-8x7b": {
        "model_type": "mixtral", "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 1000000.0,
        "vocab_size": 32000, "max_position_embeddings": 32768, "num_hidden_layers": 32, "hidden_size": 4096,
        "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None,
    },
    "qwen2.5-0.5b": {
        "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "vocab_size": 151936, "max_position_embeddings": 32768, "num_hidden_layers": 24, "hidden_size": 896,
        "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": {
        "model_type": "qwen3", "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1000000,
        "vocab_size": 151936, "max_position_embeddings": 40960, "head_dim": 128, "num_hidden_layers": 36,
        "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
        "tie_word_embeddings": False, "attention_bias": False,
    },
    "qwen1.5-moe-a2.7b": QWEN2_MOE,
    "qwen2-57b-a14b": {
        **QWEN2_MOE, "max_position_embeddings": 131072, "num_hidden_layers": 28, "hidden_size": 3584,
        "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4, "num_experts": 64,
        "num_experts_per_tok": 8, "moe_intermediate_size": 2560, "shared_expert_intermediate_size": 20480,
        "max_window_layers": 28,
    },
    "qwen3-30b-a3b": QWEN3_MOE,
    "deepseek-v2": DEEPSEEK_V2,
    "deepseek-v2-lite": {
        **DEEPSEEK_V2, "num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 10944,
        "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
        "moe_intermediate_size": 1408, "q_lora_rank": None, "topk_method": "greedy", "n_group": 1,
        "topk_group": 1, "routed_scaling_factor": 1.0,
    },
    "deepseek-v3": DEEPSEEK_V3,
}  # fmt: skip
UNCHECKED = {"name", "source", "published_parameters", "max_positions", "seq"}


def write(folder: Path, config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_the_catalogues_model(tmp_path: Path, name: str) -> None:
    model = model_from_hf_config(write(tmp_path / name, CONFIGS[name]))
    expected = load_model(name)
    assert model.name == name
    assert model.parameters == expected.parameters
    assert model.active_parameters == expected.active_parameters
    assert model.model_dump(exclude=UNCHECKED) == expected.model_dump(exclude=UNCHECKED)


def test_qwen2_moe_may_go_without_biases_and_shared_experts(tmp_path: Path) -> None:
    assert model_from_hf_config(write(tmp_path / "m", QWEN2_MOE)).qkv_bias
    config = QWEN2_MOE | {"qkv_bias": False, "shared_expert_intermediate_size": 0}
    model = model_from_hf_config(write(tmp_path / "m", config))
    assert not model.qkv_bias and not model.shared_expert_ffn and not model.shared_expert_gate


def test_transformers_5_has_another_name_for_the_number_of_experts(tmp_path: Path) -> None:
    config = {key: value for key, value in QWEN3_MOE.items() if key != "num_experts"}
    model = model_from_hf_config(write(tmp_path / "m", config | {"num_local_experts": 128}))
    assert model.experts == 128


ROUTER_KEYS = (
    "norm_topk_prob",
    "routed_scaling_factor",
    "topk_method",
    "scoring_func",
    "n_group",
    "topk_group",
)


@pytest.mark.parametrize(
    ("config", "router"),
    [
        (QWEN3_MOE, Router(normalised=False)),
        (QWEN2_MOE, Router(normalised=False)),
        (DEEPSEEK_V2, Router(normalised=False)),
        (DEEPSEEK_V3, load_model("deepseek-v3").router),
    ],
)
def test_router_keys_that_are_left_out_are_transformers_defaults(
    tmp_path: Path, config: dict[str, Any], router: Router
) -> None:
    for null in ({}, dict.fromkeys(ROUTER_KEYS)):
        bare = {key: value for key, value in config.items() if key not in ROUTER_KEYS}
        assert model_from_hf_config(write(tmp_path / "m", bare | null)).router == router


@pytest.mark.parametrize(
    ("config", "scaling"),
    [
        (
            {"rope_scaling": YARN},
            RopeScaling(
                kind="yarn", factor=40.0, original_positions=4096, mscale=0.707, mscale_all_dim=0.707
            ),
        ),
        (
            {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}},
            RopeScaling(kind="llama3", factor=8.0, original_positions=8192),
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, RopeScaling(kind="linear", factor=2.0)),
        # Without a length of pre-training it is the present one; without a factor, their ratio.
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False, "attention_factor": 1.5}},
            RopeScaling(
                kind="yarn", factor=2.0, original_positions=4096, truncate=False, attention_factor=1.5
            ),
        ),
        (
            {"rope_scaling": {"type": "yarn", "original_max_position_embeddings": 1024, "mscale": None}},
            RopeScaling(kind="yarn", factor=4.0, original_positions=1024),
        ),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
            RopeScaling(kind="dynamic", factor=2.0),
        ),
        # The ratio of a length of pre-training that is not given either.
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            RopeScaling(kind="yarn", original_positions=4096),
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, None),
        ({"rope_scaling": {"rope_type": "default"}}, None),
        ({"rope_scaling": None}, None),
        ({}, None),
    ],
)
def test_rope_scaling_is_recorded_and_costs_nothing(
    tmp_path: Path, config: dict[str, Any], scaling: RopeScaling | None
) -> None:
    model = model_from_hf_config(write(tmp_path / "m", LLAMA | config))
    assert model.rope_scaling == scaling
    assert flops_per_sequence(model) == flops_per_sequence(load_model("llama2-70b"))


def test_mistral_is_read_as_a_llama(tmp_path: Path) -> None:
    # Mistral 7B: 7.24B parameters (huggingface.co/mistralai/Mistral-7B-v0.1).
    config = CONFIGS["llama3-8b"] | {"model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096}
    config["max_position_embeddings"] = 32768
    assert model_from_hf_config(write(tmp_path / "m", config)).parameters == 7_241_732_096


MISTRAL = LLAMA | {"model_type": "mistral"}
QWEN2 = CONFIGS["qwen2.5-0.5b"]


@pytest.mark.parametrize(
    ("config", "seq", "windows"),
    [
        (MISTRAL | {"sliding_window": 4096}, 4096, 0.0),
        (MISTRAL | {"sliding_window": 4096}, 8192, 1.0),
        (MISTRAL | {"sliding_window": None}, 8192, 0.0),
        (MISTRAL, 8192, 1.0),  # Transformers leaves out a value that is its default of 4096.
        (CONFIGS["mixtral-8x7b"] | {"sliding_window": 4096}, 8192, 1.0),
        (QWEN2 | {"sliding_window": 4096, "use_sliding_window": False}, 8192, 0.0),
        (QWEN2 | {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 12}, 8192, 0.5),
        (QWEN2 | {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 24}, 8192, 0.0),
        (CONFIGS["qwen3-8b"] | {"sliding_window": 4096, "use_sliding_window": True}, 8192, 8 / 36),
        (LLAMA | {"sliding_window": 16}, 8192, 0.0),  # Not a key of a Llama.
    ],
)
def test_layers_attend_to_windows_that_are_shorter_than_the_sequence(
    tmp_path: Path, config: dict[str, Any], seq: int, windows: float
) -> None:
    model = model_from_hf_config(write(tmp_path / "m", config), seq=seq)
    kinds = [model.layer_kind(layer).attention for layer in range(model.layers)]
    assert kinds.count("window") == windows * model.layers
    whole = model.model_copy(update={"attention_pattern": ("full",)})
    # A window of 4096 sees three quarters of the pairs of 8192 tokens.
    saved = (flops_per_sequence(whole) - flops_per_sequence(model)) / (
        3.0 * seq**2 * 2 * model.q_size * model.layers
    )
    assert saved == pytest.approx(windows / 4)


def test_sequence_defaults(tmp_path: Path) -> None:
    gpt2 = write(tmp_path / "a", CONFIGS["gpt2-xl"])
    llama = write(tmp_path / "b", CONFIGS["llama3-8b"])
    assert model_from_hf_config(gpt2).seq == 1024
    assert model_from_hf_config(llama).seq == 4096
    assert model_from_hf_config(llama, seq=8192).seq == 8192
    longer = model_from_hf_config(llama, seq=16384)
    assert (longer.seq, longer.max_positions) == (16384, 16384)


def test_a_file_is_named_after_itself_or_its_folder(tmp_path: Path) -> None:
    folder = write(tmp_path / "My-Model", LLAMA)
    assert model_from_hf_config(folder / "config.json").name == "My-Model"
    (tmp_path / "other.json").write_text(json.dumps(LLAMA))
    assert model_from_hf_config(str(tmp_path / "other.json")).name == "other"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ('{"model_type": "llama",\n  "hidden_size": }', ["not valid JSON at line 2, column 18"]),
        ("", ["not valid JSON at line 1, column 1"]),
        ("[1, 2]", ["one JSON object"]),
        ('{"model_type": "bert"}', ["'bert'", "gpt2, gpt_oss"]),
        ('{"hidden_size": 8}', ["model_type None"]),
        ('{"model_type": ["llama"]}', ["model_type ['llama']"]),
        ('{"model_type": "deepseek_v2"}', ["a deepseek_v2 needs the key 'num_experts_per_tok'"]),
        ('{"model_type": "llama", "rope_parameters": [1]}', ["rope_scaling is [1], not a mapping"]),
        ('{"model_type": "gemma3_text", "layer_types": ["full_attention"]}', ["layer_types has 1 entries"]),
    ],
)
def test_a_broken_file_is_named_with_its_fault(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = tmp_path / "config.json"
    file.write_text(text)
    with pytest.raises(InputError) as error:
        model_from_hf_config(file)
    message = str(error.value)
    assert "\n" not in message
    for part in ("config.json", *parts):
        assert part in message


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (DEEPSEEK_V3 | {"attention_bias": True}, "attention_bias True is not supported"),
        (
            LLAMA | {"hidden_size": "512"},
            "hidden_size is the text '512', not a number; write 512 without quotes",
        ),
        (LLAMA | {"num_hidden_layers": True}, "num_hidden_layers is True, not a whole number"),
        (LLAMA | {"hidden_act": "tanh"}, "activation 'tanh'"),
        (LLAMA | {"rope_scaling": "yarn"}, "rope_scaling is 'yarn', not a mapping"),
        (LLAMA | {"rope_scaling": {"factor": 2.0}}, "names no rope_type"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "names no factor"),
        (LLAMA | {"rope_scaling": LLAMA3_ROPE | {"factor": "far"}}, "rope_scaling.factor is 'far'"),
        (MISTRAL | {"sliding_window": "wide"}, "sliding_window is 'wide', not a whole number"),
        (LLAMA | {"hidden_act": ["silu"]}, "activation"),
        (LLAMA | {"num_hidden_layers": "many"}, "layers is 'many'"),
        (LLAMA | {"num_attention_heads": 60}, "not divisible"),
        (LLAMA | {"max_position_embeddings": "long"}, "max_position_embeddings is 'long'"),
        (LLAMA | {"max_position_embeddings": 0}, "seq is 0"),
        (CONFIGS["gpt2-xl"] | {"n_embd": "wide"}, "n_embd is 'wide'"),
        (CONFIGS["gpt2-xl"] | {"scale_attn_weights": False}, "scale_attn_weights False is not supported"),
        (QWEN3_MOE | {"decoder_sparse_step": "two"}, "decoder_sparse_step is 'two'"),
        (QWEN3_MOE | {"mlp_only_layers": 3}, "mlp_only_layers 3 is not a list"),
        (DEEPSEEK_V2 | {"moe_layer_freq": 2}, "moe_layer_freq 2"),
        (DEEPSEEK_V2 | {"n_shared_experts": "two"}, "n_shared_experts is 'two'"),
        (DEEPSEEK_V2 | {"norm_topk_prob": True}, "norm_topk_prob True of a deepseek_v2"),
        (DEEPSEEK_V2 | {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        (DEEPSEEK_V2 | {"scoring_func": "sigmoid"}, "scoring_func 'sigmoid' is not supported"),
        (DEEPSEEK_V3 | {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        (DEEPSEEK_V3 | {"n_group": 7}, "router groups 7 must divide experts 256"),
    ],
)
def test_what_cannot_be_expressed_is_refused(tmp_path: Path, config: dict[str, Any], part: str) -> None:
    with pytest.raises(InputError) as error:
        model_from_hf_config(write(tmp_path / "m", config))
    assert part in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read model config .*config\.json"):
        model_from_hf_config(tmp_path)


def test_gelu_of_the_first_gemma_means_its_approximation(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for said in ("gelu", "gelu_pytorch_tanh"):
        file.write_text(json.dumps({"model_type": "gemma", "hidden_act": said}))
        assert model_from_hf_config(file).activation == "gelu_tanh"


def test_a_llama_4_scout_is_read_with_one_factor_for_both_bounds_of_its_waves(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    scaling = LLAMA3_ROPE | {"factor": 16.0, "high_freq_factor": 1.0}
    file.write_text(
        json.dumps({"model_type": "llama4_text", "rope_scaling": scaling, "rope_theta": 500000.0})
    )
    read = model_from_hf_config(file).rope_scaling
    assert read is not None and read.low_freq_factor == read.high_freq_factor == 1.0


@pytest.mark.parametrize("kind", ["gemma3_text", "gemma4_text", "glm_moe_dsa", "qwen3_next", "llama"])
def test_more_layers_than_any_model_has_are_refused_at_once(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"model_type": kind, "num_hidden_layers": 10**12}))
    with pytest.raises(InputError, match="num_hidden_layers is 1000000000000, more than 10000"):
        model_from_hf_config(file)
