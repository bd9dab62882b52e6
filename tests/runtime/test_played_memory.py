"""What tapes play of the runtime's memory equals dry runs of it on random models and layouts."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, Phase, assume, given, note, reject, seed, settings

from costmodels import ModelSpec
from costmodels.spec.model_parts import ExpertLoad, LinearAttention, MultiTokenPrediction, Router
from costmodels.tapes.player import is_playable, structures_of_stage
from runtime.dryrun.sample_sizes import sample
from tests.support.layouts import parse_layout
from tests.support.models import FORMS
from tests.support.played_memory import Example, UnknownError, allowed, compare, draw
from tests.support.played_passes import played_passes, traced_passes

PARTS, EXAMPLES = 2, 1
"""Parts that run beside each other, and the examples of each, which record the tapes that they need:
`python -m benchmarks.memory` draws hundreds."""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_played_tapes_equal_the_dry_run(part: int) -> None:
    @seed(part)
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        drawn = draw(lambda values: data.draw(st.sampled_from(list(values))), small=True)
        assume(drawn is not None)
        assert drawn is not None
        note(drawn.describe())
        try:
            errors = compare(*drawn)
        except UnknownError:
            reject()
        assert not errors.misses, (errors.misses, errors.peak, errors.by_kind, errors.traced)

    holds()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "text", "compiled"),
    [
        ("around", "gbs=8,dp=2,zero=1,precision=bf16", True),
        ("after", "gbs=8,tp=2,sp=1,dp=2,zero=3,precision=bf16", False),
        ("sinks", "gbs=8,dp=2,ep=2,zero=2,precision=bf16", False),
        (
            "windows",
            "gbs=8,tp=2,cp=2,recompute=selective,recompute_modules=core_attention,precision=bf16",
            False,
        ),
        ("chunks", "gbs=8,pp=2,zero=1,dp=2,precision=fp32", False),
        ("sigmoid", "gbs=8,pp=2,mbs=2,recompute=selective,recompute_modules=norm,precision=bf16", False),
    ],
)
def test_blocks_of_few_models_are_recorded_as_they_are(name: str, text: str, compiled: bool) -> None:
    spec = FORMS[name]
    if name == "chunks":
        # Others than those that divide the sequence have no tape.
        spec = spec.model_copy(update={"window": spec.seq // 2})
    errors = compare(spec, parse_layout(text, spec), 0, compiled)
    assert not errors.misses


FURTHER = ModelSpec(
    name="further",
    layers=2,
    hidden=1024,
    heads=8,
    kv_heads=4,
    head_dim=128,
    ffn=2816,
    vocab=32000,
    seq=2048,
    gated=True,
    activation="silu",
    norm="rmsnorm",
    position="rope",
    tied=False,
    mtp=MultiTokenPrediction(depths=2),
)
ONE_FURTHER = MultiTokenPrediction(depths=1)
ROUTED: dict[str, Any] = {"experts": 8, "top_k": 2, "expert_ffn": 1024, "dense_layers": 1}
UNEVEN: dict[str, Any] = {"router": Router(loads=(ExpertLoad(ranks=1, mean=1.2, peak=1.7),))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "rank", "compiled", "fields"),
    [
        ("gbs=4,dp=2,zero=3,precision=bf16", 0, False, {}),
        ("gbs=4,dp=2,zero=1,precision=bf16", 0, True, {"tied": True}),
        ("gbs=8,pp=2,tp=2,dp=2,zero=2,recompute=full,precision=bf16", 1, False, {}),
        ("gbs=4,dp=2,ep=2,zero=1,precision=bf16", 0, False, ROUTED | UNEVEN),
        ("gbs=4,offload_activations=1,precision=bf16", 0, False, {}),
        ("gbs=4,tp=2,dp=2,zero=3,precision=fp8", 0, True, {}),
        # Autograd casts the gradient of an embedding while its operation holds what it was given.
        (
            "gbs=8,dp=8,zero=1,precision=fp16,gradient_reduction=bf16",
            0,
            False,
            {"layers": 1, "hidden": 2048, "seq": 512, "max_positions": 512, "mtp": ONE_FURTHER},
        ),
        # Without FSDP2 the modules' own parameters are the root's.
        ("gbs=4,optimizer=muon,precision=bf16", 0, False, {}),
        # One head of a rank is a part of the matrix, as others are.
        (
            "gbs=2,tp=2,sp=1,cp=2,cp_form=all_to_all,zero=3,offload_activations=1,precision=bf16",
            0,
            False,
            {"mtp": None, "layers": 1, "hidden": 4096, "ffn": 1024, "heads": 4, "vocab": 2048, "seq": 1024},
        ),
        # So ranks sum their gradients in one buffer.
        ("gbs=2,dp=2,precision=bf16", 0, False, {"hidden": 2048, "seq": 128, "max_positions": 128}),
    ],
)
def test_modules_that_predict_further_tokens_are_recorded_as_they_are(
    text: str, rank: int, compiled: bool, fields: dict[str, Any]
) -> None:
    if "fp8" in text:
        pytest.importorskip("torchao")
    spec = FURTHER.model_copy(update=fields)
    errors = compare(spec, parse_layout(text, spec), rank, compiled)
    assert not errors.misses, errors


FP8 = pytest.mark.skipif(find_spec("torchao") is None, reason="products in 8 bits are torchao's")

LINEAR: dict[str, Any] = {
    "mtp": None,
    "layers": 3,
    "attention_pattern": ("linear", "linear", "full"),
    "attention_gate": True,
    "linear_attention": LinearAttention(
        kind="gated_delta", key_heads=4, value_heads=8, key_dim=64, value_dim=96
    ),
}
UNGROUPED: dict[str, Any] = {
    "layers": 2,
    "attention_pattern": ("linear",),
    "linear_attention": LinearAttention(
        kind="gated_delta", key_heads=4, value_heads=4, key_dim=64, value_dim=96
    ),
}
STATES: dict[str, Any] = {
    "attention_pattern": ("linear",),
    "seq": 256,
    "linear_attention": LinearAttention(
        kind="gated_delta", key_heads=16, value_heads=16, key_dim=128, value_dim=128
    ),
}
CAPPED: dict[str, Any] = {
    "mtp": None,
    "attention_pattern": ("window", "full"),
    "window": 512,
    "attention_softcap": 50.0,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "rank", "compiled", "fields"),
    [
        ("gbs=4,dp=2,zero=3,recompute=full,precision=bf16", 0, True, LINEAR),
        # What a step keeps of few heads is too small to be sent.
        ("gbs=4,offload_activations=1,precision=bf16", 0, False, LINEAR | UNGROUPED),
        ("gbs=4,dp=2,zero=3,recompute=full,precision=bf16", 0, False, CAPPED),
        # Few steps, the last of them smaller.
        ("gbs=4,dp=2,zero=1,precision=bf16", 0, False, LINEAR | {"seq": 184, "max_positions": 184}),
        # Blocks of queries, of which the last is smaller.
        ("gbs=4,tp=2,dp=2,zero=1,precision=bf16", 0, False, CAPPED | {"seq": 2000, "max_positions": 2000}),
        # Each block of queries multiplies by keys of its own heads, in as many sequences.
        (
            "gbs=4,mbs=2,recompute=full,precision=bf16",
            0,
            False,
            CAPPED | {"layers": 1, "attention_pattern": ("full",), "heads": 16, "kv_heads": 16, "seq": 1024},
        ),
        # Context-parallel ranks that repeat the one key head, and see all blocks.
        ("gbs=4,cp=2,cp_form=all_to_all,precision=bf16", 0, False, CAPPED | {"kv_heads": 1}),
        # Windows over gathered keys, shorter than each of a rank's two parts of a sequence.
        ("gbs=4,cp=2,precision=bf16", 0, False, CAPPED | {"window": 256}),
        pytest.param("gbs=4,dp=2,zero=1,tp=2,precision=fp8", 0, False, LINEAR, marks=FP8),
    ],
)
def test_attention_that_goes_through_sequences_in_steps_is_recorded_as_it_is(
    text: str, rank: int, compiled: bool, fields: dict[str, Any]
) -> None:
    spec = FURTHER.model_copy(update=fields)
    errors = compare(spec, parse_layout(text, spec), rank, compiled)
    assert not errors.misses, errors


@FP8
@pytest.mark.slow
@pytest.mark.parametrize("form", ["all_gather", "ring"])
def test_attention_over_context_ranks_that_is_offloaded_is_played_in_8_bits(form: str) -> None:
    spec = FURTHER.model_copy(update={"mtp": None})
    text = f"gbs=4,cp=2,context_parallel_form={form},offload_activations=1,precision=fp8"
    errors = compare(spec, parse_layout(text, spec), 0, compiled=form == "all_gather")
    assert not errors.misses, errors


@pytest.mark.slow
def test_gradients_that_a_split_backward_leaves_are_added_up_as_backward_comes_to_them() -> None:
    spec = FURTHER.model_copy(
        update={"mtp": None, "layers": 4, "hidden": 2048, "ffn": 8192, "vocab": 8000, "seq": 512}
    )
    text = "gbs=8,dp=4,pp=2,vpp=2,schedule=interleaved_zb,optimizer=sgd,precision=bf16"
    errors = compare(spec, parse_layout(text, spec), 1, compiled=False)
    assert not errors.misses, errors


ALONE = FURTHER.model_copy(update={"name": "alone", "mtp": None, "seq": 1024, "vocab": 8000})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "fields"),
    [
        # Before PyTorch 2.15, FSDP2 comes to the gradients of experts amid those of others.
        ("gbs=8,dp=2,ep=2,zero=1,precision=bf16", ROUTED),
        # Ranks sum the gradients of experts alone, and add to those of the layer.
        ("gbs=8,mbs=2,tp=4,ep=2,precision=bf16,gradient_reduction=bf16", ROUTED),
        # The head's is cast once those of its norm are there.
        ("gbs=8,dp=2,tp=2,sp=1,zero=1,precision=fp16,gradient_reduction=bf16", {"vocab": 32000}),
    ],
)
def test_gradients_of_weights_that_come_apart_are_where_the_runtime_has_them(
    text: str, fields: dict[str, Any]
) -> None:
    spec = ALONE.model_copy(update={"layers": 4, "hidden": 2048, "expert_ffn": 2048} | fields)
    layout = parse_layout(f"{text},pp=2,vpp=2,schedule=interleaved_zb", spec)
    for rank in range(2):
        errors = compare(spec, layout, rank, compiled=False)
        assert not errors.misses, errors


def check_passes(example: Example) -> None:
    """Each pass of a rank is as high as it is in the dry run."""
    played, traced = played_passes(example), traced_passes(example)
    assert [one.stage for one in played] == [one.stage for one in traced]
    apart = [ours.high - own.high for ours, own in zip(played, traced, strict=True)]
    assert max(map(abs, apart)) <= allowed(0), apart


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "fields"),
    [
        # To sums that are there, autograd adds gradients of experts as it makes them.
        (
            "gbs=16,dp=4,tp=2,sp=1,zero=1,pp=2,vpp=2,schedule=zbv",
            ROUTED | {"gated": False, "activation": "gelu"},
        ),
        # Before PyTorch 2.15, gradients of an earlier pass end with the pass that adds them up, and what has
        # been made last amid its backward is there until that is over.
        (
            "gbs=8,mbs=2,dp=2,ep=2,zero=3,pp=2,vpp=2,schedule=interleaved_zb",
            ROUTED | {"experts": 16, "expert_ffn": 2048},
        ),
        # One operation makes gradients of a matrix and its bias, which are cast once both are there.
        (
            "gbs=8,dp=2,zero=1,pp=2,vpp=2,schedule=interleaved_zb",
            {"linear_bias": True, "gated": False, "activation": "gelu"},
        ),
        # Gradients of experts one by one are there while what is put together of them is cast.
        (
            "gbs=8,dp=2,zero=1,pp=2,vpp=2,schedule=interleaved_zb,gradient_reduction=bf16,precision=fp32",
            ROUTED,
        ),
        # Stages hold what they have added last while they compute the next layer again.
        (
            "gbs=8,dp=2,zero=1,pp=2,vpp=2,schedule=interleaved_zb,recompute=full",
            {"layers": 8, "seq": 2048, "ffn": 8192, "gated": False, "activation": "relu2"},
        ),
    ],
)
def test_passes_of_gradients_of_inputs_and_of_weights_are_as_high_as_the_runtimes(
    text: str, fields: dict[str, Any]
) -> None:
    spec = ALONE.model_copy(update={"layers": 4, "hidden": 2048, "linear_bias": False} | fields)
    layout = parse_layout(f"precision=bf16,{text}", spec)
    for rank in range(2):
        check_passes(Example(spec, layout, rank, compiled=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        # Loads are counted once, in forward.
        ROUTED | {"linear_bias": False},
        # Gradients of inputs leave what those of the experts' biases need.
        ROUTED | {"linear_bias": True},
        # What they leave of the last state ends once all layers are there again.
        LINEAR | STATES | {"layers": 12, "hidden": 1024, "ffn": 1024},
    ],
)
def test_layers_that_a_split_backward_computes_again_together_are_played(fields: dict[str, Any]) -> None:
    spec = ALONE.model_copy(update={"layers": 8, "hidden": 2048} | fields)
    text = "gbs=8,pp=2,vpp=2,schedule=interleaved_zb,recompute=full,recompute_num_layers=2,mbs=2,tp=2,sp=1"
    layout = parse_layout(text + ",precision=bf16", spec)
    for rank in range(2):
        check_passes(Example(spec, layout, rank, compiled=False))


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        # All copies of parameters are free before the first gradient is handed over in fp32.
        "gbs=1,precision=bf16,gradient_reduction=bf16",
        # Ranks that route other tokens sum the gradients of experts, where those of the layer are added to.
        "gbs=2,mbs=1,tp=2,precision=bf16,gradient_reduction=bf16",
    ],
)
def test_sums_in_16_bits_of_layers_and_experts_are_as_they_are_made(text: str) -> None:
    spec = ALONE.model_copy(update=ROUTED | {"expert_ffn": 2048, "layers": 3})
    assert not compare(spec, parse_layout(text, spec), 0, compiled=False).misses


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "rank", "fields"),
    [
        ("gbs=12,pp=3,dp=2,gradient_reduction=bf16,recompute=full", 2, {"ffn": 8192}),
    ],
)
def test_gradients_of_chained_layers_are_gradients(text: str, rank: int, fields: dict[str, Any]) -> None:
    spec = ALONE.model_copy(update={"layers": 6} | fields)
    layout = parse_layout(f"{text},precision=bf16", spec)
    assert not compare(spec, layout, rank, compiled=True).misses


@pytest.mark.slow
def test_gradients_of_plain_parameters_are_added_before_those_of_an_input() -> None:
    sizes = {"hidden": 4096, "ffn": 2048, "heads": 16, "kv_heads": 16, "linear_bias": True}
    spec = ALONE.model_copy(update=sizes | {"seq": 2048})
    text = "gbs=4,tp=2,sp=1,pp=2,offload_activations=1,precision=fp32"
    errors = compare(spec, parse_layout(text, spec), 0, compiled=False)
    assert not errors.misses, errors


@pytest.mark.slow
def test_further_layers_are_compiled_as_a_whole_behind_one_whose_attention_is_not() -> None:
    sizes = {"hidden": 2048, "vocab": 8000, "expert_ffn": 512, "top_k": 4}
    spec = FURTHER.model_copy(update=ROUTED | sizes)
    text = "gbs=4,mbs=2,recompute=full,recompute_method=block,offload_activations=1,precision=fp32"
    errors = compare(spec, parse_layout(text, spec), 0, compiled=True)
    assert not errors.misses, errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("", {"expert_ffn": 1024}),
        # Those of a module that predicts a further token, too.
        (
            ",optimizer=sgd",
            {"mtp": ONE_FURTHER, "expert_ffn": 2048, "seq": 2048, "vocab": 4000, "ffn": 2048},
        ),
    ],
)
def test_experts_one_by_one_are_summed_over_ranks_before_the_gradient_of_their_rows_is_whole(
    text: str, fields: dict[str, Any]
) -> None:
    spec = ALONE.model_copy(update=ROUTED | {"hidden": 2048} | fields)
    errors = compare(spec, parse_layout(f"gbs=1,tp=4,ep=2,precision=fp32{text}", spec), 0, compiled=False)
    assert not errors.misses, errors


@FP8
@pytest.mark.slow
@pytest.mark.parametrize("text", ["recompute=full", "pp=2"])
def test_tokens_that_products_in_8_bits_fill_up_are_played_to_the_row(text: str) -> None:
    spec = ALONE.model_copy(update={"seq": 1560, "ffn": 8192, "hidden": 2048})
    layout = parse_layout(f"gbs=4,mbs=1,{text},precision=fp8", spec)
    assert abs(compare(spec, layout, 0, compiled=False).peak) < 2**12


def test_of_layers_before_further_ones_all_send_their_activations() -> None:
    for text, last in (("gbs=4,offload_activations=1", "kept"), ("gbs=4,pp=2,offload_activations=1", "sent")):
        layout = parse_layout(text, FURTHER)
        assert is_playable(FURTHER, layout, compiled=True)
        *_, layer, head = structures_of_stage(FURTHER, layout, layout.pipeline_parallel - 1, compiled=True)
        assert (layer.structure.offloads_activations, head.structure.offloads_activations) == ("sent", last)
        assert sample(head.structure, 0).model.mtp == FURTHER.mtp
