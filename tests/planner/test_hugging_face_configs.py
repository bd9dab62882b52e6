"""Jobs of Hugging Face's trainer: commands, accelerate's YAML and DeepSpeed's JSON, alone and together."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from costmodels.errors import InputError
from planner.formats.facts.reading import Reading
from planner.formats.files import read_files

SCRIPT = """#!/bin/bash
GPUS=${GPUS:-8}
torchrun --nproc_per_node=$GPUS train.py \\
    --model_name_or_path meta-llama/Llama-2-7b-hf --bf16 True \\
    --per_device_train_batch_size 4 --gradient_accumulation_steps 8 \\
    --learning_rate 2e-5 --model_max_length 2048 --seed 7 \\
    --gradient_checkpointing EXTRA
"""

DEEPSPEED = """{
\t"bf16": {"enabled": "auto"},
\t"zero_optimization": {
\t\t"stage": 3,
\t\t"offload_optimizer": {"device": "cpu"}
\t},
\t"gradient_accumulation_steps": "auto",
\t"train_batch_size": "auto",
\t"train_micro_batch_size_per_gpu": "auto"
}"""

ACCELERATE = """
distributed_type: FSDP
mixed_precision: bf16
num_machines: 2
num_processes: 16
fsdp_config:
  fsdp_sharding_strategy: HYBRID_SHARD
  fsdp_activation_checkpointing: true
"""


def read(tmp_path: Path, **texts: str) -> Reading:
    """The reading of files with these texts together; `_` in a name stands for its point."""
    files = []
    for name, text in texts.items():
        files.append(tmp_path / name.replace("_", "."))
        files[-1].write_text(text.replace("EXTRA", ""))
    return read_files(files)


@pytest.mark.parametrize(
    ("extra", "expected"),
    [
        ("", "tp=1 pp=1 dp=8 zero=0 mbs=4 x 8 recompute=full"),
        ("--fsdp 'full_shard auto_wrap'", "tp=1 pp=1 dp=8 zero=3 mbs=4 x 8 recompute=full"),
        (
            "--fsdp 'shard_grad_op offload'",
            "tp=1 pp=1 dp=8 zero=2 mbs=4 x 8 recompute=full offload=optimizer",
        ),
        ("--optim adafactor", "tp=1 pp=1 dp=8 zero=0 mbs=4 x 8 recompute=full optimizer=adafactor"),
    ],
)
def test_commands(tmp_path: Path, extra: str, expected: str) -> None:
    reading = read(tmp_path, run_sh=SCRIPT.replace("EXTRA", extra))
    assert reading.layout is not None and reading.layout.describe() == expected
    assert reading.model is not None and (reading.model.name, reading.model.seq) == ("llama2-7b", 2048)
    assert reading.precision == "bf16" and reading.training["--lr"] == "2e-5"


def test_a_command_with_the_file_of_deepspeed_that_it_names(tmp_path: Path) -> None:
    script = SCRIPT.replace("EXTRA", "--deepspeed ds.json")
    reading = read(tmp_path, run_sh=script, ds_json=DEEPSPEED)
    assert reading.layout is not None and reading.engine == "deepspeed"
    assert reading.layout.describe() == "tp=1 pp=1 dp=8 zero=3 mbs=4 x 8 recompute=full offload=optimizer"
    alone = read(tmp_path, run_sh=script)
    assert [(one.flag, one.line) for one in alone.problems if one.severity == "unknown"] == [
        ("--deepspeed", 7)
    ]


@pytest.mark.parametrize(
    ("old", "new", "key", "line"),
    [
        ('"train_batch_size": "auto"', '"train_batch_size": 100', "train_batch_size", 8),
        ('"stage": 3', '"stage": 4', "zero_optimization.stage", 4),
        ('"stage": 3', '"stage": 0', "zero_optimization.offload_optimizer.device", 5),
        ('"train_micro_batch_size_per_gpu": "auto"', '"train_micro_batch_size_per_gpu": 2',
         "train_micro_batch_size_per_gpu", 9),
        ('{"enabled": "auto"}', '{"enabled": true}, "fp16": {"enabled": true}', "fp16.enabled", 2),
    ],
)  # fmt: skip
def test_what_deepspeed_refuses(tmp_path: Path, old: str, new: str, key: str, line: int) -> None:
    reading = read(tmp_path, run_sh=SCRIPT, ds_json=DEEPSPEED.replace(old, new))
    wrong = [one for one in reading.problems if one.severity == "illegal"]
    assert [(one.flag, one.line) for one in wrong] == [(key, line)] and wrong[0].file.endswith("ds.json")


def test_accelerate_beside_a_command_and_a_model(tmp_path: Path) -> None:
    reading = read(tmp_path, run_sh=SCRIPT.replace("torchrun --nproc_per_node=$GPUS", "accelerate launch"),
                   fsdp_yaml=ACCELERATE)  # fmt: skip
    assert reading.layout is not None and (reading.world_size, reading.local_world_size) == (16, 8)
    assert reading.layout.describe() == "tp=1 pp=1 dp=16 zero=3 zero_replicas=2 mbs=4 x 8 recompute=full"


def test_most_positions_are_no_length_of_sequences(tmp_path: Path) -> None:
    """config.json says how long sequences may be; a model of the catalogue has the length of its training."""
    config = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 512, "num_attention_heads": 8}
    config |= {"vocab_size": 1000, "intermediate_size": 1024, "max_position_embeddings": 131072}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "fsdp.yaml").write_text(ACCELERATE)
    batch = {"per_device_train_batch_size": "1"}

    def unknown(*files: str, **given: Any) -> list[str]:
        reading = read_files([tmp_path / file for file in files], **given)
        return [one.flag for one in reading.problems if one.severity == "unknown"]

    assert unknown("fsdp.yaml", "config.json", define=batch) == ["--max_seq_length"]
    assert unknown("fsdp.yaml", "config.json", define=batch | {"max_seq_length": "2048"}) == []
    assert unknown("fsdp.yaml", model="llama2-7b", define=batch) == []


def test_two_files_of_one_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="each start a job"):
        read(tmp_path, a_json=DEEPSPEED, b_json=DEEPSPEED)
