"""Rows of published measurements as inputs of the cost model: what is read, derived and refused."""

import csv

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from benchmarks.calibration.measurements import NO_TABLE, measurement_of, read_measurements, source_notes
from benchmarks.calibration.predictions import predict
from benchmarks.calibration.published_cells import Unusable
from benchmarks.calibration.published_devices import published_device
from benchmarks.calibration.published_splits import stages_by_cost
from benchmarks.calibration.scores import score
from costmodels.errors import InputError
from costmodels.layers.expert_load import load_of_layout
from tests.support import ROOT

MEASURED = ROOT.parent / "shared" / "measured"

ROW = {
    "source_id": "nvidia_dgxc",
    "source_ref": "a table",
    "model_name": "llama-of-ours",
    "layers": "16",
    "hidden": "2048",
    "ffn": "8192",
    "heads": "32",
    "kv_heads": "8",
    "vocab": "32000",
    "seq": "4096",
    "moe_experts": "",
    "topk": "",
    "gpu": "H100-80GB-SXM",
    "gpus": "32",
    "gpus_per_node": "8",
    "tp": "2",
    "pp": "4",
    "vpp": "2",
    "dp": "4",
    "cp": "1",
    "ep": "",
    "sp": "1",
    "mbs": "1",
    "gbs": "64",
    "recompute": "selective",
    "zero_stage": "1",
    "precision": "bf16",
    "flash": "1",
    "step_time_s": "2.5",
    "step_time_derived_s": "",
    "tokens_per_s_per_gpu": "",
    "peak_mem_gib": "",
    "peak_reserved_gib": "",
    "oom": "0",
    "mem_kind": "",
    "row_status": "ok",
    "sweep_id": "one",
    "notes": "",
}
"""A row that lacks nothing."""


def of(**cells):
    """The measurement of the usual row with other cells."""
    return measurement_of({**ROW, **cells})


def refused(**cells):
    """The reason why the usual row with other cells is skipped."""
    with pytest.raises(Unusable) as reason:
        of(**cells)
    return str(reason.value)


def written(path, rows, columns=tuple(ROW)):
    """A CSV file of the usual row with other cells."""
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, columns, extrasaction="ignore")
        table.writeheader()
        table.writerows({**ROW, **row} for row in rows)
    return path


def test_a_row_becomes_model_cluster_engine_and_layout():
    row = of()
    assert (row.source, row.sweep, row.reference) == ("nvidia_dgxc", "one", "a table")
    assert (row.model.layers, row.model.kv_heads, row.model.seq, row.model.gated) == (16, 8, 4096, True)
    assert (row.cluster.device.name, row.cluster.world_size, row.cluster.nodes) == ("h100", 32, 4)
    assert row.engine.name == "nemo"
    (layout,) = row.layouts
    assert layout.describe() == "tp=2+sp pp=4 vpp=2 dp=4 zero=1 mbs=1 x 16 recompute=selective"
    assert layout.schedule == "interleaved"
    assert (row.step_time_s, row.oom) == (2.5, False)
    assert (row.allocated_bytes, row.reserved_bytes) == (None, None)


@pytest.mark.parametrize(
    ("text", "precision"),
    [("bf16", "bf16"), ("BF16", "bf16"), ("amp_bf16", "bf16"), ("fp16", "fp16"), ("amp_fp8", "fp8")]
    + [(text, "fp8") for text in ("FP8", "MXFP8", "FP8-CS", "FP8-CS (FP8-MX)", "fp8 blockwise/MXFP8")],
)
def test_spellings_of_precisions(text, precision):
    # An engine that trains in all of them is not needed to read a row.
    assert of(precision=text).layouts[0].precision == precision


@pytest.mark.parametrize(
    ("text", "stage", "replicas"),
    [
        ("0", 0, 1),
        ("1", 1, 1),
        ("1(distributed optimizer)", 1, 1),
        ("1(dist-opt)", 1, 1),
        ("fsdp_grad_op(2)", 2, 1),
        ("fsdp_full(3)", 3, 1),
        ("3(FSDP)", 3, 1),
        ("3(FSDP2)", 3, 1),
        ("fsdp", 3, 1),
        ("fsdp(fsdp=2)", 3, 2),
    ],
)
def test_spellings_of_zero(text, stage, replicas):
    layout = of(zero_stage=text).layouts[0]
    assert (layout.zero_stage, layout.zero_replicas) == (stage, replicas)


def test_zero_has_nothing_to_split_over_one_rank():
    assert of(gpus="8", dp="1", gbs="16", zero_stage="1").layouts[0].zero_stage == 0


@pytest.mark.parametrize(
    ("column", "reason"),
    [(name, f"{name} not published") for name in ("layers", "hidden", "ffn", "heads", "seq")]
    + [(name, f"{name} not published") for name in ("gpu", "gpus", "tp", "pp", "gbs")]
    + [("step_time_s", "no step time and no throughput")],
)
def test_blanks_are_skipped_under_their_name(column, reason):
    assert refused(**{column: ""}) == reason
    # A missing column is a blank one.
    with pytest.raises(Unusable, match=f"^{reason}$"):
        measurement_of({name: text for name, text in ROW.items() if name != column})


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        ({"source_id": "elsewhere"}, "source unknown: no engine"),
        ({"row_status": "config_uncertain"}, "row_status config_uncertain"),
        ({"gpu": "TPU v9"}, "gpu unknown"),
        ({"model_name": "mamba-3b"}, "layers other than equal attention and MLP"),
        ({"model_name": "unheard-of", "ffn": ""}, "architecture unknown, and ffn not published"),
        ({"precision": "mxfp4"}, "precision mxfp4 not modelled"),
        ({"layers": "many"}, "layers is no number"),
        ({"tp": "two"}, "tp is no number"),
        ({"dp": "2"}, "tp x pp x cp x dp is not gpus"),
        ({"engine": "of-nobody"}, "engine of-nobody unknown"),
        ({"layers": "7"}, "more stages than layers"),
        ({"gpus": "36", "dp": "4.5"}, "gpus is no multiple of gpus_per_node"),
        ({"recompute": "sometimes"}, "recompute of a kind not modelled"),
    ],
)
def test_what_cannot_be_priced_is_skipped_under_a_name(cells, reason):
    assert refused(**cells) == reason


@pytest.mark.parametrize(
    ("cells", "column", "values"),
    [
        ({"vpp": ""}, "virtual_pipeline_parallel", {1, 2, 4}),
        ({"vpp": "", "pp": "1", "dp": "16"}, "virtual_pipeline_parallel", {1}),
        ({"mbs": ""}, "micro_batch_size", {1, 2}),
        ({"recompute": ""}, "recompute", {"none", "selective"}),
        ({"sp": ""}, "sequence_parallel", {True}),
        ({"sp": "", "tp": "1", "dp": "8"}, "sequence_parallel", {False}),
        ({"zero_stage": ""}, "zero_stage", {1}),
        ({"precision": ""}, "precision", {"bf16"}),
        ({"cp": "", "dp": ""}, "context_parallel", {1}),
        ({"gpus_per_node": "", "row_status": ""}, "data_parallel", {4}),
    ],
)
def test_blanks_are_all_that_users_of_the_engine_commonly_choose(cells, column, values):
    assert {getattr(layout, column) for layout in of(**cells).layouts} == values


def test_a_cell_lists_the_modules_that_are_recomputed():
    (layout,) = of(recompute="norm+core_attn+mlp").layouts
    assert set(layout.recompute_modules) == {"norm", "core_attention", "mlp"}
    with pytest.raises(Unusable, match="recompute of a kind not modelled"):
        of(recompute="norm+router")


@pytest.mark.parametrize(("cell", "layers"), [("full", None), ("full/block/1", 1), ("full/block/2", None)])
def test_recomputation_stops_after_the_first_layers_of_a_stage(cell, layers):
    """Stages of the usual row hold two layers."""
    (layout,) = of(recompute=cell).layouts
    assert layout.recompute == "full"
    limited = layout.recompute_num_layers if layout.recompute_method == "block" else None
    assert limited == layers


def test_recomputation_of_no_layers_is_refused():
    assert refused(recompute="full/block/0") == "recompute of a kind not modelled"


def test_the_script_of_a_row_says_more_than_its_column():
    """MindSpeed's script of LLaMA-13B recomputes 3, 2 and 1 layers of the first three stages."""
    cells = {**ROW, "source_id": "mindspeed_llm", "gpu": "Ascend 910B", "recompute": "full", "layers": "64"}
    for reference, expected in (("README at 866ffe6c", "full/block:3"), ("README at f33da62b", "full")):
        row = measurement_of({**cells, "model_name": "LLaMA-13B", "source_ref": reference})
        assert row.layouts[0].describe_recompute() == expected


@pytest.mark.parametrize(
    ("notes", "modules"),
    [
        ("no CUDA graphs; moe_act+layernorm; DP overlap", ("activation", "norm")),
        ("moe+layernorm", ("mlp", "norm")),
        ("recompute=norm+act; layernorm+moe", ("activation", "norm")),  # what is named comes first
        ("moe_dev + 1F1B all-to-all overlap; norm", ("core_attention",)),  # no list of modules
    ],
)
def test_notes_list_the_modules_of_selective_recomputation(notes, modules):
    (layout,) = of(recompute="selective", notes=notes).layouts
    assert layout.recompute_modules == modules


def test_what_was_taken_for_a_blank_is_told():
    row = of(vpp="", flash="", mbs="")
    assert not row.certain
    assert row.taken == ("vpp 1, 2, 4, 8", "mbs 1, 2", "flash 1")
    # Some of Megatron's users on A100 had flash attention, others had not.
    both = of(source_id="korthikanti22", gpu="A100", flash="")
    assert both.certain  # The authors had none.
    both = of(source_id="elsewhere", engine="megatron", gpu="A100", flash="")
    assert {engine.attention.flash for engine in (both.engine, *both.other_engines)} == {False, True}


def test_blanks_are_priced_between_the_choices_never_at_the_fastest():
    blank, *known = (of(vpp=vpp) for vpp in ("", "1", "2", "4"))
    seconds = predict([blank, *known]).step_time_s
    assert min(seconds[1:]) < seconds[0] < max(seconds[1:])
    assert predict([blank]).spread[0] > max(predict(known).spread)


def test_any_source_has_the_engine_that_is_said():
    assert of(source_id="elsewhere", engine="megatron").engine.name == "megatron"
    assert measurement_of({**ROW, "source_id": "elsewhere"}, engine="torchtitan").engine.name == "torchtitan"
    assert of(source_id="elsewhere", notes="NeMo 25.04").engine.name == "nemo"
    # More rows of a known source.
    assert of(source_id="nvidia_dgxc_2027").engine.name == "nemo"


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("H100-80GB-SXM", "h100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("GH200-96GB", "gh200"),
        ("Ascend910B", "ascend-910b"),
        ("Ascend 910B (Atlas 900 A2 PODc)", "ascend-910b"),
        ("NVIDIA A100-SXM4-40GB", "a100-40g"),
        ("A100-PCIE-40GB", "a100-pcie-40g"),
        ("8xH100", "h100"),
        ("DGX GB200 NVL72", "gb200"),
        ("B200 (178 GiB)", "b200"),
        ("MI355X?", "mi355x"),
    ],
)
def test_spellings_of_devices(text, device):
    assert published_device(text, {}).name == device


def test_devices_and_models_may_be_given_inline():
    row = of(gpu="{like: h100, memory_bandwidth: 2.4e+12}", model_name="{like: llama3-8b, layers: 16}")
    assert row.cluster.device.memory_bandwidth == 2.4e12
    assert (row.model.layers, row.model.hidden, row.model.seq) == (16, 4096, 4096)
    assert of(gpu="A100-64GB").cluster.memory_bytes == 64 * 2.0**30
    assert refused(gpu="{like: h100, memory_bandwidth: much}").startswith("gpu: memory_bandwidth:")
    assert refused(gpu="{: }") == "gpu is not valid YAML"
    assert refused(model_name="{like: no-model}").startswith("model not known")


def test_a_model_of_the_catalogue_fills_its_blank_sizes():
    row = of(model_name="Llama3.1_8B SFT", layers="", hidden="", ffn="", heads="", kv_heads="", vocab="")
    assert (row.model.layers, row.model.hidden, row.model.vocab) == (32, 4096, 128256)


def test_illegal_layouts_share_a_reason_whatever_their_numbers():
    assert refused(gbs="63") == refused(gbs="65")
    assert refused(gbs="63").startswith("layout not legal: global_batch_size #")


def test_of_dp_and_cp_one_follows_from_the_other():
    assert of(dp="").layouts[0].data_parallel == 4
    assert of(cp="", dp="2").layouts[0].context_parallel == 2


def test_step_times_follow_from_throughput():
    derived = {"step_time_s": "", "tokens_per_s_per_gpu": "1024"}
    assert of(**derived).step_time_s == pytest.approx(64 * 4096 / (1024 * 32))
    assert of(**derived, step_time_derived_s="3").step_time_s == 3


def test_rows_out_of_memory_need_no_step_time():
    for cells in ({"row_status": "oom"}, {"oom": "1"}):
        row = of(**cells, step_time_s="")
        assert (row.oom, row.step_time_s) == (True, None)


def test_what_kind_of_memory_was_measured():
    gib = 2.0**30
    both = of(peak_mem_gib="40", peak_reserved_gib="44", mem_kind="torch max_allocated; reserved separately")
    assert (both.allocated_bytes, both.reserved_bytes) == (40 * gib, 44 * gib)
    first = of(peak_mem_gib="40", mem_kind="rank0 torch RESERVED high-water mark (first pipeline stage only)")
    assert (first.allocated_bytes, first.reserved_bytes, first.first_rank_only) == (None, 40 * gib, True)
    whole = of(peak_mem_gib="40", mem_kind="nvidia-smi GB")
    assert (whole.allocated_bytes, whole.reserved_bytes, whole.first_rank_only) == (None, None, False)


def test_a_row_may_tell_of_its_memory_alone():
    gib = 2.0**30
    tools = {"mem_kind": "device memory by the comment of the script, GiB", "peak_mem_gib": "60"}
    row = of(**tools, row_status="memory_only", step_time_s="9.6")
    assert (row.device_bytes, row.step_time_s, row.oom) == (60 * gib, None, False)
    assert of(**tools, step_time_s="").step_time_s is None
    assert refused(row_status="memory_only") == "row_status memory_only, and no peak of memory"
    assert refused(**tools, row_status="memory_only", notes="SFT; not packed").startswith(
        "samples not packed"
    )
    assert refused(step_time_s="") == "no step time and no throughput"


def test_the_rank_and_the_unit_of_a_peak_are_known():
    last = of(peak_mem_gib="2", mem_kind="torch max_memory_allocated on the logging rank (last rank)")
    assert (last.last_rank_only, last.first_rank_only, last.allocated_bytes) == (True, False, 2.0**31)
    decimal = of(peak_mem_gib="30", source_id="zero_bubble", sp="0", flash="0", notes="schedule=1F1B-I")
    assert decimal.allocated_bytes == 30e9


def test_notes_name_the_engine_before_other_software():
    notes = "engine=Megatron-SWIFT; the same job under DeepSpeed ZeRO-3: 91.2 s; optimizer on the host"
    row = of(source_id="swift", notes=notes, optimizer="Adam on CPU")
    assert row.engine.name == "megatron"
    assert row.layouts[0].offload_optimizer and row.layouts[0].optimizer == "adam"


def test_notes_of_flags_say_what_the_model_is():
    notes = "swiglu=True; untie-embeddings-and-output-weights=True; attention-backend=unfused"
    row = of(source_id="megatron_golden", model_name="gpt/own", kv_heads="32", ffn="16384", notes=notes)
    assert (row.model.gated, row.model.tied, row.engine.attention.flash) == (True, False, False)


def test_the_bandwidth_of_the_jobs_own_nodes_is_taken_from_the_notes():
    nanotron = {"source_id": "hf_ultrascale"}
    row = of(**nanotron, notes="x; collective busbw GB/s on job nodes AR/AG/RS=425.3/241.3/241.7; y")
    assert [seen.collective for seen in row.cluster.measured] == [
        "all_reduce",
        "all_gather",
        "reduce_scatter",
    ]
    assert {(seen.devices, seen.nodes) for seen in row.cluster.measured} == {(32, 4)}
    assert row.cluster.measured[0].bus_bandwidth == pytest.approx(425.3e9)
    assert of(**nanotron, notes="AR/AG/RS=0/0/0").cluster.measured == ()
    assert of(**nanotron).cluster.measured == ()
    assert of(notes="AR/AG/RS=425.3/241.3/241.7").cluster.measured == ()


def test_releases_of_a_source_differ_on_the_devices_that_they_were_for():
    def fused(release, gpu, source="nemo_megatron_bridge"):
        row = of(source_id=source, gpu=gpu, notes=f"release={release} NeMo Container")
        return row.engine.for_device(row.cluster.device).experts.fused

    assert fused("26.06", "GB200") and fused("26.08", "B300")
    assert not fused("26.04.01", "GB200")
    assert not fused("26.06", "H100")
    assert not fused("26.06", "GB200", "nvidia_dgxc")


def test_modules_that_predict_further_tokens_are_trained_where_the_notes_say_so():
    blank = dict.fromkeys(("layers", "hidden", "ffn", "heads", "kv_heads", "vocab"), "")
    plain, further = (
        of(model_name="DeepSeek-V3", notes=notes, ep="8", **blank).model
        for notes in ("w/o MTP", "natural routing, MTP layer")
    )
    assert plain.mtp_depths == 0
    assert further.mtp_depths == 1


def test_natural_routing_is_uneven():
    def load(**cells):
        row = of(moe_experts="8", topk="2", ep="8", **cells)
        return load_of_layout(row.model, row.engine, row.layouts[0])

    assert load(notes="natural routing on C4") > load(notes="forced balance") == load() == 1


@pytest.mark.parametrize(
    ("source", "notes"),
    [
        ("flagperf", "engine=megatron-core 0.6.0; TE; one-node ablation"),
        ("xtuner_moe", "Pai-Megatron-Patch; forced expert balance; no DP overlap"),
    ],
)
def test_gradients_are_reduced_after_the_passes_where_scripts_and_notes_say_so(source, notes):
    row = measurement_of({**ROW, "source_id": source, "notes": notes})
    assert row.engine.for_device(row.cluster.device).overlap.data_parallel == 0
    other = measurement_of({**ROW, "source_id": source, "notes": "engine=megatron; DP overlap"})
    assert other.engine.for_device(other.cluster.device).overlap.data_parallel > 0.5


def test_alibi_is_added_to_the_scores_by_kernels_of_their_own():
    """Scores pass memory 4 times in a forward pass: baddbmm copies and reads 2 times more, ModelLink 7."""
    ascend = {"source_id": "mindspeed_llm", "gpu": "Ascend 910B"}
    passes = {}
    for cells in (
        {"source_id": "bigscience_176b", "model_name": "BLOOM-176B"},
        {**ascend, "model_name": "Baichuan2-13B"},
        {**ascend, "model_name": "LLaMA-7B"},
    ):
        row = measurement_of({**ROW, "flash": "0", **cells})
        passes[row.model.name] = row.engine.for_device(row.cluster.device).attention.score_passes
    assert passes == {"BLOOM-176B": 6, "Baichuan2-13B": 11, "LLaMA-7B": 4}


def test_words_of_rows_switch_what_the_engine_did():
    def engine(**cells):
        row = of(source_id="torchtitan", **cells)
        return row.engine.for_device(row.cluster.device)

    plain = engine()
    for word in ("+AsyncTP", "bf16 Async TP"):
        assert engine(notes=word).overlap.tensor_parallel > plain.overlap.tensor_parallel == 0
    for cells in ({"notes": "float8 rowwise"}, {"precision": "fp8 rowwise"}):
        assert engine(**cells).gemm.fp8_efficiency < plain.gemm.fp8_efficiency
    # The products of other devices were not seen with one scale for each row.
    other = engine(gpu="MI300X")
    assert engine(gpu="MI300X", notes="rowwise").gemm.fp8_efficiency == other.gemm.fp8_efficiency
    drops = of(notes="token-drop capacity factor 1").engine.for_device(of().cluster.device)
    assert drops.host.routing < of().engine.for_device(of().cluster.device).host.routing


@pytest.mark.parametrize(
    ("method", "zero", "ep", "expected"),
    [
        ("FSDP", "3(FSDP)", "", (1, 2)),
        ("FSDP + EP", "3(FSDP)", "", (8, 2)),
        ("MCore", "1", "4", (4, 2)),
        ("MCore w/ Folding", "1", "4", (4, 1)),
    ],
)
def test_methods_named_by_their_parallelism_tell_how_experts_are_split(method, zero, ep, expected):
    row = of(
        source_id="moe_parallel_folding",
        moe_experts="8",
        topk="2",
        pp="1",
        vpp="1",
        dp="16",
        ep=ep,
        zero_stage=zero,
        recompute="none",
        notes=f"method={method}; ETP=not printed (=TP for non-folding); token-drop",
    )
    layout = row.layouts[0]
    assert (layout.expert_parallel, layout.expert_tensor_parallel) == expected


def test_vtrains_own_sweeps_of_all_reduces_are_its_links():
    row = of(source_id="vtrain_multi", gpu="A100", precision="", flash="", sp="", zero_stage="")
    assert {seen.devices: seen.bus_bandwidth for seen in row.cluster.measured}[8] == pytest.approx(231e9)
    assert {seen.nodes for seen in row.cluster.measured} == {1}


def test_nanotron_splits_by_cost():
    nanotron = {"source_id": "hf_ultrascale", "ffn": "8192", "vocab": "131072", "kv_heads": "32"}
    row = of(**nanotron, gpus="16", tp="1", sp="0", pp="8", vpp="1", dp="2", gbs="256")
    assert row.engine.name == "nanotron"
    assert row.layouts[0].layers_per_stage == (3, 2, 3, 2, 3, 2, 0, 1)


@given(layers=st.integers(1, 40), stages=st.integers(1, 12), vocab=st.integers(1, 10**6))
def test_splits_by_cost_keep_all_layers(layers, stages, vocab):
    model = of(layers=str(max(layers, 8)), vocab=str(vocab)).model
    split = stages_by_cost(model, min(stages, model.layers))
    assert len(split) == min(stages, model.layers)
    assert sum(split) == model.layers
    assert min(split) >= 0


def test_a_source_may_say_what_its_authors_chose_among():
    tuned = {"source_id": "moe_parallel_folding", "model_name": "mixtral", "moe_experts": "8", "topk": "2"}
    tuned |= {"ep": "4", "sp": "", "vpp": "", "mbs": "", "notes": "ETP=1"}
    row = of(**tuned, recompute="")
    assert {layout.recompute for layout in row.layouts} == {"none", "selective", "full"}
    assert {layout.virtual_pipeline_parallel for layout in row.layouts} == {2, 4}
    assert {layout.micro_batch_size for layout in row.layouts} == {1}
    assert {layout.expert_tensor_parallel for layout in row.layouts} == {1}
    assert {layout.recompute for layout in of(**tuned, recompute="full").layouts} == {"full"}


def test_sources_fill_what_they_leave_blank(tmp_path):
    row = {"source_id": "vtrain_single", "model_name": "GPT-3.6B", "gpu": "A100", "vpp": "1"}
    blank = of(**row, precision="", flash="", sp="", zero_stage="")
    assert (blank.layouts[0].precision, blank.layouts[0].sequence_parallel) == ("fp16", False)
    assert not blank.engine.attention.flash
    assert of(**row, precision="bf16", flash="", sp="", zero_stage="").layouts[0].precision == "bf16"


def test_engines_devices_and_models_of_the_catalogue_exist():
    for name, source in source_notes()["sources"].items():
        cells = {"source_id": name, "precision": "fp16", "model_name": "GPT"}
        if "kernels" not in source:
            assert of(**cells).engine.name == source["engine"]
    for gpu in source_notes()["gpus"]:
        assert of(gpu=gpu).cluster.device.memory_bytes > 0


def test_a_file_is_read_with_its_lines_and_reasons(tmp_path):
    rows = [{}, {"tp": ""}, {"source_id": ""}, {"tp": "", "source_id": " nvidia_dgxc "}, {"notes": "a\nb"}]
    usable, skipped = read_measurements(written(tmp_path / "rows.csv", rows))
    assert [row.line for row in usable] == [2, 7]
    assert [(row.source, row.reason, row.line) for row in skipped] == [
        ("nvidia_dgxc", "tp not published", 3),
        ("unnamed", "source unknown: no engine", 4),
        ("nvidia_dgxc", "tp not published", 5),
    ]
    assert {row.file for row in skipped} == {"rows.csv"}


def test_missing_columns_are_blanks_and_an_empty_file_has_no_rows(tmp_path):
    few = written(tmp_path / "few.csv", [{}, {}], columns=("source_id", "tp"))
    usable, skipped = read_measurements(few)
    assert (usable, {row.reason for row in skipped}) == ([], {"seq not published"})
    empty = tmp_path / "empty.csv"
    for text in ("", ",".join(ROW), "\n"):
        empty.write_text(text)
        assert read_measurements(empty) == ([], [])


def test_short_and_long_lines_are_no_error(tmp_path):
    file = tmp_path / "ragged.csv"
    file.write_text(",".join(ROW) + "\nnvidia_dgxc\n" + ",".join(ROW.values()) + ",more,and more\n")
    usable, skipped = read_measurements(file)
    assert (len(usable), len(skipped)) == (1, 1)


def test_what_is_no_table_of_measurements_is_named_and_skipped(tmp_path):
    file = tmp_path / "odd.csv"
    for content in (b"{}\n1\n", b"a,b\n1,2\n"):
        file.write_bytes(content)
        assert read_measurements(file) == ([], [("odd.csv", NO_TABLE, "odd.csv", 1)])
    file.write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(InputError, match=r"odd\.csv") as error:
        read_measurements(file)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read_are_one_line(tmp_path):
    for path in (tmp_path, tmp_path / "missing.csv"):
        with pytest.raises(InputError, match="cannot read"):
            read_measurements(path)


ODD = (
    *(
        "1e9",
        "1e300",
        "99999999999999999999",
        "0",
        "-1",
        "1.5",
        "3",
        "7",
        "1000000",
        "10000000",
        "nan",
        "-inf",
    ),
    *("deepseekv3", "grok1", "A100", "fp8", "fsdp=0", "fsdp(fsdp=7)", "full"),
    *("AR/AG/RS=./", "AR/AG/RS=1.2.3/4/5", "ETP=0", "ETP=99999999999999999999", "schedule=;kernel="),
)
"""Cells that look like something."""

GARBAGE = st.one_of(
    st.text(max_size=12),
    st.floats().map(str),
    st.integers().map(str),
    st.sampled_from(ODD),
)


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(source="vtrain_multi", cells={"step_time_s": "", "peak_mem_gib": "1"})
@given(
    source=st.sampled_from([*source_notes()["sources"], "elsewhere"]),
    cells=st.dictionaries(st.sampled_from(list(ROW)), GARBAGE, max_size=4),
)
def test_garbage_is_skipped_or_priced_never_a_traceback(source, cells):
    try:
        row = measurement_of({**ROW, "source_id": source, **cells})
    except Unusable as reason:
        assert str(reason)
        return
    found = score([row], predict([row]))[row.source]
    if found.skipped:
        assert (found.n, found.memory.n, sum(found.skipped.values())) == (0, 0, 1)
    elif row.oom:
        assert (found.n, found.memory.n, found.oom.n) == (0, 0, 1)
    else:
        assert found.n == (row.step_time_s is not None)
        assert found.n + found.memory.n >= 1


@pytest.mark.slow
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_garbage_files_raise_nothing_but_input_errors(tmp_path, content):
    file = tmp_path / "garbage.csv"
    for start in (b"", ",".join(ROW).encode() + b"\n"):
        file.write_bytes(start + content)
        try:
            usable, _ = read_measurements(file)
        except InputError:
            continue
        assert usable == []


PRICED = {
    "aleph_layouts": 422,
    "bundled_h100": 24,
    "hf_ultrascale": 946,
    "korthikanti22": 10,
    "mosaic_llmfoundry": 182,
    "nvidia_dgxc": 143,
    "vtrain_multi": 41,
    "vtrain_single": 540,
    "xtuner_moe": 9,
}
"""Usable rows of the sources that lack little."""


@pytest.mark.slow
@pytest.mark.skipif(not MEASURED.is_dir(), reason="the published measurements are not here")
def test_published_files_are_read():
    for path in sorted(MEASURED.glob("*.csv")):
        with path.open(encoding="utf-8-sig", newline="") as file:
            count = sum(1 for _ in csv.DictReader(file))
        usable, skipped = read_measurements(path)
        if [row.reason for row in skipped] != [NO_TABLE]:
            assert len(usable) + len(skipped) == count
        if path.stem in PRICED:
            assert (path.stem, len(usable)) == (path.stem, PRICED[path.stem])
            assert {row.source for row in usable} | {row.source for row in skipped} == {path.stem}


def test_nan_is_a_blank():
    assert of(peak_mem_gib="nan").allocated_bytes is None
    assert refused(peak_mem_gib="-5") == "peak memory is out of range"
