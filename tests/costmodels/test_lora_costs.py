"""Costs of adapters: bytes and seconds follow from frozen and trained parameters."""

from __future__ import annotations

from typing import Any

import pytest

import planner
from costmodels import Layout, Lora, ModelSpec
from costmodels.catalogue import load_model
from costmodels.layers.adapters import adapter_parameters
from costmodels.spec.estimate import Estimate
from costmodels.spec.layout import even_split
from planner.inputs.model import with_lora

MODEL = load_model("llama3-8b")
TUNED = with_lora(MODEL, Lora(rank=16, alpha=32.0))


def estimate(model: ModelSpec, **fields: Any) -> Estimate:
    layout = {"layers_per_stage": even_split(model.layers, 1), "global_batch_size": 8, **fields}
    return planner.evaluate(Layout.model_validate(layout), model=model, device="h100")


def test_adapters_of_all_linear_layers_have_as_many_parameters_as_is_published() -> None:
    # 16 (h + o) for q, k, v, o, up, gate and down of 32 layers; peft prints 41,943,040 for this model.
    assert adapter_parameters(TUNED) == 41_943_040
    attention = with_lora(MODEL, Lora(rank=8, alpha=16.0, targets=("query", "value")))
    assert adapter_parameters(attention) == 3_407_872


def test_frozen_weights_take_two_bytes_each_and_adapters_those_of_training() -> None:
    memory = estimate(TUNED).memory[0]
    trains = adapter_parameters(TUNED)
    assert memory.parameters == pytest.approx(2 * (MODEL.parameters + trains), rel=0.01)
    assert memory.gradients + memory.optimizer == pytest.approx(16 * trains, rel=0.1)
    sharded = estimate(TUNED, data_parallel=8, zero_stage=3).memory[0]
    # A shard, and embedding, head and two layers as a whole.
    ends, layers = 2 * MODEL.vocab * MODEL.hidden, 2 * MODEL.dense_layer_parameters
    whole = MODEL.parameters / 8 + ends + layers
    assert sharded.parameters == pytest.approx(2 * whole, rel=0.02)


def test_inputs_of_matrices_without_adapters_are_not_kept() -> None:
    few = with_lora(MODEL, Lora(rank=16, alpha=32.0, targets=("query", "value")))
    kept, all_kept = (estimate(model).memory[0].activations for model in (few, TUNED))
    # The input of up and gate, and that of down, in 16 bits, of every layer.
    dropped = 2 * MODEL.seq * (MODEL.hidden + MODEL.ffn) * MODEL.layers
    assert all_kept - kept == pytest.approx(dropped, rel=0.05)


def test_backward_computes_no_gradients_of_frozen_weights() -> None:
    whole, tuned = estimate(MODEL), estimate(TUNED)
    # Two of three products, and the small ones of adapters.
    assert 2 / 3 < tuned.time.compute / whole.time.compute < 0.8
    assert tuned.time.optimizer < 0.02 * whole.time.optimizer
    reduced, full = (estimate(model, data_parallel=8, global_batch_size=8).time for model in (TUNED, MODEL))
    assert reduced.data_parallel < 0.1 * full.data_parallel


def test_what_one_gpu_was_measured_to_do_is_in_the_range() -> None:
    # NVIDIA NeMo Automodel, docs/performance-summary: 12,473 tokens/s of LoRA on one H100, sequences of 4096.
    plan = planner.suggest(
        MODEL.model_copy(update={"seq": 4096}),
        world_size=1,
        device="h100",
        global_batch_size=32,
        lora=Lora(rank=8, alpha=32.0),
    )
    tokens, found = 32 * 4096, plan.estimate
    low, high = tokens / found.step_time_high_s, tokens / found.step_time_low_s
    assert low < 12_473 < high
    assert any(text.startswith("lora=8: ") for text in planner.export(plan, to="megatron").inexpressible)


@pytest.mark.parametrize(
    ("precision", "device", "engine"),
    [("fp8", "h100", "bundled"), ("mxfp8", "b200", "megatron"), ("nvfp4", "b200", "megatron")],
)
def test_adapters_beside_narrow_products_are_refused(precision: str, device: str, engine: str) -> None:
    line = f"precision {precision}: adapters train beside weights in 16 bits"
    with pytest.raises(planner.InputError, match=line):
        planner.suggest(
            TUNED, world_size=1, device=device, global_batch_size=8, precision=precision, engine=engine
        )


NF4 = with_lora(MODEL, Lora(rank=16, alpha=32.0, quantize_base="nf4"))
MATRICES = MODEL.layers * MODEL.hidden * (2 * MODEL.hidden + 2 * MODEL.kv_size + 3 * MODEL.ffn)
LARGEST = MODEL.hidden * MODEL.ffn


@pytest.mark.parametrize(
    "fields", [{}, {"data_parallel": 8}, {"data_parallel": 8, "zero_stage": 1}, {"tensor_parallel": 8}]
)
def test_a_base_in_4_bits_takes_that_much_less(fields: dict[str, int]) -> None:
    wide, packed = (estimate(model, **fields).memory[0] for model in (TUNED, NF4))
    split = fields.get("tensor_parallel", 1)
    # FSDP2 gathers copies of 16 bits besides its shards of them; what is in 4 bits it does not know of.
    shards = 1 + 1 / fields["data_parallel"] if "zero_stage" in fields else 1
    saved = wide.parameters - packed.parameters
    assert saved == pytest.approx(MATRICES / split * (2 * shards - 4.127 / 8), rel=1e-3)
    more = packed.activations + packed.logits - wide.activations - wide.logits
    # Matrices in 16 bits while a layer is in backward, when the logits have gone.
    assert 0 <= more <= 3 * 2 * LARGEST / split


def test_each_rank_holds_its_base_in_4_bits_whole() -> None:
    sharded = estimate(NF4, data_parallel=8, zero_stage=3).memory[0].parameters
    # The rest, embedding and head, is split, and gathered as a whole while it is used.
    ends = 2 * MODEL.vocab * MODEL.hidden
    assert sharded == pytest.approx(MATRICES * 4.127 / 8 + 2 * ends * (1 + 1 / 8), rel=0.02)


def test_turning_matrices_back_is_read_and_written_twice_a_pass() -> None:
    wide, packed, again = (
        estimate(model, recompute=recompute).time
        for model, recompute in ((TUNED, "none"), (NF4, "none"), (NF4, "full"))
    )
    least = 8 * 2 * MATRICES * (4.127 / 8 + 2) / 3.35e12
    assert least < packed.elementwise - wide.elementwise < 3 * least
    assert packed.compute == wide.compute and again.recompute > packed.recompute


def test_one_gpu_has_room_for_70_billion_parameters_in_4_bits_only() -> None:
    large = load_model("llama3-70b").model_copy(update={"seq": 4096})
    job: Any = {"world_size": 1, "device": "h100", "global_batch_size": 32}
    plan = planner.suggest(large, lora=Lora(rank=16, alpha=32.0, quantize_base="nf4"), **job)
    left_out = planner.export(plan, to="megatron").inexpressible
    assert any(text.startswith("lora=16 on a base in nf4: ") for text in left_out)
    with pytest.raises(planner.InputError, match=r"fits with a base in 4 bits \(--quantize-base nf4\)"):
        planner.suggest(large, lora=Lora(rank=16, alpha=32.0), **job)


def test_other_engines_are_refused_by_name() -> None:
    with pytest.raises(planner.InputError, match="quantize-base nf4: engine megatron is not priced"):
        planner.suggest(NF4, world_size=8, device="h100", global_batch_size=8, engine="megatron")


def test_a_mixture_of_experts_needs_adapters_in_its_attention() -> None:
    with pytest.raises(planner.InputError, match="routed experts have no adapters"):
        with_lora(load_model("mixtral-8x7b"), Lora(rank=4, alpha=4.0, targets=("up", "down")))
