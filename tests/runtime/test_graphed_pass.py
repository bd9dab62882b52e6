"""Passes as CUDA graphs: the same numbers, from and to the same places, without a word from the host."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from costmodels import ModelSpec, Router
from costmodels.catalogue import load_model
from costmodels.errors import InputError
from costmodels.spec.model_parts import MultiTokenPrediction
from planner import evaluate, search, suggest
from runtime.parallel.graphed_pass import WARM_UP, GraphedPass
from runtime.settings.checks import check_job
from runtime.settings.job_rules import check_rules, job_rules
from runtime.settings.training_options import DataOptions
from tests.support.layouts import parse_layout
from tests.support.models import MODELS, llama
from tests.support.ranks.graphs import Both, graphed_and_plain
from tests.support.worker_pool import WorkerPool

SPEC = llama("llama-3", layers=3, hidden=32, heads=4, ffn=64, vocab=64, seq=16)

EXPERTS = SPEC.model_copy(
    update={
        "experts": 4,
        "top_k": 2,
        "expert_ffn": 32,
        "shared_expert_ffn": 32,
        "router": Router(score="sigmoid", scale=2.5, expert_bias=True),
    }
)

FURTHER = SPEC.model_copy(update={"mtp": MultiTokenPrediction(depths=2)})


def both(pool: WorkerPool, spec: ModelSpec, text: str, compiled: bool, records: bool) -> Both:
    layout = parse_layout(f"mbs=1,{text}", spec)
    layout = layout.model_copy(update={"global_batch_size": 4 * layout.data_parallel})
    found = pool.run(graphed_and_plain, layout.world_size, spec, layout, compiled, records)
    for rank in found:
        assert rank.graphed.losses == rank.plain.losses
        assert rank.graphed.norms == rank.plain.norms
        for name, weight in rank.plain.weights.items():
            assert (rank.graphed.weights[name] == weight).all(), name
        # From the first pass to the last one of three steps.
        assert all(places == rank.places[0] for places in rank.places) and len(rank.places[0]) > 3
    return found[-1]


@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (SPEC, "precision=bf16"),
        (SPEC, "precision=fp32"),
        (SPEC, "precision=fp16"),
        (SPEC, "precision=fp8,fp8_recipe=tensorwise"),
        pytest.param(SPEC, "precision=bf16,gradient_reduction=bf16", marks=pytest.mark.slow),
        pytest.param(FURTHER, "precision=bf16", marks=pytest.mark.slow),
        pytest.param(SPEC, "precision=bf16,recompute=full", marks=pytest.mark.slow),
        pytest.param(SPEC, "precision=bf16,dp=2", marks=pytest.mark.slow),
        pytest.param(SPEC, "precision=bf16,tp=2,sp=1", marks=pytest.mark.slow),
        pytest.param(SPEC, "precision=fp32,cp=2", marks=pytest.mark.slow),
    ],
)
def test_what_a_pass_did_can_be_done_again_for_other_micro_batches(
    pool: WorkerPool, spec: ModelSpec, text: str
) -> None:
    """Replays its operators alone, as a graph does: nothing that changes may be a number of Python's."""
    if "fp8" in text:
        pytest.importorskip("torchao")
    found = both(pool, spec, text, compiled=False, records=True)
    assert (found.replayed, found.asked) == (3 * 4 - 5, 0)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize(
    ("spec", "text"),
    [
        (EXPERTS, "precision=bf16,tp=2,sp=1,recompute=full"),
        (SPEC, "precision=fp32,dp=2"),
    ],
)
def test_compiled_passes_keep_their_places(pool: WorkerPool, spec: ModelSpec, text: str) -> None:
    both(pool, spec, text, compiled=True, records=False)


@pytest.mark.parametrize(
    ("model", "text", "refusal"),
    [
        ("llama", "pp=2", "wait for other stages; use pipeline_parallel 1"),
        ("llama", "dp=2,zero=1", "hooks of zero_stage 1"),
        ("llama", "offload_optimizer=1", "tensors in host memory"),
        ("llama", "cp=2,cp_form=ring", "use context_parallel_form all_gather or all_to_all"),
        ("mixtral", "ep=2", "how many rows experts get"),
    ],
)
def test_layouts_that_wait_for_the_host_are_refused(model: str, text: str, refusal: str) -> None:
    spec = MODELS[model]
    layout = parse_layout(text, spec)
    check_job(spec, layout, layout.world_size)
    graphed = layout.model_copy(update={"cuda_graphs": True})
    with pytest.raises(InputError, match=refusal):
        check_job(spec, graphed, layout.world_size)


@pytest.mark.parametrize("flag", ["reset_attention_mask", "reset_position_ids"])
def test_documents_that_end_elsewhere_are_refused(flag: str) -> None:
    layout = parse_layout("", SPEC)
    rules = job_rules(DataOptions(**{flag: True}))  # type: ignore[arg-type]
    check_rules(rules, SPEC, layout)
    with pytest.raises(InputError, match="always the same kernels; leave one of the two out"):
        check_rules(rules, SPEC, layout.model_copy(update={"cuda_graphs": True}))


JOB: dict[str, Any] = {"world_size": 8, "max_global_batch_size": 32}


def test_graphs_are_priced_as_layers_that_wait_for_no_host() -> None:
    job: dict[str, Any] = {**JOB, "device": "h100", "world_size": 2}
    pin = {"tp": 2, "zero": 0, "micro_batch_size": 1, "recompute": "none"}
    plain = suggest("gpt2-small", **job, pin=pin)
    graphed = suggest("gpt2-small", **job, pin={**pin, "cuda_graphs": True})
    assert "cuda_graphs" in graphed.layout.describe()
    assert plain.estimate.time.launch > 0 == graphed.estimate.time.launch
    assert graphed.estimate.step_time_s < plain.estimate.step_time_s
    # The memory that the optimizer of a plain layout finds free belongs to the graph.
    assert graphed.estimate.peak_memory_bytes > 0


@pytest.mark.slow
def test_memory_of_graphs_is_what_a_dry_run_finds() -> None:
    from runtime.dryrun.run import trace

    spec = load_model("gpt2-medium").model_copy(update={"layers": 4})
    layout = parse_layout("mbs=4,gbs=16,precision=bf16,cuda_graphs=1", spec)
    found = evaluate(layout, model=spec, device="h100")
    (parts,) = found.memory
    # A dry run has no cuBLAS, whose workspaces are all that is temporary here.
    tensors = parts.parameters + parts.gradients + parts.optimizer + parts.activations + parts.logits
    assert tensors == pytest.approx(trace(spec, layout, compiled=True).peak.total, rel=0.02)


def test_sums_that_keep_their_places_are_gradients_of_a_dry_run() -> None:
    from runtime.dryrun.run import trace

    layout = parse_layout("mbs=1,gbs=4,precision=bf16,cuda_graphs=1", SPEC)
    held = trace(SPEC, layout).peak.allocated
    assert held["gradients"] >= 4 * SPEC.parameters
    # Tables of positions and sums of losses.
    assert held["temporaries"] < SPEC.parameters


def test_reductions_after_the_last_graph_hide_behind_nothing() -> None:
    pin = {"zero": 0, "tp": 1, "dp": 8, "micro_batch_size": 4, "recompute": "none"}
    plain = suggest("gpt2-small", **JOB, device="h100", pin=pin)
    graphed = suggest("gpt2-small", **JOB, device="h100", pin={**pin, "cuda_graphs": True})
    assert graphed.estimate.time.data_parallel > 1.5 * plain.estimate.time.data_parallel


def test_a_search_proposes_graphs_where_they_can_be_alone() -> None:
    result = search("llama2-7b", **JOB, device="h100", pin="cuda_graphs=1")
    assert result.table.cuda_graphs.all() and not result.table.zero_stage.any()
    assert result.illegal["cuda_graphs_pipeline"] and result.illegal["cuda_graphs_zero"]


@pytest.mark.parametrize(
    ("model", "job", "refusal"),
    [
        ("gpt2-small", {"device": "h100", "engine": "megatron"}, "engine megatron is priced without it"),
        ("gpt2-small", {"device": "cpu"}, "cpu is no GPU and has none"),
        ("mixtral-8x7b", {"device": "h100", "precision": "fp16"}, "in fp16 the host asks how many rows"),
    ],
)
def test_who_has_no_graphs_is_told(model: str, job: dict[str, Any], refusal: str) -> None:
    with pytest.raises(InputError, match=f"pin cuda_graphs: {refusal}"):
        suggest(model, **JOB, **job, pin="cuda_graphs=1")


def test_a_pass_reads_the_micro_batch_of_its_call_and_leaves_it_alone() -> None:
    """Warm-ups run as they are; then one capture, whose graph reads from the same places for good."""
    captured: list[int] = []

    def capture(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
        captured.append(len(seen))
        return run

    seen: list[tuple[int, int]] = []

    def run(tokens: Tensor, labels: Tensor) -> Tensor:
        seen.append((tokens.data_ptr(), labels.data_ptr()))
        return (tokens * labels).sum()

    one = GraphedPass(run, torch.device("cpu"), capture)
    given = [(torch.full((2, 3), number), torch.arange(6).view(2, 3)) for number in range(1, 9)]
    assert [float(one(*pair)) for pair in given] == [15.0 * number for number in range(1, 9)]
    assert [int(tokens[0, 0]) for tokens, _ in given] == list(range(1, 9))
    assert len(set(seen)) == 1 and captured == [WARM_UP]
    one.end()
    assert one.replay is None
