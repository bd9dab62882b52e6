"""Scripts of slime are read as the job of its actor: what trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from costmodels.catalogue import load_model
from costmodels.errors import InputError
from planner.inputs.model import with_seq
from tests.planner.test_public_cases import Read, written

SCRIPT = """\
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"
source "${SCRIPT_DIR}/models/own.sh"
CKPT_ARGS=(
   --hf-checkpoint /root/Qwen3-4B
   #--hf-checkpoint /root/other
)
ROLLOUT_ARGS=(--rollout-batch-size 16 --n-samples-per-prompt 4 --rollout-max-response-len 2048 EXTRA)
PERF_ARGS=(
   --tensor-model-parallel-size 2
   --sequence-parallel
   --recompute-granularity full
   --recompute-method uniform
   --recompute-num-layers 1
)
ray job submit --address="http://127.0.0.1:8265" -- python3 train.py \\
   --actor-num-nodes 2 \\
   --actor-num-gpus-per-node ${GPUS:-4} \\
   --colocate \\
   ${MODEL_ARGS[@]} \\
   ${CKPT_ARGS[@]} \\
   ${ROLLOUT_ARGS[@]} \\
   ${PERF_ARGS[@]}
"""

MODEL = """\
MODEL_ARGS=(
   --num-layers 4 --hidden-size 256 --num-attention-heads 4 --ffn-hidden-size 512 --vocab-size 1000
   --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
   --untie-embeddings-and-output-weights --rotary-base "${BASE:-10000}"
)
"""

ALONE = {"colocate": "", "seq_length": "1024", "objective": "next-token"}
"""Settings that a verdict on the actor by itself needs."""


def script(folder: Path, extra: str = "--global-batch-size 64", model: bool = True, **given: Any) -> Read:
    """The reading of a script with these further arguments, and with the file of its model or without it."""
    texts = {"run.sh": SCRIPT.replace("EXTRA", extra)} | ({"own.sh": MODEL} if model else {})
    return written(folder, texts, **given)


def test_the_actor_is_megatrons_job(tmp_path: Path) -> None:
    read = script(tmp_path, define=ALONE)
    assert read.legal and read.reading.framework == "slime"
    # The distributed optimizer, bf16 and microbatches of one sample are slime's.
    assert read.shown == "tp=2+sp pp=1 dp=4 zero=1 mbs=1 x 16 recompute=full"
    model = read.reading.model
    assert model is not None and (model.layers, model.hidden, model.seq) == (4, 256, 1024)
    assert read.reading.world_size == 8 and read.reading.precision == "bf16"


def test_rollouts_and_lengths_of_samples_are_not_known(tmp_path: Path) -> None:
    read = script(tmp_path, "--global-batch-size 64 --use-dynamic-batch-size --max-tokens-per-gpu 4096")
    assert read.legal is None
    assert set(read.unknown) == {"--colocate", "--seq-length", "--use-dynamic-batch-size", ""}
    assert read.reading.objective == "rewards"
    assert read.layout.tensor_parallel == 2  # Written values are read all the same.


def test_steps_of_a_rollout_make_the_batch(tmp_path: Path) -> None:
    assert script(tmp_path, "--num-steps-per-rollout 2", define=ALONE).layout.global_batch_size == 32


def test_samples_of_a_step_and_the_vocabulary_have_no_default(tmp_path: Path) -> None:
    assert script(tmp_path, "--balance-data", define=ALONE).unknown == ("--global-batch-size",)
    own = MODEL.replace("--vocab-size 1000", "")
    texts = {"run.sh": SCRIPT.replace("EXTRA", "--global-batch-size 64"), "own.sh": own}
    known = written(tmp_path, texts, define=ALONE).reading.model
    assert known is not None and known.vocab == load_model("qwen3-4b").vocab  # The tokenizer's.
    texts["run.sh"] = texts["run.sh"].replace("Qwen3-4B", "own")
    assert written(tmp_path, texts, define=ALONE).unknown == ("--vocab-size",)


def test_without_its_file_the_checkpoint_names_the_model(tmp_path: Path) -> None:
    read = script(tmp_path, model=False, define=ALONE)
    assert read.legal and read.reading.model == with_seq(load_model("qwen3-4b"), 1024)
    assert read.reading.assumed == ("the model is qwen3-4b of the catalogue",)
    (tmp_path / "other").mkdir()
    other = SCRIPT.replace("Qwen3-4B", "Own-4B").replace("EXTRA", "--global-batch-size 64")
    unknown = written(tmp_path / "other", {"run.sh": other}, define=ALONE)
    assert unknown.legal is None and unknown.unknown == ("--hf-checkpoint",)


@pytest.mark.parametrize(
    "extra", ["--use-critic", "--enable-mtp-training", "--lora-rank 8", "--own-parallel 2"]
)
def test_what_makes_another_job_of_it_is_not_known(extra: str, tmp_path: Path) -> None:
    read = script(tmp_path, f"--global-batch-size 64 {extra}", define=ALONE)
    assert read.legal is None and read.unknown == (extra.partition(" ")[0],)
    name = extra.partition(" ")[0].lstrip("-")
    assert script(tmp_path, f"--global-batch-size 64 {extra}", define={**ALONE, name: ""}).legal


def test_devices_from_outside(tmp_path: Path) -> None:
    assert script(tmp_path, define={**ALONE, "GPUS": "8"}).reading.world_size == 16
    text = SCRIPT.replace("${GPUS:-4}", "$GPUS").replace("EXTRA", "--global-batch-size 64")
    read = written(tmp_path, {"run.sh": text, "own.sh": MODEL}, define=ALONE)
    assert read.legal is None and read.unknown == ("--actor-num-gpus-per-node",)
    assert written(tmp_path, {"run.sh": text, "own.sh": MODEL}, define=ALONE, world_size=8).legal


def test_a_definition_of_what_nothing_has_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="define colocated"):
        script(tmp_path, define={"colocated": ""})


def test_flags_of_megatron_are_no_flags_of_slimes_own(tmp_path: Path) -> None:
    model = script(tmp_path, define=ALONE).reading.model
    # Linear layers without biases: 4 layers of 256 x (4 x 256 + 3 x 512 + 2), two embeddings, a norm.
    assert model is not None and not model.linear_bias
    assert model.parameters == 4 * 256 * (4 * 256 + 3 * 512 + 2) + 2 * 1000 * 256 + 256
