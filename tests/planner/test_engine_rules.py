"""The search proposes only what its engine runs, and says so by name."""

from __future__ import annotations

from typing import Any

import pytest

from costmodels import ModelSpec
from costmodels.catalogue import engine_names, load_device, load_engine
from costmodels.errors import InputError, NoLayoutFits
from costmodels.spec.layout import Layout, even_split
from costmodels.spec.table import ARRAY_FIELDS, distinct_rows, value_of
from planner import evaluate, explain, search, suggest
from planner.ranking.result import SearchResult
from planner.space.engine_rules import engine_rules
from tests.support.layouts import layouts_of

MODEL = ModelSpec(name="small", layers=8, hidden=1024, heads=8, vocab=32000, seq=2048)
EXPERTS = ModelSpec(
    name="mixture", layers=8, hidden=512, heads=8, vocab=32000, seq=2048, experts=8, expert_ffn=1024, top_k=2
)
JOB: dict[str, Any] = {"world_size": 8, "max_global_batch_size": 32}

SIZES = ("micro_batch_size", "global_batch_size", "recompute_num_layers", "split")
"""Fields that no rule of an engine speaks of."""


def found(result: SearchResult, name: str) -> set[object]:
    """The values of a degree among all layouts of a search, those with solved degrees too."""
    return {value_of(name, int(code)) for code in set(getattr(result.table, name).tolist())}


@pytest.mark.parametrize("name", engine_names())
def test_every_engine_says_where_its_abilities_are_from(name: str) -> None:
    engine = load_engine(name)
    assert engine.runs.source
    assert engine_rules(engine, "bf16")
    for kind, device in (("gpu", "a100-80g"), ("npu", "ascend-910b")):
        assert engine.for_device(load_device(device)).runs == engine.runs
        if kind not in (*engine.runs.devices, *engine.runs.untried_devices, *engine.runs.priced_devices):
            with pytest.raises(InputError, match=rf"engine {name} does not run on {device}; .*give one of"):
                search(MODEL, engine=name, device=device, **JOB)


# Memory for a part of the layouts, so that recomputation and copies are solved for too.
@pytest.mark.parametrize("memory", [4.0, 12.0])
@pytest.mark.parametrize("model", [MODEL, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("name", engine_names())
def test_all_layouts_of_a_search_are_what_the_engine_runs(name: str, model: ModelSpec, memory: float) -> None:
    runs = load_engine(name).runs
    device = "a100-80g" if "gpu" in runs.devices else "ascend-910b"
    result = search(model, engine=name, device=device, precision="bf16", device_memory_gib=memory, **JOB)
    columns = [getattr(result.table, name) for name in ARRAY_FIELDS if name not in SIZES]
    layouts = layouts_of(result.table.take(distinct_rows(columns)[0]))
    assert layouts
    for layout in layouts:
        assert layout.schedule in runs.schedules
        assert layout.zero_stage in runs.zero_stages
        assert layout.pipeline_parallel == 1 or layout.zero_stage in runs.pipeline_zero_stages
        assert layout.pipeline_parallel > 1 or layout.zero_stage in runs.unpiped_zero_stages
        assert layout.pipeline_parallel == 1 or runs.pipelines_of_experts or not model.experts
        assert layout.expert_parallel == 1 or layout.zero_stage in runs.expert_zero_stages
        assert layout.context_parallel == 1 or layout.zero_stage in runs.context_zero_stages
        assert layout.zero_replicas == 1 or layout.zero_stage in runs.hybrid_zero_stages
        assert layout.context_parallel == 1 or layout.context_parallel_form in runs.context_parallel_forms
        assert layout.recompute in runs.recompute
        assert set(layout.recompute_modules) <= set(runs.recompute_modules)
        assert layout.recompute_method == "uniform" or layout.recompute in runs.recompute_some_layers
        assert not layout.offload_activations or "activations" in runs.offload
        assert not layout.offload_optimizer or "optimizer" in runs.offload
        for degree in ("tensor_parallel", "pipeline_parallel", "expert_parallel", "expert_tensor_parallel"):
            assert getattr(layout, degree) == 1 or getattr(runs, degree)
        assert not layout.sequence_parallel or runs.sequence_parallel
        assert not runs.whole_kv_heads or layout.tensor_parallel <= model.kv_heads
        if layout.context_parallel_form == "all_to_all" and runs.exchanges_whole_kv_heads:
            ranks = layout.tensor_parallel * layout.context_parallel
            assert layout.context_parallel == 1 or model.kv_heads % ranks == 0
        assert not layout.offload_optimizer or layout.zero_stage in runs.offload_optimizer_zero_stages
        assert not model.tied or layout.schedule not in runs.untied_schedules
        if model.experts and runs.expert_split != "any":
            whole = runs.expert_split != "as_layers" and layout.expert_parallel > 1
            assert layout.expert_tensor_parallel == (1 if whole else layout.tensor_parallel)
        assert not runs.experts_over_data_parallel or layout.data_parallel % layout.expert_parallel == 0


@pytest.mark.parametrize(
    ("engine", "device", "most"),
    [("megatron", "h100", 4), ("nemo", "h100", 4), ("mindspeed", "ascend-910b", 16), ("bundled", "h100", 16)],
)
def test_all_to_all_where_each_rank_has_key_heads_of_its_own(engine: str, device: str, most: int) -> None:
    # Transformer Engine repeats no heads of keys before it exchanges them, MindSpeed and the runtime do.
    job: dict[str, Any] = {"device": device, "global_batch_size": 64, "engine": engine}
    result = search("llama3-8b", world_size=32, pin=["tp=2", "cp_form=all_to_all"], **job)
    assert (
        max(int(str(value)) for value in found(result, "context_parallel")) == most
    )  # 8 heads of keys, 4 on a tensor-parallel rank


@pytest.mark.parametrize(
    ("model", "forms"),
    [
        ("gemma-3-4b", {"all_gather", "all_to_all"}),  # windows
        ("gpt-oss-20b", {"all_to_all"}),  # windows and sinks
        ("moonlight-16b-a3b", {"all_gather", "all_to_all", "ring"}),  # keys wider than values
    ],
)
def test_kinds_of_attention_that_transformer_engine_splits(model: str, forms: set[str]) -> None:
    job: dict[str, Any] = {"device": "h200", "global_batch_size": 16, "engine": "megatron"}
    result = search(model, world_size=8, pin=["cp=2", "pp=1", "ep=1"], **job)
    assert found(result, "context_parallel_form") == forms


def test_counts_name_the_rule_and_add_up() -> None:
    result = search(MODEL, engine="megatron", **JOB)
    assert result.illegal["engine_schedule"] > 0 and result.illegal["engine_zero_stage"] > 0
    assert result.considered == result.legal + sum(result.illegal.values())
    assert found(result, "schedule") == {"1f1b", "interleaved"}


@pytest.mark.parametrize(
    ("engine", "pin", "words"),
    [
        ("megatron", "schedule=zbv", "pin schedule=zbv: engine megatron runs schedule 1f1b, interleaved"),
        ("megatron", "zero=2..3", "pin zero_stage=2..3: engine megatron runs zero_stage 0, 1"),
        ("deepspeed", "pp=2", "pin pipeline_parallel=2: engine deepspeed has no pipeline parallelism"),
        ("fsdp", "tp=2", "pin tensor_parallel=2: engine fsdp has no tensor parallelism"),
        ("fsdp", "cp=2", "pin context_parallel=2: engine fsdp has no context parallelism"),
        ("torchtitan", "cp_form=all_to_all", "runs context_parallel_form all_gather, ring"),
        ("nanotron", "recompute=selective", "engine nanotron runs recompute none, full"),
        ("torchtitan", "recompute=selective", "engine torchtitan runs recompute none, full"),
        ("nanotron", "offload_optimizer=true", "engine nanotron offloads no optimizer"),
    ],
)
def test_a_pin_outside_is_refused_in_one_line(engine: str, pin: str, words: str) -> None:
    with pytest.raises(InputError) as refused:
        search(MODEL, engine=engine, pin=[pin], **JOB)
    assert words in str(refused.value) and "\n" not in str(refused.value)


def test_two_pins_that_do_not_go_together_are_refused_with_the_rule() -> None:
    with pytest.raises(
        InputError, match="engine torchtitan runs zero_stage 0, 1 with pipeline_parallel, not 3"
    ):
        search(MODEL, engine="torchtitan", pin=["pp=2", "zero=3"], **JOB)
    with pytest.raises(InputError, match="runs zero_stage 0, 2, 3 without pipeline_parallel, not 1"):
        search(MODEL, engine="torchtitan", pin=["pp=1", "zero=1"], **JOB)
    with pytest.raises(InputError, match="engine megatron-deepspeed has no pipelines of models with experts"):
        search(EXPERTS, engine="megatron-deepspeed", pin="pp=2", **JOB)


def test_deepspeed_keeps_copies_of_what_zero_3_splits() -> None:
    result = search(MODEL, engine="deepspeed", pin=["zero=3", "zero_replicas=2"], **JOB)
    assert result.best is not None and result.best.layout.zero_replicas == 2


def test_flags_that_hold_where_possible_are_no_pins_of_what_an_engine_has_not() -> None:
    from planner.inputs.pins import where_possible

    pins = where_possible({}, "sequence_parallel", True)
    assert search(MODEL, engine="fsdp", pin=pins, **JOB).feasible
    with pytest.raises(InputError, match="has no sequence parallelism"):
        search(MODEL, engine="megatron-deepspeed", pin=pins, **JOB)


def test_explain_says_what_the_engine_has() -> None:
    found = explain(MODEL, engine="megatron", layout="pp=2,schedule=dualpipev", what_if=False, **JOB)
    [verdict] = found.verdicts
    assert verdict.outcome == "illegal"
    assert "engine megatron runs schedule 1f1b, interleaved, not dualpipev" in verdict.reason
    assert verdict.rules["engine_schedule"] > 0


def test_a_given_layout_is_priced_whatever_the_engine_runs() -> None:
    layout = Layout(
        pipeline_parallel=2,
        virtual_pipeline_parallel=2,
        schedule="zbv",
        layers_per_stage=even_split(MODEL.layers, 4),
        global_batch_size=8,
    )
    assert evaluate(layout, model=MODEL, engine="megatron").step_time_s > 0


@pytest.mark.parametrize("engine", ["megatron-deepspeed", "bloom"])
def test_an_engine_that_divides_layers_itself_is_given_no_list_of_stages(engine: str) -> None:
    model = MODEL.model_copy(update={"layers": 14, "vocab": 128000})
    jobs = {name: search(model, engine=name, pin={"pp": 4}, **JOB) for name in (engine, "megatron")}
    stages = {
        name: {layout.layers_per_stage for layout in layouts_of(job.table)} for name, job in jobs.items()
    }
    assert stages[engine] == {(4, 4, 3, 3)} < stages["megatron"]


def test_devices_without_the_bundled_runtime_get_an_engine_that_runs_there() -> None:
    assert search(MODEL, device="ascend-910b", **JOB).problem.engine.name == "mindspeed"
    untried = search(MODEL, device="ascend-910b", engine="bundled", **JOB)
    assert untried.best is not None and "npu" in untried.problem.engine.runs.untried_devices
    assert search(MODEL, device="h100", **JOB).problem.engine.name == "bundled"
    assert search(MODEL, device="mi300x", **JOB).problem.engine.name == "bundled"


def test_a_head_that_shares_the_embedding_rules_out_dualpipev_on_mindspeed() -> None:
    job: dict[str, Any] = {**JOB, "engine": "mindspeed", "device": "ascend-910b", "pin": "schedule=dualpipev"}
    apart = MODEL.model_copy(update={"tied": False})
    assert search(apart, **job).best is not None
    with pytest.raises(InputError, match="the output head has a weight of its own"):
        search(MODEL, **job)


def scarce(name: str, kind: str, world_size: int = 1) -> dict[str, Any]:
    """The question of an engine that forbids a kind of recomputation, on devices with little memory."""
    npu = load_engine(name).runs.devices == ("npu",)
    return {
        "engine": name,
        "world_size": world_size,
        "device": "ascend-910b" if npu else "a100-80g",
        "device_memory_gib": 0.4,
        "memory_margin_gib": 0,
        "max_global_batch_size": 16,
        "forbid": [f"recompute={kind}"],
    }


@pytest.mark.parametrize("name", engine_names())
@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_without_a_kind_of_recomputation_the_best_or_closest_layout_is_found(name: str, kind: str) -> None:
    """Engines without modules to recompute have nothing left to solve where `full` is forbidden."""
    alone, together = (search(MODEL, **scarce(name, kind, devices)) for devices in (1, 8))
    assert alone.best is None
    for result in (alone, together):
        assert (result.best or result.closest()[0]).layout.recompute != kind


RECOMPUTATIONS = {
    (runs.recompute, runs.recompute_modules, runs.recompute_some_layers): name
    for name in engine_names()
    for runs in [load_engine(name).runs]
}
"""An engine for each set of modules that engines recompute."""


@pytest.mark.parametrize("name", RECOMPUTATIONS.values())
def test_without_full_recomputation_what_does_not_fit_is_still_told(name: str) -> None:
    """Layouts that would fit are searched with the same kinds of recomputation."""
    with pytest.raises(NoLayoutFits, match=r"no layout of small fits"):
        suggest(MODEL, **scarce(name, "full"))
