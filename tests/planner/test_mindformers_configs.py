"""Configurations of MindFormers are read into the layout that MindSpore runs, from files and pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import check
from planner.formats.conversion import convert_config
from planner.formats.facts.reading import Reading
from planner.formats.files import read_files
from planner.formats.mindformers.names import CAME_VALUES
from runtime.settings.training_options import TrainingOptions
from tests.support.guides import guide

STATIC = """
context: {device_target: Ascend, max_device_memory: "58GB"}
runner_config:
  batch_size: 1
parallel:
  parallel_mode: 1
  enable_parallel_optimizer: True
parallel_config:
  data_parallel: 2
  model_parallel: 4
  pipeline_stage: 8
  use_seq_parallel: True
  micro_batch_num: 256
recompute_config:
  select_recompute: [10, 8, 6, 4, 2, 0, 0, 0]
model:
  model_config:
    type: LlamaConfig
    seq_length: 4096
    hidden_size: 8192
    num_layers: 80
    num_heads: 64
    n_kv_heads: 8
    vocab_size: 32000
    multiple_of: 256
    ffn_dim_multiplier: 1.3
    compute_dtype: "bfloat16"
    use_flash_attention: True
"""


def read(tmp_path: Path, text: str, world_size: int | None = None) -> Reading:
    """The reading of a file with this text."""
    file = tmp_path / "run.yaml"
    file.write_text(text)
    return read_files([file], world_size=world_size)


def test_the_static_graph_of_a_published_70b(tmp_path: Path) -> None:
    reading = read(tmp_path, STATIC)
    assert reading.model is not None and reading.model.ffn == 28672 and reading.layout is not None
    assert reading.layout.describe() == (
        "tp=4+sp pp=8 dp=2 zero=1 mbs=1 x 256 recompute=selective(activation)/block:10"
    )
    assert (reading.world_size, reading.device, reading.device_memory_gib) == (64, "ascend-910b", 58.0)
    assert [flag.name for flag in reading.flags if flag.known.role == "unknown"] == []
    assert [problem.flag for problem in reading.problems if "differ by stage" in problem.text]


@pytest.mark.parametrize(
    ("more", "stages"),
    [
        ("", (10,) * 8),
        ("    mtp_depth: 1\n    offset: [0, 0, 0, 0, 0, 0, 0, 1]\n", (10,) * 8),
        ("    mtp_depth: 1\n    offset: [1, 0, 0, 0, 0, 0, 0, 0]\n", (11, *(10,) * 6, 9)),
        ("    mtp_depth: 1\n", (10,) * 8),
    ],
)
def test_mtp_modules_count_as_layers_of_the_last_stage(
    tmp_path: Path, more: str, stages: tuple[int, ...]
) -> None:
    layout = read(tmp_path, STATIC + more).layout
    assert layout is not None and layout.layers_per_stage == stages


def test_chunks_have_the_layers_that_the_lists_of_offset_say(tmp_path: Path) -> None:
    chunks = STATIC.replace(
        "parallel_mode: 1", "parallel_mode: 1\n  pipeline_config: {pipeline_interleave: True}"
    ).replace("num_layers: 80", "num_layers: 80\n    pp_interleave_num: 2")
    rows = "    offset: [[-1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1, 0]]\n"
    layout = read(tmp_path, chunks + rows).layout
    assert layout is not None and layout.layers_per_stage == (4, *(5,) * 13, 6, 5)
    for wrong in ("[[1, 0, 0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0, 1, 0]]", "[[0, 0], [0, 0]]", "[0, 0]"):
        reading = read(tmp_path, chunks + f"    offset: {wrong}\n")
        assert reading.layout is None and "illegal" in {one.severity for one in reading.problems}


@pytest.mark.parametrize(
    ("old", "new", "key", "line", "text"),
    [
        ("micro_batch_num: 256", "micro_batch_num: 4", "parallel_config.micro_batch_num", 13, "fewer than"),
        ("parallel_mode: 1", "parallel_mode: 0", "parallel.parallel_mode", 6, "data parallelism alone"),
        ("hidden_size: 8192", "hidden_size: 8k", "model.model_config.hidden_size", 20, "whole number"),
        ("58GB", "many", "context.max_device_memory", 2, "no memory"),
        ("num_layers: 80", "num_layers: 4", "parallel_config.pipeline_stage", 11, "more than the 4 layers"),
    ],
)
def test_what_is_wrong_names_the_key_and_its_line(
    tmp_path: Path, old: str, new: str, key: str, line: int, text: str
) -> None:
    reading = read(tmp_path, STATIC.replace(old, new))
    found = [one for one in reading.problems if one.severity in ("illegal", "unknown")]
    assert [(one.flag, one.line) for one in found] == [(key, line)] and text in found[0].text


def test_what_is_priced_as_something_that_needs_more_may_fit(tmp_path: Path) -> None:
    text = STATIC.replace("num_layers: 80", "num_layers: 160").replace(
        "enable_parallel_optimizer: True",
        "enable_parallel_optimizer: True\n  pipeline_config: {pipeline_scheduler: SCHEDULER}",
    )
    fits = {}
    for scheduler in ("1f1b", "seqpipe"):
        (tmp_path / "run.yaml").write_text(text.replace("SCHEDULER", scheduler))
        answer = check(tmp_path / "run.yaml")
        assert answer.legal and answer.plan is not None and not answer.plan.fits
        fits[scheduler] = answer.fits
    assert fits == {"1f1b": False, "seqpipe": None}


CAME = """
optimizer: {type: Came, beta1: 0.8, decay_rate: 0.7, beta3: 0.95, clip_threshold: 2.0, weight_decay: 0.1,
            eps: [1.e-30, 1.e-3, 1.e-16], scale_parameter: False, relative_step: True}
"""


def test_came_is_read_with_its_settings(tmp_path: Path) -> None:
    reading = read(tmp_path, STATIC + CAME)
    assert reading.layout is not None and reading.layout.optimizer == "came"
    assert dict(reading.training) == {
        "--weight-decay": "0.1",
        "--came-beta1": "0.8",
        "--came-decay-rate": "0.7",
        "--came-beta3": "0.95",
        "--came-clip-threshold": "2.0",
    }
    [note] = [one for one in reading.problems if one.flag.startswith("optimizer.")]
    assert note.flag == "optimizer.relative_step" and "learning rates" in note.text


def test_came_of_the_dynamic_graph_is_read(tmp_path: Path) -> None:
    text = """
model_config: {num_layers: 2, hidden_size: 64, num_attention_heads: 4, ffn_hidden_size: 128, seq_length: 64,
               vocab_size: 99}
training_config: {seed: 1}
optimizer_config: {optimizer_type: CameZeRO2, beta3: 0.9, eps: [1.e-30, 1.e-3, 1.e-16]}
"""
    reading = read(tmp_path, text, world_size=2)
    assert reading.layout is not None and reading.layout.optimizer == "came"
    assert dict(reading.training) == {"--seed": "1", "--came-beta3": "0.9"}


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [("AdamW", "adam"), ("adafactor", "adafactor"), ("SGD", "sgd"), ("Muon", "muon"), ("Came", "came")],
)
def test_optimizers_are_those_of_the_same_names(tmp_path: Path, name: str, optimizer: str) -> None:
    reading = read(tmp_path, f"{STATIC}optimizer: {{type: {name}}}\n")
    assert reading.layout is not None and reading.layout.optimizer == optimizer


def test_settings_of_came_are_no_flags_of_megatron(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(STATIC.replace("num_layers: 80", "num_layers: 8") + CAME)
    for to, missing in (("megatron", ["optimizer"]), ("mindformers", [])):
        made = convert_config(file, to=to)
        named = [one for one in made.export.inexpressible if one.startswith("optimizer=")]
        assert [one.partition("=")[0] for one in named] == missing
        assert "came-beta" not in made.text and "--came-beta3 0.95" in made.unconverted
        assert ("type: Came" in made.text) == (to == "mindformers")


def test_the_export_of_came_has_the_settings_that_the_runtime_trains_with() -> None:
    options = TrainingOptions()
    assert {name: getattr(options, f"came_{name}") for name in CAME_VALUES if name != "eps"} == {
        name: value for name, value in CAME_VALUES.items() if name != "eps"
    }


def test_devices_must_be_those_of_the_degrees(tmp_path: Path) -> None:
    reading = read(tmp_path, STATIC, world_size=32)
    assert reading.layout is None
    assert [one.flag for one in reading.problems if one.severity == "illegal"] == [
        "parallel_config.data_parallel"
    ]


def test_the_guide_to_13b_is_read_as_it_stands() -> None:
    answer = check(guide("mindformers-gpt2-13b.txt"))
    assert answer.legal and answer.fits and answer.plan is not None and answer.best is not None
    assert answer.plan.layout.describe() == "tp=2 pp=4 dp=4 zero=1 mbs=2 x 24 recompute=full"
    assert answer.plan.cluster.memory_bytes == 31 * 2**30 and answer.plan.cluster.device.name == "ascend-910"
    assert answer.gain is not None and answer.gain > 1


def test_the_guide_to_the_dynamic_graph_is_read_as_it_stands() -> None:
    answer = check(guide("mindformers-dynamic-gpt.txt"))
    assert answer.legal and answer.fits and answer.plan is not None
    assert answer.plan.model.layers == 6 and not answer.plan.model.tied
    assert answer.plan.layout.describe() == "tp=1 pp=1 dp=1 zero=0 mbs=1 x 2 recompute=none"
    whole = check(guide("mindformers-dynamic-gpt.txt"), define={"num_layers": "32"})
    assert whole.fits is False and [one.flag for one in whole.problems if one.severity == "too_big"]


def test_a_page_with_a_code_block(tmp_path: Path) -> None:
    page = tmp_path / "GUIDE.md"
    page.write_text(f"# How to\n\nUse this:\n\n```yaml{STATIC}```\n\nand wait.\n")
    reading = read_files([page])
    assert reading.layout is not None and reading.layout.tensor_parallel == 4
    lines = {flag.name: flag.line for flag in reading.flags}
    assert (
        page.read_text().split("\n")[lines["parallel_config.model_parallel"] - 1].strip()
        == "model_parallel: 4"
    )
