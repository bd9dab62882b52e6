"""`planner export`: plans as flags and files of other software, and what these do not support."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from costmodels import ModelSpec
from costmodels.spec.layout import Layout
from planner import Plan, evaluate, suggest
from planner.formats.files import read_files
from planner.formats.hugging_face.deepspeed_export import export_deepspeed
from tests.support.commands import Command

MODEL = ModelSpec(name="small", layers=8, hidden=1024, heads=8, vocab=32000, seq=2048)


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A plan for Megatron-LM."""
    return suggest(MODEL, world_size=8, device="a100-80g", engine="megatron", global_batch_size=32)


def test_flags_of_a_file_are_the_plan_again(planner_command: Command, plan: Plan, tmp_path: Path) -> None:
    saved, flags = tmp_path / "plan.json", tmp_path / "flags.txt"
    plan.save(saved)
    code, out, err = planner_command("export", saved, "--to", "megatron", "--out", flags)
    note = "planner: note: the job needs CUDA_DEVICE_MAX_CONNECTIONS=1 in its environment\n"
    assert (code, out, err) == (0, "", f"planner: saved {flags}\n{note}")
    reading = read_files([flags], world_size=8)
    assert reading.layout == plan.layout
    code, out, err = planner_command("export", saved, "--to", "megatron")
    assert (code, out, err) == (0, flags.read_text(), note)


def test_deepspeed_has_its_batch_and_stage_and_names_the_rest(
    planner_command: Command, plan: Plan, tmp_path: Path
) -> None:
    saved = tmp_path / "plan.json"
    plan.save(saved)
    code, out, _ = planner_command("export", saved, "--to", "deepspeed")
    values = json.loads(out)
    assert code == 0 and values["train_batch_size"] == 32
    product = values["train_micro_batch_size_per_gpu"] * values["gradient_accumulation_steps"]
    assert product * plan.layout.data_parallel == values["train_batch_size"]
    assert values["zero_optimization"]["stage"] == plan.layout.zero_stage


def test_every_field_that_deepspeed_cannot_say_is_named() -> None:
    layout = Layout(
        pipeline_parallel=2,
        tensor_parallel=2,
        sequence_parallel=True,
        context_parallel=2,
        expert_parallel=2,
        data_parallel=4,
        layers_per_stage=(4, 4),
        zero_stage=1,
        zero_replicas=2,
        recompute="selective",
        offload_activations=True,
        offload_optimizer=True,
        optimizer="muon",
        precision="fp8",
        global_batch_size=16,
    )
    found = export_deepspeed(MODEL, layout)
    assert found.inexpressible_fields == {
        *(
            "pipeline_parallel",
            "sequence_parallel",
            "context_parallel_form",
            "expert_parallel",
            "zero_replicas",
        ),
        *("recompute", "recompute_modules", "offload_activations", "optimizer", "precision"),
        "layers_per_stage",
    }
    assert found.in_script == ("model small: the training script makes it",)
    values = json.loads(found.text)
    assert values["tensor_parallel"] == {"autotp_size": 2}
    assert values["zero_optimization"] == {
        "stage": 1,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
    }


def test_a_plan_without_words_is_not_written_unless_the_nearest_job_is_asked_for(
    planner_command: Command, plan: Plan, tmp_path: Path
) -> None:
    """The nearest job is read from what is written, and priced as that plan is on its own."""
    layout = Layout(
        pipeline_parallel=4,
        virtual_pipeline_parallel=2,
        schedule="zbv",
        data_parallel=2,
        layers_per_stage=(1,) * 8,
        global_batch_size=32,
    )
    model = MODEL.model_copy(update={"attention_softcap": 50.0})

    def priced(layout: Layout) -> Plan:
        price = evaluate(layout, model=MODEL, device="a100-80g", engine="megatron")
        return plan.model_copy(update={"model": model, "layout": layout, "estimate": price})

    zbv = priced(layout)
    saved, flags = tmp_path / "plan.json", tmp_path / "flags.sh"
    zbv.save(saved)
    code, out, err = planner_command("export", saved, "--to", "megatron", "--out", flags)
    assert (code, out, len(err.splitlines())) == (5, "", 1) and not flags.exists()
    assert "schedule=zbv" in err and "attention_softcap=50.0" in err and "--nearest" in err
    code, out, err = planner_command("export", saved, "--to", "megatron", "--out", flags, "--nearest")
    assert (code, out) == (0, "") and "not expressible in megatron: schedule=zbv" in err
    reading = read_files([flags], world_size=8)
    assert reading.layout == layout.model_copy(update={"schedule": "interleaved"})
    assert reading.layout is not None
    nearest = priced(reading.layout).estimate
    gained = nearest.step_time_s / zbv.estimate.step_time_s - 1
    more = (nearest.peak_memory_bytes - zbv.estimate.peak_memory_bytes) / 2**30
    said = next(line for line in err.splitlines() if "written job" in line)
    assert f"{gained:+.1%} against the plan" in said and f"{more:+.1f} GiB" in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("none.json", "--to", "megatron"), "none.json"),
        (("PLAN", "--to", "megatro"), "did you mean megatron?"),
        (("PLAN", "--to", "x"), "expected megatron, megatron-bridge, torchtitan, deepspeed"),
        (("PLAN",), "--to"),
        (("PLAN", "--to", "megatron", "--out", "no/such/folder/x"), "no/such/folder"),
    ],
)
def test_wrong_input_is_one_line(
    planner_command: Command, plan: Plan, tmp_path: Path, arguments: tuple[str, ...], expected: str
) -> None:
    saved = tmp_path / "plan.json"
    plan.save(saved)
    code, out, err = planner_command("export", *(saved if word == "PLAN" else word for word in arguments))
    assert (code, out) == (2, "")
    assert expected in err and len(err.splitlines()) == 1
