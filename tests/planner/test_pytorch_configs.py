"""Configurations of torchtitan and nanotron are read into the layout that these run."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner import check
from planner.formats.facts.reading import Reading
from planner.formats.files import read_files

TORCHTITAN = """
[model]
name = "llama3"
flavor = "8B"

[training]
local_batch_size = 4
global_batch_size = 128
seq_len = 4096  # of 8192
steps = 1_000

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 2
pipeline_parallel_degree = 4
pipeline_parallel_schedule = "Interleaved1F1B"

[activation_checkpoint]
mode = "full"
"""

NANOTRON = """
model:
  dtype: bfloat16
  model_config:
    {hidden_size: 2048, intermediate_size: 8192, num_attention_heads: 32, num_hidden_layers: 16,
     num_key_value_heads: 8, vocab_size: 128256, max_position_embeddings: 4096, tie_word_embeddings: true}
optimizer: {zero_stage: 1, accumulate_grad_in_fp32: true}
parallelism: {dp: 4, tp: 2, pp: 1, tp_mode: REDUCE_SCATTER, recompute_layer: true}
tokens: {sequence_length: 4096, micro_batch_size: 2, batch_accumulation_per_replica: 8, train_steps: 100}
"""


def read(tmp_path: Path, name: str, text: str, world_size: int | None = None) -> Reading:
    """The reading of a file with this text."""
    file = tmp_path / name
    file.write_text(text)
    return read_files([file], world_size=world_size)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "tp=2+sp pp=4 vpp=2 dp=4 zero=1 mbs=1 x 32 recompute=full layers=4+5+4*5+3"),
        ({"pipeline_parallel_degree = 4": ""}, "tp=2+sp pp=1 dp=16 zero=3 mbs=4 x 2 recompute=full"),
        (
            {"pipeline_parallel_degree = 4": "", "replicate_degree = 1": "replicate_degree = 2"},
            "tp=2+sp pp=1 dp=16 zero=3 zero_replicas=2 mbs=4 x 2 recompute=full",
        ),
        (
            {"Interleaved1F1B": "ZBVZeroBubble", '"full"': '"none"'},
            "tp=2+sp pp=4 vpp=2 schedule=zbv dp=4 zero=1 mbs=1 x 32 recompute=none layers=4+5+4*5+3",
        ),
        (
            {"pipeline_parallel_degree = 4": "context_parallel_degree = 2", '"full"': '"selective"'},
            "tp=2+sp pp=1 cp=2 cp_form=all_gather dp=8 zero=3 mbs=4 x 4 recompute=full/block:16",
        ),
        (
            {"pipeline_parallel_degree = 4": "", '"full"': '"selective"\nselective_ac_option = "op"'},
            "tp=2+sp pp=1 dp=16 zero=3 mbs=4 x 2 recompute=selective",
        ),
    ],
)
def test_torchtitan(tmp_path: Path, changes: dict[str, str], expected: str) -> None:
    text = TORCHTITAN
    for old, new in changes.items():
        text = text.replace(old, new)
    reading = read(tmp_path, "train.toml", text, world_size=32)
    assert reading.layout is not None and reading.layout.describe() == expected
    assert reading.model is not None and reading.model.seq == 4096
    assert reading.training["--train-iters"] == "1000"


def test_stages_of_torchtitan_count_embedding_and_head_as_layers(tmp_path: Path) -> None:
    reading = read(tmp_path, "train.toml", TORCHTITAN, world_size=32)
    assert reading.layout is not None and reading.layout.layers_per_stage == (4, 5, 4, 4, 4, 4, 4, 3)


def test_torchtitan_does_not_say_on_how_many_devices(tmp_path: Path) -> None:
    reading = read(tmp_path, "train.toml", TORCHTITAN)
    assert reading.layout is None and [one.severity for one in reading.problems] == ["unknown"]


def test_a_comment_of_torchtitan_says_for_which_devices_the_file_is(tmp_path: Path) -> None:
    comment = "# NOTE: this toml config is a preset for 8 H100 GPUs (with 96GiB memory).\n"
    reading = read(
        tmp_path, "train.toml", comment + TORCHTITAN.replace("parallel_degree = 4", "parallel_degree = 2")
    )
    assert (reading.world_size, reading.device, reading.device_memory_gib) == (8, "h100", 96)
    assert reading.layout is not None and any("96 GiB" in one for one in reading.assumed)


@pytest.mark.parametrize(
    ("old", "new", "key", "line"),
    [
        ("global_batch_size = 128", "global_batch_size = 100", "training.global_batch_size", 8),
        ('"Interleaved1F1B"', '"Chimera"', "parallelism.pipeline_parallel_schedule", 17),
        ('"8B"', '"9B"', "model.flavor", 4),
        (
            "tensor_parallel_degree = 2",
            "tensor_parallel_degree = 3",
            "parallelism.pipeline_parallel_degree",
            16,
        ),
    ],
)
def test_what_torchtitan_refuses(tmp_path: Path, old: str, new: str, key: str, line: int) -> None:
    reading = read(tmp_path, "train.toml", TORCHTITAN.replace(old, new), world_size=32)
    assert (key, line) in [(one.flag, one.line) for one in reading.problems if one.severity != "note"]


def test_nanotron(tmp_path: Path) -> None:
    reading = read(tmp_path, "config.yaml", NANOTRON)
    assert reading.layout is not None and reading.world_size == 8
    assert reading.layout.describe() == "tp=2+sp pp=1 dp=4 zero=1 mbs=2 x 8 recompute=full"
    answer = check(tmp_path / "config.yaml", device="h100")
    assert answer.legal and answer.fits and answer.gain is not None and answer.gain >= 1
    wrong = read(tmp_path, "config.yaml", NANOTRON.replace("zero_stage: 1", "zero_stage: 3"))
    assert [one.flag for one in wrong.problems if one.severity == "illegal"] == ["optimizer.zero_stage"]
