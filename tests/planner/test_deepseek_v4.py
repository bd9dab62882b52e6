"""`config.json` of DeepSeek-V4 is read, as published and as transformers writes it, and not trained."""

import json
from pathlib import Path
from typing import Any

import pytest

from costmodels.errors import InputError
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_flops import flops_per_sequence
from costmodels.spec.untrained import untrained_parts
from planner import search
from planner.inputs.huggingface.config_file import model_from_hf_config
from planner.inputs.huggingface.readers import model_fields

SIX: dict[str, Any] = {"model_type": "deepseek_v4", "num_hidden_layers": 6}


def read(**keys: Any) -> ModelSpec:
    return ModelSpec(**model_fields(SIX | keys), name="v4", seq=4096)


def kinds(model: ModelSpec) -> list[str]:
    return [model.layer_kind(layer).attention for layer in range(model.layers)]


def test_kinds_of_layers_are_said_by_types_by_ratios_or_not_at_all() -> None:
    heavy, sparse = "compressed", "sparse"
    assert kinds(read()) == [heavy, heavy, heavy, sparse, heavy, sparse]
    # The seventh one is of a MTP module.
    assert kinds(read(compress_ratios=[0, 0, 4, 128, 4, 128, 0])) == [
        *("window", "window", sparse, heavy, sparse, heavy)
    ]
    names = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"] * 2
    assert kinds(read(layer_types=names)) == ["window", sparse, heavy] * 2


def test_rates_and_positions_have_an_older_and_a_newer_form() -> None:
    rates = {"compressed_sparse_attention": 8, "heavily_compressed_attention": 64}
    yarn = {"type": "yarn", "factor": 16, "original_max_position_embeddings": 65536}
    older = read(
        compress_rate_csa=8, compress_rate_hca=64, qk_rope_head_dim=32, rope_scaling=yarn, rope_theta=5000
    )
    newer = read(
        compress_rates=rates,
        partial_rotary_factor=32 / 512,
        rope_parameters={
            "main": {"rope_type": "default", "rope_theta": 5000},
            "compress": yarn | {"rope_type": "yarn", "rope_theta": 160000},
        },
    )
    for model in (older, newer):
        entries, latent = model.compressed_attention, model.latent_attention
        assert entries is not None and (entries.sparse_rate, entries.rate) == (8, 64)
        assert latent is not None and (latent.qk_rope_head_dim, latent.kv_lora_rank) == (32, 480)
        assert model.turned_by("window") == (5000, None)
        theta, scaling = model.turned_by("sparse") or (0, None)
        assert theta == 160000 and scaling is not None and scaling.factor == 16


def test_longer_sequences_are_priced_by_what_layers_read() -> None:
    short, long = (read().model_copy(update={"seq": seq, "max_positions": seq}) for seq in (4096, 65536))
    each = [flops_per_sequence(model) / model.seq for model in (short, long)]
    full = long.model_copy(update={"attention_pattern": ("full",)})
    assert each[0] < each[1] < flops_per_sequence(full) / full.seq / 2
    # Parameters that a token passes through, but for the embedding, at 6 FLOPs each, and keys that it reads.
    passed = 6 * (short.active_parameters - short.embedding_parameters)
    assert passed < each[0] < 1.1 * passed
    times = []
    for top_k in (512, 8192):
        indexer = {**model_fields(SIX)["indexer"], "top_k": top_k}
        model = ModelSpec.model_validate({**long.model_dump(), "indexer": indexer})
        best = search(model, world_size=16, device="h200", max_global_batch_size=16).best
        assert best is not None
        times.append(best.estimate.step_time_s)
    assert times[0] < times[1]


def test_it_is_planned_and_not_trained(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from planner.inputs.trained_here import check_model

    file = tmp_path / "config.json"
    file.write_text(json.dumps(SIX))
    model = model_from_hf_config(file)
    parts = {"attention to compressed entries", "hyper-connections", "sqrtsoftplus scores of experts"}
    assert parts < {*untrained_parts(model)}
    with pytest.raises(
        InputError, match=r"can be planned, not trained here.*attention to compressed entries"
    ):
        check_model(model)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"compress_ratios": [0, 4, 16, 4, 4, 4]}, "compress_ratios has 16, and only 0, 4 and 128 are known"),
        ({"compress_ratios": [0, 4]}, "compress_ratios has 2 entries for num_hidden_layers 6"),
        ({"compress_ratios": [[4]] * 6}, r"compress_ratios has \[4\]"),
        ({"layer_types": ["full_attention"] * 6}, "layer_types has 'full_attention', and only sliding"),
        ({"mlp_layer_types": ["dense"] * 6}, "mlp_layer_types has 'dense', and only hash_moe and moe"),
        ({"qk_rope_head_dim": 512}, "512 of head_dim 512 turn"),
        ({"o_groups": 7}, "o_groups 7 are of 64 heads"),
        ({"scoring_func": "tanh"}, "scoring_func 'tanh' is not supported"),
        ({"n_shared_experts": 2}, "n_shared_experts 2 is not supported"),
        ({"compress_rates": 4}, "compress_rates is 4, not a mapping"),
        ({"rope_parameters": 4}, "rope_parameters is 4, not a mapping"),
    ],
)
def test_other_values_are_refused_in_a_line(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SIX | keys))
    with pytest.raises(InputError, match=message):
        model_from_hf_config(file)
