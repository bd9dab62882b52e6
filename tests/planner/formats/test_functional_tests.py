"""Cases of Megatron-LM's functional tests are read as the command that their script makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from costmodels.errors import InputError
from planner.formats.facts.reading import Reading
from planner.formats.megatron.reader import read_megatron
from tests.planner.test_public_cases import written

CASE = """\
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
COMMON: &COMMON
  --num-layers: 4
  --hidden-size: 256
  --num-attention-heads: 4
  --seq-length: 512
  --max-position-embeddings: 512
  --vocab-size: 1000
  --bf16: true
  --lr: 1e-4
  --train-iters: 10
  --data-path: ${DATA_PATH}/text
  --num-experts: 4
  --moe-layer-freq: ([0]*1+[1]*3)
  --recompute-granularity: selective
  --recompute-modules: "[moe_act layernorm]"
  --sequence-parallel: true
MODEL_ARGS:
  <<: *COMMON
  --micro-batch-size: 2
  --global-batch-size: 16
  --tensor-model-parallel-size: 2
MODEL_ARGS_2:
  <<: *COMMON
  --micro-batch-size: 1
  --global-batch-size: 16
  --pipeline-model-parallel-size: 2
TEST_TYPE: regular
"""

COMMAND = """\
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 4 --hidden-size 256 --num-attention-heads 4 \\
  --seq-length 512 --max-position-embeddings 512 --vocab-size 1000 --bf16 --lr 1e-4 --train-iters 10 \\
  --data-path text --num-experts 4 --moe-layer-freq "([0]*1+[1]*3)" --recompute-granularity selective \\
  --recompute-modules moe_act layernorm --sequence-parallel """


def as_script(arguments: str) -> Reading:
    """The job of a functional test as a script."""
    reading = read_megatron(COMMAND + arguments, "job.sh", {})
    assert reading is not None and reading.layout is not None
    return reading


@pytest.mark.parametrize(
    ("define", "arguments"),
    [
        ({}, "--micro-batch-size 2 --global-batch-size 16 --tensor-model-parallel-size 2"),
        (
            {"RUN_NUMBER": "2"},
            "--micro-batch-size 1 --global-batch-size 16 --pipeline-model-parallel-size 2",
        ),
        (
            {"RUN_NUMBER": "3", "micro_batch_size": "1"},
            "--micro-batch-size 1 --global-batch-size 16 --tensor-model-parallel-size 2",
        ),
    ],
)
def test_a_case_is_the_command_of_one_of_its_runs(
    define: dict[str, str], arguments: str, tmp_path: Path
) -> None:
    read, script = written(tmp_path, {"model_config.yaml": CASE}, define=define), as_script(arguments)
    assert read.legal and read.reading.framework == "megatron"
    assert read.layout == script.layout and read.reading.model == script.model
    assert read.reading.assumed[0].startswith("8 devices of a node")


def test_more_devices_than_a_node_has_are_not_known(tmp_path: Path) -> None:
    wide = CASE.replace(
        "--tensor-model-parallel-size: 2",
        "--tensor-model-parallel-size: 4\n  --pipeline-model-parallel-size: 4",
    )
    read = written(tmp_path, {"model_config.yaml": wide})
    assert read.legal is None and read.reading.world_size is None
    assert written(tmp_path, {"model_config.yaml": wide}, define={"NUM_NODES": "2"}).legal


def test_the_case_says_the_devices_of_each_run(tmp_path: Path) -> None:
    devices = "MODEL_ENV_VARS:\n  MODEL_ARGS_2:\n    GPUS_PER_NODE: 4\n"
    read = written(tmp_path, {"model_config.yaml": devices + CASE}, define={"RUN_NUMBER": "2"})
    assert read.reading.world_size == 4


def test_what_the_script_passes_and_nothing_says_is_not_known(tmp_path: Path) -> None:
    text = CASE.replace("--micro-batch-size: 2", "--micro-batch-size: ${SIZE}")
    read = written(tmp_path, {"model_config.yaml": text})
    assert read.legal is None and read.unknown == ("--micro-batch-size",)
    assert written(tmp_path, {"model_config.yaml": text}, define={"SIZE": "2"}).legal


def test_cases_that_do_not_train_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="test of inference"):
        written(tmp_path, {"model_config.yaml": CASE + "MODE: inference\n"})
    read = written(tmp_path, {"model_config.yaml": CASE + "MODE: rl\n"})
    assert read.legal is None and "MODE" in read.unknown


def test_a_case_of_nemo_has_nemos_keys(tmp_path: Path) -> None:
    text = """\
MODEL_ARGS:
  trainer.num_nodes: 1
  trainer.devices: 8
  trainer.strategy.tensor_model_parallel_size: 2
  trainer.strategy.sequence_parallel: True
  model.config.num_layers: 4
  model.config.hidden_size: 256
  model.config.num_attention_heads: 4
  data.micro_batch_size: 1
  data.global_batch_size: 8
  data.seq_length: 512
"""
    read = written(tmp_path, {"model_config.yaml": text})
    assert read.reading.framework == "nemo" and read.layout.tensor_parallel == 2
