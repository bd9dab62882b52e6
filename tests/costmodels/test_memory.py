"""Bytes against the equations of the papers and the parameter counts of the models."""

import numpy as np
import pytest

from costmodels import LatentAttention, MemoryPolicy
from costmodels.errors import InputError
from costmodels.memory.activations import activation_bytes
from costmodels.memory.peak import stage_memory
from costmodels.memory.unit_sizes import rank_parameters, unit_sizes
from costmodels.ranks.rank_layers import all_ranks, ranks_entry
from costmodels.spec.model import ModelSpec
from costmodels.spec.model_parts import LinearAttention
from costmodels.spec.table import LayoutTable


def on_ranks(model, table):
    return all_ranks(*ranks_entry(model, table, 0)).each(lambda held: held[None, :])


def memory_of(model, cluster, engine, layout):
    table = LayoutTable.of([layout])
    return stage_memory(cluster, engine, table, unit_sizes(model, engine, table), on_ranks(model, table))


@pytest.mark.parametrize("name", ["gpt", "llama", "mixture"])
@pytest.mark.parametrize("degrees", [{}, {"pp": 4}, {"pp": 2, "vpp": 2}])
def test_ranks_hold_the_parameters_of_the_model(name, degrees, request, engine, layout):
    model = request.getfixturevalue(name)
    table = LayoutTable.of([layout(model, m=4, **degrees)])
    shared, experts = rank_parameters(unit_sizes(model, engine("megatron"), table), on_ranks(model, table))
    copy = model.vocab * model.hidden if model.tied and degrees else 0
    assert (shared + experts).sum() == model.parameters + copy


def test_tensor_parallelism_splits_matrices_and_repeats_norms(llama, engine, layout):
    table = LayoutTable.of([layout(llama, tp=tp) for tp in (1, 8)])
    sizes = unit_sizes(llama, engine("megatron"), table)
    whole, part = sizes.dense_layer
    norms = 2 * llama.hidden
    assert part == (whole - norms) / 8 + norms


def test_expert_parallelism_divides_experts_only(mixture, engine, layout):
    table = LayoutTable.of([layout(mixture, dp=8, ep=ep) for ep in (1, 8)])
    sizes = unit_sizes(mixture, engine("megatron"), table)
    assert sizes.experts[0] == 8 * sizes.experts[1] == 16 * mixture.mlp_parameters(1024)
    assert sizes.moe_layer[0] == sizes.moe_layer[1] == mixture.shared_moe_layer_parameters


def gathered_by_zero3(model):
    """Parameters that are whole at the peak: two layers, the embedding and the head."""
    return model.parameters - (model.layers - 2) * model.dense_layer_parameters


def test_zero_divides_states_as_published(gpt, cluster, engine, layout):
    """2 + 2 + 12 bytes a parameter: table 1 of arXiv:1910.02054, with 64 data-parallel ranks."""
    policy = MemoryPolicy(parameters=2, gradients=2, optimizer=12)
    zero = engine("megatron", memory={"fp16": policy})
    expected = {0: 16, 1: 4 + 12 / 64, 2: 2 + 14 / 64, 3: 16 / 64}
    for stage, per_parameter in expected.items():
        found = memory_of(gpt, cluster(64), zero, layout(gpt, dp=64, zero=stage, m=4, precision="fp16"))
        states = (found["parameters"] + found["gradients"] + found["optimizer"])[0, 0]
        gathered = 4.0 * gathered_by_zero3(gpt) if stage == 3 else 0
        assert states - gathered == pytest.approx(per_parameter * gpt.parameters)


def test_an_engine_that_reduces_once_a_step_keeps_whole_gradients(gpt, cluster, engine, layout):
    # So few tokens that a step is fullest when all gradients are there.
    gpt = gpt.model_copy(update={"seq": 8})

    def gradients(name, **degrees):
        return memory_of(gpt, cluster(64), engine(name), layout(gpt, **degrees))["gradients"].max() / 4

    assert gradients("bundled", dp=8, zero=2, m=4) == gpt.parameters
    # In a single pass, FSDP2 frees a layer's copies as its gradients become a shard, which is less: a step is
    # fullest before (dry run: 715 MiB, closed form: 717 MiB). FSDP2 knows no ZeRO 1 without 2.
    assert gradients("bundled", dp=8, zero=2, m=1) == gradients("bundled", dp=8, zero=1, m=1) == 0
    # Megatron-LM's buffers stay.
    assert gradients("megatron", dp=8, zero=1, m=1) == gpt.parameters
    assert gradients("bundled", dp=8, zero=3, m=4) == gpt.parameters / 8
    assert gradients("megatron", dp=8, zero=2, m=4) == gpt.parameters / 8
    # A pipeline reduces after its last microbatch.
    assert gradients("megatron", dp=8, zero=3, m=4, pp=2) > gpt.parameters / 4


def test_fsdp2_keeps_its_shard_next_to_gathered_fp32_parameters(gpt, cluster, engine, layout):
    def held(**degrees):
        one = layout(gpt, precision="fp32", **degrees)
        return memory_of(gpt, cluster(8), engine("bundled"), one)["parameters"][0, 0] / gpt.parameters

    assert held() == 4
    assert held(dp=8, zero=0) == 4  # Copies that compute share its memory.
    assert held(dp=8, zero=1) == pytest.approx(4 + 4 / 8)


@pytest.mark.parametrize(("tp", "sp"), [(1, False), (8, False), (8, True)])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_activations_are_those_of_korthikanti(tp, sp, recompute, engine, layout):
    """Bytes of a GPT layer in 16 bits with dropout: table 2 of arXiv:2205.05198."""
    model = ModelSpec(name="22b", layers=48, hidden=6144, heads=64, vocab=51200, seq=2048)
    table = LayoutTable.of([layout(model, tp=tp, sp=sp, mbs=4, recompute=recompute, precision="fp16")])
    megatron = engine("megatron", attention_flash=False, activations_dropout=True)
    s, b, h, a = model.seq, 4, model.hidden, model.heads
    scores = 5 * a * s / h / tp if recompute == "none" else 0
    linear = 34 / tp if sp else 10 + 24 / tp
    per_token = 2 / (tp if sp else 1) if recompute == "full" else linear + scores
    assert unit_sizes(model, megatron, table).dense_activations[0] == pytest.approx(s * b * h * per_token)


def test_flash_attention_keeps_no_scores(llama, engine, layout):
    table = LayoutTable.of([layout(llama, tp=8, sp=True)])
    sizes = [unit_sizes(llama, engine("nemo", attention_flash=flash), table) for flash in (True, False)]
    flash, unfused = (size.dense_activations[0] for size in sizes)
    assert unfused - flash == llama.seq * llama.heads / 8 * (2 * llama.seq - 4)


def test_32_bit_activations_take_twice_the_bytes(gpt, engine, layout):
    narrow, wide = (
        unit_sizes(gpt, engine("bundled", attention_flash=False), LayoutTable.of([layout(gpt, precision=p)]))
        for p in ("bf16", "fp32")
    )
    assert wide.dense_activations[0] == 2 * narrow.dense_activations[0]


def test_a_gathered_input_that_is_kept_costs_the_whole_sequence(llama, engine, layout):
    table = LayoutTable.of([layout(llama, tp=8, sp=True)])
    again, kept = (
        unit_sizes(llama, engine("nemo", activations_regathers_sequence=flag), table).dense_activations[0]
        for flag in (True, False)
    )
    assert kept - again == 2 * 2 * llama.seq * llama.hidden * (1 - 1 / 8)


def test_recomputation_and_logits_count_at_the_peak(gpt, cluster, engine, layout):
    full = memory_of(gpt, cluster(8), engine("megatron"), layout(gpt, pp=4, m=8, recompute="full"))
    sizes = unit_sizes(gpt, engine("megatron"), LayoutTable.of([layout(gpt, recompute="none")]))
    layer_input = 2 * gpt.seq * gpt.hidden
    # Two layers a rank, pp - rank microbatches, and one layer whole while backward repeats it.
    expected = [2 * (4 - rank) * layer_input + sizes.dense_activations[0] - layer_input for rank in range(4)]
    assert full["activations"][0].tolist() == pytest.approx(expected)
    assert (full["logits"][0] > 0).tolist() == [False, False, False, True]
    # One fp32 copy, beside logits or their gradient in 16 bits.
    assert full["logits"][0, 3] == gpt.seq * gpt.vocab * 6 + 2 * layer_input


def test_overhead_counts_context_groups_and_fragmentation(gpt, cluster, engine, layout):
    quiet = engine("megatron", allocator_fragmentation=0.0, allocator_communicator_bytes=0.0)
    alone = memory_of(gpt, cluster(8), quiet, layout(gpt))
    assert alone["context"][0, 0] == cluster(8).device.context_bytes
    assert alone["communicators"].max() == alone["reserve"].max() == alone["margin"].max() == 0
    busy = quiet.with_constants({"allocator.communicator_bytes": 1e8, "allocator.fragmentation": 0.1})
    found = memory_of(gpt, cluster(8), busy, layout(gpt, tp=2, dp=4))
    dynamic = found["activations"][0, 0] + found["logits"][0, 0]
    assert found["communicators"][0, 0] == 2e8
    assert found["reserve"][0, 0] == pytest.approx(0.1 * dynamic)


def test_latent_attention_parameters_add_up(engine, layout):
    deepseek = ModelSpec(
        name="v2-lite",
        layers=27,
        hidden=2048,
        ffn=10944,
        heads=16,
        vocab=102400,
        seq=4096,
        gated=True,
        norm="rmsnorm",
        position="rope",
        tied=False,
        linear_bias=False,
        experts=64,
        top_k=6,
        expert_ffn=1408,
        shared_expert_ffn=2816,
        dense_layers=1,
        latent_attention=LatentAttention.model_validate(
            {
                "q_lora_rank": 0,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
            }
        ),
    )
    for bias in (False, True):
        model = ModelSpec.model_validate({**deepseek.model_dump(), "linear_bias": bias})
        table = LayoutTable.of([layout(model)])
        shared, experts = rank_parameters(
            unit_sizes(model, engine("megatron"), table), on_ranks(model, table)
        )
        assert shared[0, 0] + experts[0, 0] == model.parameters


def test_an_unknown_precision_is_named_with_the_known_ones(engine):
    with pytest.raises(InputError, match=r"precision fp8: engine nanotron .* use bf16, fp32$"):
        engine("nanotron").memory_policy("fp8")
    assert engine("nanotron").memory_policy("tf32") == engine("nanotron").memory_policy("fp32")
    assert np.isclose(engine("nanotron").memory_policy("bf16").gathered, 2)


def kept(model, engine, layout):
    return unit_sizes(model, engine, LayoutTable.of([layout])).dense_activations[0]


def test_each_module_that_is_recomputed_drops_its_own_bytes(llama, engine, layout):
    """A gated MLP has separate operators: gate, up, activated gate and product of 2 bytes each."""
    bundled = engine("bundled").with_constants({"activations.compiled": False})
    whole = kept(llama, bundled, layout(llama))
    token = llama.seq
    expected = {
        ("norm",): 2 * 2 * llama.hidden,
        ("activation",): 2 * 2 * llama.ffn,
        ("mlp",): 4 * 2 * llama.ffn,
        ("mlp", "activation"): 4 * 2 * llama.ffn,
        ("core_attention",): 4 * llama.heads,
        ("core_attention", "norm"): 4 * llama.heads + 2 * 2 * llama.hidden,
    }
    for modules, per_token in expected.items():
        one = layout(llama, recompute="selective", recompute_modules=modules)
        assert whole - kept(llama, bundled, one) == token * per_token


def test_uniform_chunks_and_blocks_of_layers_add_up(gpt, cluster, engine, layout):
    plain = engine("megatron", allocator_fragmentation=0.0)
    layer_input = 2 * gpt.seq * gpt.hidden
    whole = kept(gpt, plain, layout(gpt))

    def activations(**fields):
        return memory_of(gpt, cluster(8), plain, layout(gpt, **fields))["activations"][0, 0]

    full = {"recompute": "full"}
    assert activations(**full) == 8 * layer_input + whole - layer_input
    # Two inputs, and four layers while backward repeats them.
    assert activations(**full, recompute_num_layers=4) == 2 * layer_input + 4 * whole - layer_input
    block = {"recompute_method": "block", "recompute_num_layers": 3}
    # The last five layers go backward first, and have gone when the first three recompute.
    assert activations(**full, **block) == 3 * layer_input + 5 * whole
    block["recompute_num_layers"] = 7
    assert activations(**full, **block) == 7 * layer_input + whole
    assert activations(**full, recompute_method="block", recompute_num_layers=8) == activations(**full)


def test_copies_of_the_shards_hold_more(gpt, cluster, engine, layout):
    states = [
        memory_of(gpt, cluster(64), engine("megatron"), layout(gpt, dp=64, zero=1, zero_replicas=n))
        for n in (1, 8)
    ]
    assert 8 * states[0]["optimizer"][0, 0] == states[1]["optimizer"][0, 0]


def test_offloading_empties_the_device(gpt, cluster, engine, layout):
    usual, away = (
        memory_of(
            gpt,
            cluster(8),
            engine("bundled"),
            layout(gpt, m=2, offload_activations=flag, offload_optimizer=flag),
        )
        for flag in (False, True)
    )
    assert away["optimizer"].max() == 0 < usual["optimizer"].max()
    # Input, queries, keys, values and output leave, but for those of two layers.
    assert usual["activations"][0, 0] - away["activations"][0, 0] == (8 - 2) * 2 * gpt.seq * 5 * gpt.hidden


def test_gradients_that_are_reduced_in_bf16_are_kept_in_bf16(gpt, cluster, engine, layout):
    def gradients(name, **fields):
        one = layout(gpt, **{"dp": 8, "m": 4, "gradient_reduction": "bf16", **fields})
        return memory_of(gpt, cluster(8), engine(name), one)["gradients"].max() / gpt.parameters

    assert gradients("bundled", gradient_reduction="fp32") == 4
    # FSDP2 frees the sums of a layer as it makes their fp32 shard.
    assert gradients("bundled", zero=1) == 2
    assert gradients("bundled", zero=0) == 4
    assert gradients("bundled", dp=1, precision="fp32") == 4
    # Megatron-LM's optimizer copies its shard, and the buffer stays.
    assert gradients("megatron", zero=1) == 2 + 4 / 8
    assert gradients("bundled", zero=3) == 4 / 8


def test_an_offloaded_optimizer_takes_its_shards_along(gpt, cluster, engine, layout):
    def states(name, **fields):
        one = layout(gpt, dp=8, offload_optimizer=True, **{"m": 4, **fields})
        found = memory_of(gpt, cluster(8), engine(name), one)
        return [found[part][0, 0] / gpt.parameters for part in ("parameters", "gradients", "optimizer")]

    # fp32: the gathered copy and the sums, no shard of 4 / 8.
    assert states("bundled", zero=1, precision="fp32") == [4, 4, 0]
    assert states("bundled", zero=3) == pytest.approx([2 * gathered_by_zero3(gpt) / gpt.parameters, 0, 0])
    assert states("megatron", zero=1) == [2, 4, 0]


def test_one_layer_in_flight_is_no_fuller_for_offloading(gpt, cluster, engine, layout):
    def activations(rank, flag):
        one = layout(gpt, pp=8, m=16, offload_activations=flag)
        return memory_of(gpt, cluster(8), engine("bundled"), one)["activations"][0, rank]

    moved = 2 * gpt.seq * 5 * gpt.hidden
    # One layer a rank: alive for 8 microbatches on the first and for one on the last.
    assert activations(0, False) - activations(0, True) == 6 * moved
    assert activations(6, False) == activations(6, True)
    assert activations(7, False) == activations(7, True)


def test_context_parallel_forms_keep_their_copies(llama, engine, layout):
    forms = {
        form: kept(llama, engine("bundled"), layout(llama, cp=4, cp_form=form))
        for form in ("ring", "all_gather", "all_to_all")
    }
    own = 2 * llama.seq / 4
    # Keys and values of the other ranks, and the results of two chunks of queries besides the joined one.
    assert forms["all_gather"] - forms["ring"] == own * (
        3 * 2 * llama.kv_heads * llama.head_dim + llama.q_size
    )
    assert forms["all_to_all"] - forms["ring"] == own * llama.q_size
    repeated = kept(llama, engine("bundled"), layout(llama, cp=16, cp_form="all_to_all"))
    ring = kept(llama, engine("bundled"), layout(llama, cp=16, cp_form="ring"))
    # Two copies of each of 8 heads.
    assert repeated - ring == own / 4 * (llama.q_size + 2 * llama.kv_heads * llama.head_dim)


def test_split_backward_keeps_gradients_until_those_of_weights(llama, cluster, engine, layout):
    usual, apart = (
        memory_of(llama, cluster(64), engine("bundled"), layout(llama, pp=4, vpp=2, m=16, schedule=schedule))
        for schedule in ("interleaved", "interleaved_zb")
    )
    assert apart["activations"][0, 3] > usual["activations"][0, 3]
    # Every rank holds as many microbatches as there are ranks, and the last one most of those gradients.
    assert (np.diff(apart["activations"][0]) > 0).all()
    matrix, tokens = 2 * llama.hidden * llama.vocab, 2 * llama.seq * llama.hidden
    # Four microbatches have come to the head: gradients of its matrix and of its input wait, beside what its
    # norm took. Of the last one all but the former has gone, as with whole backward passes.
    assert usual["logits"][0, 3] == matrix
    assert apart["logits"][0, 3] == 4 * matrix + 3 * tokens


def test_norms_of_queries_and_keys_keep_their_inputs(llama, engine, layout):
    normed = ModelSpec.model_validate({**llama.model_dump(), "qk_norm": True})
    more = kept(normed, engine("bundled"), layout(normed)) - kept(llama, engine("bundled"), layout(llama))
    assert more == 2 * llama.seq * (llama.q_size + llama.kv_heads * llama.head_dim)


def test_latent_attention_keeps_what_is_compressed_twice(llama, engine, layout):
    """Before the latents' norms and after them, besides what plain attention of its widths keeps."""
    sizes = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 192}
    plain = {**llama.model_dump(), "kv_heads": 64, "head_dim": 192}
    without = ModelSpec.model_validate(plain)
    for rank in (0, 1536):
        model = ModelSpec.model_validate({**plain, "latent_attention": {"q_lora_rank": rank, **sizes}})
        found = kept(model, engine("bundled"), layout(model)) - kept(
            without, engine("bundled"), layout(without)
        )
        assert found == 2 * 2 * llama.seq * (rank + 512 + 64)


def test_recomputed_norms_save_what_is_gathered_of_them(llama, engine, layout):
    """Compiled layers gather again too."""
    norms = {"recompute": "selective", "recompute_modules": ("norm",)}

    def saved(compiles, **degrees):
        by = engine("bundled").with_constants({"activations.compiled": compiles})
        return kept(llama, by, layout(llama, **degrees)) - kept(llama, by, layout(llama, **degrees, **norms))

    token = 2 * llama.seq * llama.hidden
    assert saved(True, tp=2, sp=True, dp=4) == saved(False, tp=2, sp=True, dp=4) == 2 * token
    assert saved(True, dp=8) == saved(False, dp=8) == 2 * token


def test_linear_attention_in_plain_operators_keeps_its_chunks_unless_they_are_computed_again(
    llama, engine, layout
):
    sizes = LinearAttention(kind="gated_delta", key_heads=2, value_heads=4, key_dim=16, value_dim=8, chunk=32)
    model = llama.with_attention("linear").model_copy(update={"linear_attention": sizes})
    bundled, other = engine("bundled"), engine("megatron")
    eager = bundled.with_constants({"activations.compiled": False})
    words = (
        {"recompute": "none"},
        {"recompute": "selective", "recompute_modules": ("core_attention",)},
    )
    tables = [LayoutTable.of([layout(model, **fields)]) for fields in words]
    (whole, again), (compiled, compiled_again), (fused, _) = (
        [activation_bytes(model, one, table, "dense")[0][0] for table in tables]
        for one in (eager, bundled, other)
    )
    # Rows in fp32 of each head of values: keys, values, products of a chunk; and the state before the chunk.
    # Two heads of values share one of keys: queries, keys and both products count half.
    rows = 6 * 16 + 2 * 8 + 6 * 32 + 16 * 8 / 32
    assert whole - again == pytest.approx(4 * model.seq * 4 * rows)
    # Compiled, vectors before they have length one (half of two) and what makes products (two) are not kept.
    assert compiled - compiled_again == pytest.approx(4 * model.seq * 4 * (rows - 16 - 2 * 32))
    assert fused < whole


def test_gradients_come_as_activations_go(gpt, cluster, engine, layout):
    """All activations are there without gradients, or, from the second microbatch on, with all of them."""

    def parts(name, **degrees):
        memory = memory_of(gpt, cluster(64), engine(name), layout(gpt, **degrees))
        return memory["activations"][0, 0], memory["gradients"][0, 0] / 4

    whole, none = parts("bundled", dp=8, zero=1, m=1, mbs=16)
    assert none == 0
    assert parts("bundled", dp=8, zero=1, m=2, mbs=16) == (whole, gpt.parameters)
    # Megatron-LM's buffers are there all the time.
    assert parts("megatron", dp=8, zero=1, m=1, mbs=16)[1] == gpt.parameters
    # All four microbatches of the first of four stages are forward before the first goes backward.
    few, many = (parts("bundled", pp=4, dp=2, zero=1, m=m, mbs=16) for m in (4, 5))
    assert few[0] == many[0] > 0 == few[1]
    assert many[1] > gpt.parameters / 4


def test_a_rank_of_many_stages_holds_parameters_of_three(gpt, cluster, engine, layout):
    def parameters(zero):
        one = layout(gpt, pp=2, vpp=4, dp=4, zero=zero, m=8)
        return memory_of(gpt, cluster(8), engine("bundled"), one)["parameters"][0, 0]

    # Four stages of one layer each: gathered parameters have 2 bytes.
    assert parameters(0) - parameters(1) == 2 * (12 * gpt.hidden**2 + 13 * gpt.hidden)
