"""Megatron's flags: the model they describe, the pins they set, and the lines that refuse wrong ones."""

from __future__ import annotations

from typing import Any

import pytest

from costmodels import ModelSpec
from costmodels.catalogue import load_model
from costmodels.errors import InputError
from planner.options import BatchOptions, ClusterOptions, ModelOptions, ParallelOptions

NAMES = {"name", "source", "published_parameters"}

LLAMA = {
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 32000,
}


def described(options: ModelOptions) -> dict[str, Any]:
    return options.spec().model_dump(exclude=NAMES)


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (
            {
                "num_layers": 48,
                "hidden_size": 6144,
                "num_attention_heads": 64,
                "seq_length": 2048,
                "max_position_embeddings": 2048,
            },
            "gpt-22b",
        ),
        (
            {
                **LLAMA,
                "num_layers": 80,
                "hidden_size": 8192,
                "ffn_hidden_size": 28672,
                "num_attention_heads": 64,
                "group_query_attention": True,
                "num_query_groups": 8,
            },
            "llama2-70b",
        ),
        (
            {
                **LLAMA,
                "num_layers": 32,
                "hidden_size": 4096,
                "ffn_hidden_size": 14336,
                "num_attention_heads": 32,
                "group_query_attention": True,
                "num_query_groups": 8,
                "num_experts": 8,
                "moe_router_topk": 2,
                "max_position_embeddings": 32768,
                "rotary_base": 1e6,
            },
            "mixtral-8x7b",
        ),
    ],
)
def test_flags_describe_the_named_model(flags: dict[str, Any], name: str) -> None:
    assert described(ModelOptions(**flags)) == load_model(name).model_dump(exclude=NAMES)


def test_without_a_model_the_gpt_of_22_billion_is_planned_and_said() -> None:
    options = ModelOptions()
    assert options.spec() == load_model("gpt-22b")
    assert "gpt-22b" in options.notes()[0]
    assert ModelOptions(model="gpt-22b").notes() == []


def test_flags_override_a_named_model() -> None:
    spec = ModelOptions(model="llama2-7b", num_layers=16, vocab_size=50000, norm_epsilon=1e-6).spec()
    assert (spec.layers, spec.vocab, spec.norm_eps, spec.hidden) == (16, 50000, 1e-6, 4096)
    assert spec.published_parameters == 0
    narrow = ModelOptions(model="gpt-22b", hidden_size=1024, num_attention_heads=16).spec()
    assert (narrow.ffn, narrow.kv_heads, narrow.head_dim) == (4096, 16, 64)


def test_a_longer_sequence_extends_the_positions() -> None:
    longer = ModelOptions(seq_length=4096).spec()
    assert (longer.seq, longer.max_positions) == (4096, 4096)
    shorter = ModelOptions(seq_length=1024).spec()
    assert (shorter.seq, shorter.max_positions) == (1024, 2048)
    assert longer.embedding_parameters - shorter.embedding_parameters == 2048 * 6144


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"hidden_size": 1024}, "also needs --num-layers, --num-attention-heads, --seq-length"),
        (
            {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 3, "seq_length": 8},
            "hidden 64 is not divisible",
        ),
        ({"model": "gpt-99"}, "unknown model 'gpt-99'"),
        ({"normalization": "BatchNorm"}, "--normalization BatchNorm: expected LayerNorm, RMSNorm"),
        ({"position_embedding_type": "alibi"}, "--position-embedding-type alibi: expected learned_absolute"),
        ({"swiglu": True, "squared_relu": True}, "--swiglu and --squared-relu contradict each other"),
        ({"num_query_groups": 8}, "--num-query-groups 8 needs --group-query-attention"),
        ({"model": "llama2-7b", "hidden_size": 2048}, "whose MLP is 11008 wide: give --ffn-hidden-size too"),
        ({"seq_length": 4096, "max_position_embeddings": 2048}, "--seq-length 4096 is longer than"),
        ({"vocab_size": 0}, "vocab is 0"),
    ],
)
def test_wrong_model_flags_end_in_one_line(flags: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        ModelOptions(**flags).spec()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


GPT = load_model("gpt-22b")


def test_megatrons_parallel_flags_are_pins() -> None:
    options = ParallelOptions(
        pin=["dp=2"],
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=8,
        num_layers_per_virtual_pipeline_stage=3,
        sequence_parallel=True,
        micro_batch_size=2,
        recompute_granularity="full",
        use_distributed_optimizer=True,
        bf16=True,
        task_type="llmacc.megatron.GPT",
    )
    assert options.pins(GPT) == {
        "data_parallel": 2,
        "tensor_parallel": 4,
        "pipeline_parallel": 8,
        "virtual_pipeline_parallel": 2,
        "sequence_parallel": True,
        "micro_batch_size": 2,
        "recompute": "full",
        "zero_stage": 1,
        "precision": "bf16",
    }
    assert ParallelOptions().pins(GPT) == {}
    assert ParallelOptions(recompute_activations=True).pins(GPT) == {"recompute": "selective"}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"pin": ["tp=2"], "tensor_model_parallel_size": 4}, "pin tensor_parallel is given twice: 2 and 4"),
        ({"bf16": True, "fp16": True}, "pin precision is given twice"),
        ({"recompute_granularity": "half"}, "--recompute-granularity half: expected full or selective"),
        ({"recompute_granularity": "full", "recompute_activations": True}, "pin recompute is given twice"),
        ({"num_layers_per_virtual_pipeline_stage": 3}, "needs --pipeline-model-parallel-size"),
        (
            {"num_layers_per_virtual_pipeline_stage": 5, "pipeline_model_parallel_size": 8},
            "5 x pipeline_parallel 8 does not divide the 48 layers of gpt-22b",
        ),
        ({"task_type": "llmacc.megatron.BERT"}, "--task-type llmacc.megatron.BERT: only llmacc.megatron.GPT"),
        ({"tensor_model_parallel_size": 0}, "pin tensor_parallel=0: expected a whole number of at least 1"),
    ],
)
def test_wrong_parallel_flags_end_in_one_line(flags: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError) as caught:
        ParallelOptions(**flags).pins(GPT)
    assert line in str(caught.value)


def test_the_world_size_has_no_default_and_the_assumed_device_is_said() -> None:
    with pytest.raises(InputError, match="give --world-size"):
        ClusterOptions().required_world_size()
    assert ClusterOptions(world_size=8).notes() == ["no device given: a100-80g"]
    assert ClusterOptions(world_size=8, device="h100").notes() == []
    assert BatchOptions() == BatchOptions(global_batch_size=None, max_global_batch_size=None)


def test_a_model_by_its_dimensions_assumes_gpt2s_vocabulary_and_says_so() -> None:
    options = ModelOptions(num_layers=2, hidden_size=64, num_attention_heads=4, max_position_embeddings=32)
    spec = options.spec()
    assert isinstance(spec, ModelSpec)
    assert (spec.vocab, spec.seq, spec.ffn) == (50257, 32, 256)
    assert options.notes() == ["no --vocab-size given: 50257 (GPT-2)"]
