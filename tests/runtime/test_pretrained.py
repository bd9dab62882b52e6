"""Training that begins with the weights of a Hugging Face model, and what lies beside its checkpoints."""

from __future__ import annotations

import json
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from costmodels.errors import InputError
from planner.options.batch import BatchOptions
from planner.options.cluster import ClusterOptions
from planner.options.model import ModelOptions
from planner.options.parallel import ParallelOptions
from runtime import checkpoint, convert, pretrain
from runtime.data.tokenizers import ByteTokenizer, load_tokenizer
from runtime.huggingface.folder_kind import COMPANIONS
from runtime.huggingface.model_folder import HuggingFaceModel
from runtime.huggingface.tokenizer_files import write_tokenizer
from runtime.job.initial_state import keep_companions
from runtime.job.job import Job
from runtime.job.job_folders import check_load
from runtime.settings.training_options import DataOptions, OutputOptions, TrainingOptions
from tests.support.hugging_face import hugging_face, skip_unless_there
from tests.support.jobs import write_corpus
from tests.support.models import MODELS
from tests.support.worker_pool import WorkerPool


def train(model: str, data: DataOptions, runs: list[OutputOptions]) -> str:
    """The output of a lone rank that trains `model` three times, to two iterations each."""
    dist.destroy_process_group()
    printed = StringIO()
    with redirect_stdout(printed):
        for output in runs:
            job = Job(
                model=ModelOptions(model=model, seq_length=16),
                cluster=ClusterOptions(device="cpu"),
                batch=BatchOptions(global_batch_size=2),
                parallel=ParallelOptions(fp32=True),
                training=TrainingOptions(train_iters=2, lr=1e-2),
                data=data,
                output=output,
            )
            pretrain.train(job)
            dist.destroy_process_group()
    # The process group that the pool waits for.
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    return printed.getvalue()


def test_a_hugging_face_model_is_trained_further(pool: WorkerPool, tmp_path: Path) -> None:
    skip_unless_there("llama")
    theirs, _ = hugging_face("llama", tmp_path / "hf")
    # The corpus is of bytes, and 256 ends a document.
    theirs.resize_token_embeddings(260)  # type: ignore[operator]
    theirs.save_pretrained(tmp_path / "hf")  # type: ignore[operator]
    write_tokenizer(tmp_path / "hf", ByteTokenizer())
    convert.from_hugging_face(tmp_path / "hf", tmp_path / "ours")
    data = DataOptions(data_path=[write_corpus(tmp_path)], split="90,10,0")
    ours, first, second = (str(tmp_path / name) for name in ("ours", "first", "second"))
    usual: dict[str, Any] = {"eval_iters": 0, "log_interval": 1}
    [printed] = pool.run(
        train,
        1,
        str(tmp_path / "hf"),
        data,
        [
            OutputOptions(load=ours, save=first, **usual),
            OutputOptions(load=first, save=first, **usual),
            OutputOptions(load=first, save=second, finetune=True, **usual),
        ],
    )
    assert f"loaded the weights of {ours}: starting at iteration 0" in printed
    assert f"nothing to do: {first} is at iteration 2 of --train-iters 2" in printed
    assert f"loaded the weights of {first}: starting at iteration 0" in printed
    run = checkpoint.read_run(checkpoint.iteration_folder(second, 2)).run_state()
    assert "weights_only" not in run and run["consumed_samples"] == 4
    # The run's own checkpoints have all that an export and a text need.
    convert.to_hugging_face(second, tmp_path / "back", dtype="bf16")
    before, after = HuggingFaceModel(tmp_path / "hf"), HuggingFaceModel(tmp_path / "back")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    key = "dtype" if "dtype" in config else "torch_dtype"
    assert after.config == config | {key: "bfloat16"}
    assert before.tensors.keys() == after.tensors.keys()
    name = "layers.1.mlp.up.weight"
    moved = (before.read_ours(name) - after.read_ours(name).float()).abs()
    assert after.read_ours(name).dtype == torch.bfloat16 and 1e-3 < float(moved.mean()) < 0.1
    tokenizer = load_tokenizer("HuggingFaceTokenizer", tokenizer_model=tmp_path / "back")
    assert tokenizer.decode(ByteTokenizer().encode(["é!"])[0]) == "é!"


def test_a_hugging_face_model_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match="a Hugging Face model; turn it into a checkpoint first: planner"):
        check_load(OutputOptions(load=str(tmp_path)))
    check_load(OutputOptions(load=str(tmp_path / "nothing yet")))


@pytest.mark.parametrize("named", [True, False])
def test_the_tokenizer_of_the_training_data_lies_beside_checkpoints(named: bool, tmp_path: Path) -> None:
    spec = MODELS["gpt2"].model_copy(update={"vocab": 300})
    data = DataOptions(data_path=["corpus"], tokenizer_type="ByteTokenizer" if named else None)
    keep_companions(OutputOptions(save=str(tmp_path)), data, spec)
    assert (tmp_path / COMPANIONS / "tokenizer.json").exists() == named
