"""Megatron's flags: the model they describe, the pins they set, and the lines that refuse wrong ones."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from costmodels import ModelSpec
from costmodels.catalogue import load_model
from costmodels.errors import InputError
from planner.inputs.pins import WherePossible
from planner.options.batch import BatchOptions
from planner.options.cluster import ClusterOptions
from planner.options.flags import flag_names
from planner.options.model import ModelOptions
from planner.options.parallel import ParallelOptions
from tests.support.models import small_spec

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


def test_a_model_without_a_name_is_no_default() -> None:
    with pytest.raises(InputError, match="--model is empty"):
        ModelOptions(model=" ").spec()


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


@pytest.mark.parametrize(
    ("hidden", "width"),
    # int((4 h * 2 / 3) / 64) * 64, as Megatron-LM's arguments.py has it.
    [(4096, 10880), (5120, 13632), (6144, 16384), (1024, 2688)],
)
def test_a_gated_mlp_has_megatrons_width(hidden: int, width: int) -> None:
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "num_attention_heads": 16,
        "seq_length": 64,
        "hidden_size": hidden,
    }
    assert ModelOptions(**sizes, swiglu=True).spec().ffn == width
    assert ModelOptions(**sizes, swiglu=True, ffn_hidden_size=512).spec().ffn == 512
    assert ModelOptions(**sizes).spec().ffn == 4 * hidden


def test_a_named_model_that_becomes_gated_gets_that_width_and_one_that_is_keeps_its_own() -> None:
    gated = ModelOptions(model="gpt-22b", swiglu=True).spec()
    assert (gated.gated, gated.activation, gated.ffn) == (True, "silu", 16384)
    narrow = ModelOptions(model="gpt-22b", swiglu=True, hidden_size=4096).spec()
    assert narrow.ffn == 10880
    assert ModelOptions(model="llama2-7b", swiglu=True).spec().ffn == 11008


def test_experts_of_a_named_dense_model_have_the_promised_defaults() -> None:
    mixture = ModelOptions(model="llama2-7b", num_experts=8).spec()
    assert (mixture.experts, mixture.top_k, mixture.expert_ffn) == (8, 2, 11008)
    fine = ModelOptions(model="llama2-7b", num_experts=8, moe_router_topk=4, moe_ffn_hidden_size=512).spec()
    assert (fine.top_k, fine.expert_ffn) == (4, 512)
    more = ModelOptions(model="mixtral-8x7b", num_experts=16).spec()
    assert (more.top_k, more.expert_ffn) == (2, 14336)


def test_a_rotary_base_goes_with_rotary_positions() -> None:
    assert ModelOptions(model="llama2-7b", rotary_base=1e6).spec().rope_theta == 1e6
    assert ModelOptions(rotary_base=1e6, position_embedding_type="rope").spec().rope_theta == 1e6


def test_megatrons_older_words_for_rotary_positions() -> None:
    new = ModelOptions(position_embedding_type="rope").spec()
    assert ModelOptions(use_rotary_position_embeddings=True).spec() == new
    both = ModelOptions(use_rotary_position_embeddings=True, no_position_embedding=True)
    assert both.spec() == new
    assert ModelOptions(model="llama2-7b", no_position_embedding=True).spec() == load_model("llama2-7b")


LLAMA_CONFIG = {
    "model_type": "mistral", "vocab_size": 32000, "max_position_embeddings": 32768, "num_hidden_layers": 2,
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4,
    "sliding_window": 1024,
}  # fmt: skip


def test_the_sequence_length_of_a_file_is_said_unless_it_is_given(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(LLAMA_CONFIG | {"sliding_window": None}))
    for path in (str(config), str(tmp_path)):
        assert ModelOptions(model=path).notes() == [
            "sequence length 4096 of at most 32768 (no --seq-length given)"
        ]
    assert ModelOptions(model=str(config), seq_length=512).notes() == []
    file = tmp_path / "mine.yaml"
    file.write_text("layers: 4\nhidden: 256\nheads: 8\nvocab: 1000\nseq: 128\n")
    assert "sequence length 128" in ModelOptions(model=str(file)).notes()[0]


@pytest.mark.parametrize(("seq", "kind"), [(None, "window"), (1025, "window"), (1024, "full")])
def test_the_sliding_window_is_held_against_the_sequence_that_is_trained(
    tmp_path: Path, seq: int | None, kind: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    spec = ModelOptions(model=str(tmp_path), seq_length=seq).spec()
    assert spec.seq == (seq or 4096)
    assert spec.attention_pattern == (kind,)


def test_rope_scaling_goes_with_rotary_positions(tmp_path: Path) -> None:
    scaled = {"rope_type": "yarn", "factor": 4.0}
    (tmp_path / "config.json").write_text(
        json.dumps(LLAMA_CONFIG | {"sliding_window": None, "rope_scaling": scaled})
    )
    path = str(tmp_path)
    scaling = ModelOptions(model=path, rotary_base=1e6).spec().rope_scaling
    assert scaling is not None and scaling.kind == "yarn"
    assert ModelOptions(model=path, position_embedding_type="none").spec().rope_scaling is None


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
        (
            {"use_rotary_position_embeddings": True, "position_embedding_type": "none"},
            "--use-rotary-position-embeddings and --position-embedding-type none contradict each other",
        ),
        (
            {"no_position_embedding": True},
            "--no-position-embedding: gpt-22b learns a table of positions; add --position-embedding-type",
        ),
        ({"rotary_base": 1e6}, "--rotary-base 1e+06: gpt-22b (changed) has no rotary positions"),
        (
            {"model": "llama2-7b", "squared_relu": True},
            "--squared-relu changes llama2-7b, whose MLP is 11008 wide: give --ffn-hidden-size too",
        ),
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
        tensor_model_parallel_size="4",
        pipeline_model_parallel_size="8",
        num_layers_per_virtual_pipeline_stage=3,
        sequence_parallel=True,
        micro_batch_size="2",
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
        "sequence_parallel": WherePossible(True),
        "micro_batch_size": 2,
        "recompute": "full",
        "zero_stage": WherePossible(1),
        "precision": "bf16",
    }
    assert ParallelOptions().pins(GPT) == {}
    narrowed = ParallelOptions(
        tensor_model_parallel_size="2..8", data_parallel_size="1,2", micro_batch_size="..4", forbid=["tp=4"]
    ).pins(GPT)
    assert {name: str(value) for name, value in narrowed.items()} == {
        "tensor_parallel": "2..8 but not 4",
        "data_parallel": "1,2",
        "micro_batch_size": "..4",
    }
    assert ParallelOptions(recompute_activations=True).pins(GPT) == {"recompute": "selective"}
    uniform = ParallelOptions(
        recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1
    )
    assert uniform.pins(GPT) == {
        "recompute": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


@pytest.mark.parametrize(
    ("flags", "pins"),
    [
        (
            {"context_parallel_size": 4, "cp_comm_type": "p2p"},
            {"context_parallel": 4, "context_parallel_form": WherePossible("ring")},
        ),
        ({"cp_comm_type": "a2a"}, {"context_parallel_form": WherePossible("all_to_all")}),
        (
            {"recompute_granularity": "selective", "recompute_modules": ["core_attn,layernorm", "moe_act"]},
            {"recompute": "selective", "recompute_modules": ("core_attention", "norm", "activation")},
        ),
        (
            {"recompute_activations": True, "recompute_modules": ["mlp"]},
            {"recompute": "selective", "recompute_modules": ("mlp",)},
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 4},
            {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 4},
        ),
        ({"num_distributed_optimizer_instances": 2}, {"zero_replicas": 2}),
        ({"pipeline_schedule": "dualpipev"}, {"schedule": "dualpipev"}),
        (
            {"optimizer_cpu_offload": True, "swap_attention": True, "grad_reduce_in_bf16": True},
            {"offload_optimizer": True, "offload_activations": True, "gradient_reduction": "bf16"},
        ),
        (
            {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 2},
            {"expert_parallel": 4, "expert_tensor_parallel": 2},
        ),
        ({"optimizer": "adamw"}, {"optimizer": "adam"}),
        ({"optimizer": "muon"}, {"optimizer": "muon"}),
        # MindSpeed's scripts name a number of layers without a granularity.
        (
            {"recompute_activation_function": True, "swap_attention": True, "recompute_num_layers": 1},
            {"recompute": "selective", "recompute_modules": ("activation",), "offload_activations": True},
        ),
        ({"fp8": True}, {"precision": "fp8"}),
        ({"fp8": True, "bf16": True}, {"precision": "fp8"}),
        ({"fp8": True, "fp8_recipe": "tensorwise"}, {"precision": "fp8", "fp8_recipe": "tensorwise"}),
        ({"fp8": True, "fp8_recipe": "mxfp8", "bf16": True}, {"precision": "mxfp8"}),
    ],
)
def test_flags_of_every_parallelism_are_pins(flags: dict[str, Any], pins: dict[str, Any]) -> None:
    assert ParallelOptions(**flags).pins(GPT) == pins


def test_a_strict_pin_outlives_the_flag_that_says_the_same() -> None:
    options = ParallelOptions(
        pin=["zero=1", "sp=true"], use_distributed_optimizer=True, sequence_parallel=True
    )
    assert options.pins(GPT) == {"zero_stage": 1, "sequence_parallel": True}


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ({"pin": ["tp=2"], "tensor_model_parallel_size": 4}, "pin tensor_parallel is given twice: 2 and 4"),
        ({"bf16": True, "fp16": True}, "pin precision is given twice"),
        ({"pin": ["zero=3"], "use_distributed_optimizer": True}, "pin zero_stage is given twice: 3 and 1"),
        ({"pin": ["sp=no"], "sequence_parallel": True}, "sequence_parallel is given twice: False and True"),
        ({"recompute_method": "uniform"}, "--recompute-method uniform needs --recompute-granularity full"),
        (
            {"recompute_granularity": "full", "recompute_method": "some"},
            "--recompute-method some: expected uniform or block",
        ),
        (
            {"recompute_granularity": "full", "recompute_num_layers": 4},
            "--recompute-num-layers 4 needs --recompute-method",
        ),
        (
            {"recompute_granularity": "selective", "recompute_num_layers": 4},
            "--recompute-num-layers 4 needs --recompute-granularity full",
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "block"},
            "recompute_method=block needs recompute_num_layers (--recompute-num-layers)",
        ),
        (
            {"recompute_granularity": "full", "swap_attention": True},
            "offload_activations has nothing to send with recompute full",
        ),
        ({"recompute_modules": ["shared_experts"]}, "--recompute-modules shared_experts: expected some of"),
        (
            {"recompute_granularity": "full", "recompute_modules": ["mlp"]},
            "--recompute-modules need --recompute-granularity selective, not full",
        ),
        ({"cp_comm_type": "a2a+p2p"}, "--cp-comm-type a2a+p2p: expected p2p, all_gather, a2a"),
        ({"context_parallel_size": 0}, "pin context_parallel=0: expected a whole number of at least 1"),
        ({"pipeline_schedule": "gpipe"}, "pin schedule=gpipe: expected one of 1f1b, interleaved"),
        (
            {"pipeline_schedule": "zbv", "num_virtual_stages_per_pipeline_rank": 4},
            "pin schedule=zbv contradicts virtual_pipeline_parallel=4",
        ),
        ({"num_distributed_optimizer_instances": 0}, "pin zero_replicas=0: expected a whole number"),
        (
            {"optimizer": "lion"},
            "pin optimizer=lion: expected one of adam, sgd, adafactor, muon, adam8bit, came",
        ),
        (
            {"recompute_granularity": "full", "recompute_activation_function": True},
            "--recompute-modules need --recompute-granularity selective, not full",
        ),
        ({"fp8": True, "fp16": True}, "pin precision is given twice: fp16 and fp8"),
        (
            {"pin": ["offload_optimizer=no"], "optimizer_cpu_offload": True},
            "given twice: False and True",
        ),
        ({"pin": ["offload_activations=no"], "swap_attention": True}, "offload_activations is given twice"),
        ({"pin": ["gradient_reduction=fp32"], "grad_reduce_in_bf16": True}, "is given twice: fp32 and bf16"),
        (
            {"accumulate_allreduce_grads_in_fp32": True, "grad_reduce_in_bf16": True},
            "--accumulate-allreduce-grads-in-fp32 and gradients summed in bf16 (--grad-reduce-in-bf16)",
        ),
        (
            {"accumulate_allreduce_grads_in_fp32": True, "pin": ["gradient_reduction=bf16"]},
            "contradict each other; give one",
        ),
        ({"reuse_fp32_param": True}, "--reuse-fp32-param is about weights in bf16; add --bf16"),
        ({"reuse_fp32_param": True, "fp16": True}, "--reuse-fp32-param is about weights in bf16"),
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


def test_degrees_have_short_flags_too() -> None:
    names = {name for field in dataclasses.fields(ParallelOptions) for name in flag_names(field)}
    assert {"--tp", "--pp", "--dp", "--cp", "--ep", "--etp", "--vpp", "--mbs"} <= names


def test_layers_beside_swapped_attention_recompute_their_mlp() -> None:
    model = ModelSpec(name="small", layers=8, hidden=64, heads=4, vocab=1000, seq=128)
    choices: tuple[dict[str, Any], ...] = ({}, {"recompute_method": "block"})
    for more in choices:
        options = ParallelOptions(swap_attention=True, recompute_num_layers=2, **more)
        assert not options.notes()
        assert options.pins(model) == {
            "offload_activations": True,
            "recompute": "selective",
            "recompute_modules": ("mlp",),
            "recompute_method": "block",
            "recompute_num_layers": 2,
        }
    swapped: dict[str, Any] = {"swap_attention": True, "recompute_activation_function": True}
    options = ParallelOptions(recompute_num_layers=1, **swapped)
    assert "recompute_num_layers" not in options.pins(model)
    assert "recomputes the MLPs of so many layers of a stage too" in options.notes()[0]
    assert ParallelOptions(**swapped).notes() == []
    alone = ParallelOptions(recompute_activation_function=True, recompute_num_layers=1)
    assert "--recompute-num-layers 1 has no effect beside" in alone.notes()[0]


@pytest.mark.parametrize("layers", [-7, 0])
def test_no_number_of_recomputed_layers_is_refused(layers: int) -> None:
    model = ModelSpec(name="small", layers=8, hidden=64, heads=4, vocab=1000, seq=128)
    full = {"recompute_granularity": "full", "recompute_method": "block"}
    for flags in ({"swap_attention": True}, {"recompute_activation_function": True}, full):
        with pytest.raises(
            InputError, match=f"--recompute-num-layers {layers}: expected a whole number of at"
        ):
            ParallelOptions(recompute_num_layers=layers, **flags).pins(model)


@pytest.mark.parametrize("options", [{"pin": ["vpp=2"]}, {"forbid": ["vpp=4"]}])
def test_chunks_by_their_layers_contradict_other_numbers(options: dict[str, Any]) -> None:
    layers: dict[str, Any] = {"pipeline_model_parallel_size": "2", "num_layers_per_virtual_pipeline_stage": 1}
    model = small_spec(layers=8)
    assert ParallelOptions(**layers).pins(model)["virtual_pipeline_parallel"] == 4
    with pytest.raises(InputError, match="virtual_pipeline_parallel"):
        ParallelOptions(**layers, **options).pins(model)


def test_flags_that_name_a_degree_fix_it() -> None:
    """The value is the one given: texts are parsed, switches and numbers stay what they are."""
    given: dict[str, Any] = {
        "pipeline_schedule": "1f1b",
        "recompute_granularity": "full",
        "muon_tp_mode": "distributed",
    }
    for field in fields(ParallelOptions):
        degree = field.metadata.get("degree")
        if degree is None:
            continue
        value = given.get(field.name, "2" if field.name.endswith(("_size", "_rank", "_instances")) else True)
        options: dict[str, Any] = {field.name: value}
        found = ParallelOptions(**options).pins(small_spec())
        assert degree in found, field.name
        if degree.startswith("offload"):
            assert found[degree] is True
