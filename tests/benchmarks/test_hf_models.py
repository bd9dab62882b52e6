"""Defaults for keys that a config.json leaves out, and parameter counts, against those of transformers."""

import json

import pytest

from benchmarks.hf_models import DEFAULTS, class_defaults, compare
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_flops import flops_per_sequence
from costmodels.spec.untrained import untrained_parts
from planner import search
from planner.inputs.huggingface.readers import DEFAULTS_OF, READERS, model_fields

transformers = pytest.importorskip("transformers")

LAYERS = {"nemotron_h": {}, "gpt2": {"n_layer": 3}, "deepseek_v2": {"num_hidden_layers": 4}}
"""Fewer layers than by default, where the type has a key for them."""

KNOWN = [name for name in READERS if name in transformers.CONFIG_MAPPING and name not in DEFAULTS_OF]


@pytest.mark.skipif(
    transformers.__version__ not in DEFAULTS.read_text()[:200],
    reason="the recorded defaults are those of another transformers",
)
def test_recorded_defaults_are_those_of_transformers() -> None:
    recorded = json.loads(DEFAULTS.read_text())["types"]
    some = ("gpt_oss", "qwen3_moe", "deepseek_v3", "gemma3_text")
    for name in some:
        assert recorded[name] == json.loads(json.dumps(class_defaults(name))), name
    assert set(KNOWN) == set(recorded)


@pytest.mark.parametrize("name", KNOWN)
def test_default_models_have_as_many_parameters(name: str) -> None:
    row = compare(name, **LAYERS.get(name, {"num_hidden_layers": 6}))
    assert row.transformers is None or row.read == pytest.approx(row.transformers, rel=1e-4)


def test_the_text_part_of_a_larger_model_is_read() -> None:
    text = {"model_type": "gemma3_text", "hidden_size": 1152, "num_hidden_layers": 12, "vocab_size": 262144}
    fields = model_fields({"model_type": "gemma3", "text_config": text, "vision_config": {"depth": 2}})
    model = ModelSpec(**fields, name="gemma", seq=1024)
    assert (model.hidden, model.layers) == (1152, 12)
    kinds = [model.layer_kind(layer).attention for layer in range(12)]
    assert kinds == (["window"] * 5 + ["full"]) * 2
    fields = model_fields({"model_type": "qwen3_vl", "text_config": {"hidden_size": 2048, "head_dim": 128}})
    assert fields["qk_norm"] and fields["hidden"] == 2048


@pytest.mark.parametrize(
    "name", ["qwen3_next", "gemma3_text", "nemotron_h", "llama4_text", "gpt_oss", "deepseek_v32"]
)
def test_models_of_several_kinds_of_layers_are_planned(name: str) -> None:
    model = ModelSpec(**model_fields({"model_type": name}), name=name, seq=2048)
    found = search(model, world_size=64, device="h200", max_global_batch_size=64)
    best = found.best
    assert best is not None and best.estimate.step_time_s > 0
    # All of its layers at once are what its parts are, one kind after the other.
    counted = sum(model.layer_parameters(model.layer_kind(layer)) for layer in range(model.layers))
    ends = model.parameters - counted
    assert (
        ends
        == model.embedding_parameters + model.norm_parameters + (not model.tied) * model.vocab * model.hidden
    )


def test_a_shorter_window_is_never_slower() -> None:
    model = ModelSpec(**model_fields({"model_type": "gpt_oss"}), name="gpt", seq=8192)
    times = []
    for window in (128, 1024, 8192):
        changed = model.model_copy(update={"window": window})
        found = search(changed, world_size=16, device="h200", max_global_batch_size=16).best
        times.append(found.estimate.step_time_s if found else 0.0)
    assert times == sorted(times) and times[0] < times[2]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("nemotron_h", "Mamba-2"),
        ("deepseek_v32", "sparse attention with an indexer"),
        ("deepseek_v4", "attention to compressed entries"),
        ("gemma4_text", "parameters of other parts"),
    ],
)
def test_models_with_parts_of_their_own_are_planned_and_not_trained(name: str, part: str) -> None:
    fields = model_fields({"model_type": name})
    assert part in untrained_parts(ModelSpec(**fields, name=name, seq=2048))


@pytest.mark.parametrize("name", ["gpt_oss", "gemma3_text", "olmo3", "smollm3", "qwen3_next", "qwen3_5_text"])
def test_default_models_of_trained_types_lack_nothing(name: str) -> None:
    assert untrained_parts(ModelSpec(**model_fields({"model_type": name}), name=name, seq=2048)) == []


@pytest.mark.parametrize(
    ("head", "taking", "message"),
    [
        (8, 20, "global_head_dim 8 and num_kv_shared_layers 20 leave too few parameters"),
        (512, 30, "num_kv_shared_layers 30 is not one of 0 to 29"),
    ],
)
def test_a_gemma_4_with_impossible_layers_is_refused(head: int, taking: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_fields({"model_type": "gemma4_text", "global_head_dim": head, "num_kv_shared_layers": taking})


@pytest.mark.parametrize(
    "said",
    [
        {"indexer_types": ["full", "full", "shared", "shared", "full", "shared"]},
        {"index_topk_pattern": "FFSSFS"},
        {"index_topk_freq": 3, "index_skip_topk_offset": 2},
    ],
)
def test_layers_that_read_what_another_ones_indexer_chose_have_none(said: dict[str, object]) -> None:
    row = compare("glm_moe_dsa", num_hidden_layers=6, **said)
    assert row.transformers is not None and row.read == pytest.approx(row.transformers, rel=1e-8)
    fields = model_fields({"model_type": "glm_moe_dsa", "num_hidden_layers": 6} | said)
    assert fields["indexer"]["share"] == 0.5
    all_choose = model_fields({"model_type": "glm_moe_dsa", "num_hidden_layers": 6})
    models = [ModelSpec(**one, name="glm", seq=65536) for one in (fields, all_choose)]
    assert flops_per_sequence(models[0]) < flops_per_sequence(models[1])
    times = [search(one, world_size=64, device="h200", max_global_batch_size=64).best for one in models]
    assert times[0] and times[1] and times[0].estimate.step_time_s < times[1].estimate.step_time_s


@pytest.mark.parametrize(
    ("types", "message"),
    [
        (["full"], "has 1 entries for num_hidden_layers 6"),
        (["none"] * 6, "has 'none', and only full and shared"),
    ],
)
def test_other_indexer_types_are_refused(types: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_fields({"model_type": "glm_moe_dsa", "num_hidden_layers": 6, "indexer_types": types})
