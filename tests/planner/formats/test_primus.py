"""Experiments of Primus are read as the job that it starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from costmodels.catalogue import load_model
from costmodels.errors import InputError
from planner import check
from planner.inputs.model import with_seq
from tests.planner.test_public_cases import Read, written

EXPERIMENT = """\
work_group: ${{TEAM:team}}
exp_name: small
modules:
  pre_trainer:
    framework: {framework}
    config: pre_trainer.yaml
    model: {model}
    overrides:
"""


def experiment(overrides: str, model: str = "llama3.1_8B.yaml", framework: str = "megatron") -> str:
    """An experiment with these lines of overrides."""
    head = EXPERIMENT.format(framework=framework, model=model)
    return head + "".join(f"      {line}\n" for line in overrides.splitlines())


def read_one(folder: Path, overrides: str, files: Mapping[str, str] | None = None, **given: Any) -> Read:
    """The reading of an experiment, with the files beside it."""
    text = experiment(
        overrides, **{name: given.pop(name) for name in ("model", "framework") if name in given}
    )
    return written(folder, {"experiment.yaml": text, **(files or {})}, world_size=16, **given)


def test_overrides_come_before_the_modules_defaults(tmp_path: Path) -> None:
    read = read_one(
        tmp_path,
        "tensor_model_parallel_size: 2\npipeline_model_parallel_size: ${PP:2}\nglobal_batch_size: 64\n"
        "recompute_granularity: full\nrecompute_method: uniform\nrecompute_num_layers: 1\nfp8: hybrid",
    )
    assert read.legal and read.reading.framework == "primus"
    # Microbatches of 2 sequences, the distributed optimizer and sequence parallelism are the modules'.
    assert read.shown == "tp=2+sp pp=2 dp=4 zero=1 mbs=2 x 8 recompute=full"
    assert read.reading.model == with_seq(load_model("llama3.1-8b"), 1024)
    assert read.reading.precision == "fp8"


def test_variables_are_given_from_outside(tmp_path: Path) -> None:
    read = read_one(tmp_path, "pipeline_model_parallel_size: ${PP:2}", define={"PP": "4"})
    assert read.layout.pipeline_parallel == 4
    with pytest.raises(InputError, match="no variable, flag or key"):
        read_one(tmp_path, "pipeline_model_parallel_size: ${PP:2}", define={"QQ": "4"})


@pytest.mark.parametrize(
    ("overrides", "unknown"),
    [
        ("patch_zero_bubble: true", "patch_zero_bubble"),
        ("recompute_layer_ids: [0, 3]", "recompute_layer_ids"),
        ("lora:\n  rank: 8", "lora.rank"),
        ("hidden_size: 512", "hidden_size"),
        ("some_parallel_degree: 4", "some_parallel_degree"),
    ],
)
def test_what_decides_and_is_not_read_is_not_known(overrides: str, unknown: str, tmp_path: Path) -> None:
    read = read_one(tmp_path, f"global_batch_size: 32\n{overrides}")
    assert read.legal is None and unknown in read.unknown
    usual = overrides.partition(":")[0] + ": null"
    assert read_one(tmp_path, f"global_batch_size: 32\n{usual}").legal


def test_a_module_that_nobody_knows_has_to_be_given(tmp_path: Path) -> None:
    text = experiment("micro_batch_size: 1").replace("pre_trainer.yaml", "own.yaml")
    assert written(tmp_path, {"experiment.yaml": text}, world_size=8).unknown == (
        "modules.pre_trainer.config",
    )
    own = "extends:\n  - base.yaml\nglobal_batch_size: 32\nbf16: true\nseq_length: 2048\n"
    read = written(
        tmp_path,
        {"experiment.yaml": text, "own.yaml": own, "base.yaml": "micro_batch_size: 4\n"},
        world_size=8,
    )
    # The experiment's own keys come first, then its module's, then those of the module's base.
    assert read.legal and read.shown == "tp=1 pp=1 dp=8 zero=0 mbs=1 x 4 recompute=none"


PRESET = """\
extends: [base.yaml]
num_layers: 4
hidden_size: 256
num_attention_heads: 4
vocab_size: 1000
num_experts: null
moe_router_topk: 2
kv_lora_rank: 32
"""
BASE = """\
num_layers: 40
ffn_hidden_size: 512
swiglu: true
add_bias_linear: false
normalization: RMSNorm
position_embedding_type: rope
max_position_embeddings: 4096
untie_embeddings_and_output_weights: true
tensor_model_parallel_size: 1
"""


def test_a_preset_is_read_with_what_it_extends(tmp_path: Path) -> None:
    files = {"own.yaml": PRESET, "base.yaml": BASE}
    read = read_one(tmp_path, "global_batch_size: 32", files, model="own.yaml")
    assert read.legal
    model = read.reading.model
    assert model is not None
    assert (model.layers, model.hidden, model.ffn, model.tied, model.experts) == (4, 256, 512, False, 0)
    assert (model.gated, model.norm, model.linear_bias) == (True, "rmsnorm", False)


def test_a_preset_without_what_it_extends_is_not_known(tmp_path: Path) -> None:
    read = read_one(tmp_path, "global_batch_size: 32", {"own.yaml": PRESET}, model="own.yaml")
    (missing,) = [problem for problem in read.reading.problems if problem.flag == "extends"]
    assert read.legal is None
    assert (missing.file, missing.line) == ("own.yaml", 1) and "base.yaml is not given" in missing.text


@pytest.mark.parametrize(
    ("overrides", "model", "ranks"),
    [
        ("", "deepseek_v2_lite.yaml", 8),
        ("\nexpert_model_parallel_size: 2", "deepseek_v2_lite.yaml", 2),
        ("", "qwen3_30B_A3B.yaml", 1),
    ],
)
def test_experts_have_the_ranks_of_their_preset(
    overrides: str, model: str, ranks: int, tmp_path: Path
) -> None:
    read = read_one(tmp_path, f"global_batch_size: 32{overrides}", model=model)
    assert read.layout.expert_parallel == ranks


def test_jobs_of_torchtitan_are_torchtitans(tmp_path: Path) -> None:
    overrides = (
        "training:\n  local_batch_size: 2\n  seq_len: 4096\nparallelism:\n  tensor_parallel_degree: 4\n"
        "primus_turbo:\n  enable_primus_turbo: true"
    )
    read = read_one(tmp_path, overrides, framework="torchtitan", model="llama3.1_8B-fp8.yaml")
    assert read.legal and read.reading.engine == "torchtitan" and read.reading.precision == "fp8"
    # Primus recomputes nothing unless it is asked, as torchtitan does.
    assert read.shown.startswith("tp=4+sp pp=1 dp=4 zero=3 mbs=2 x 1 recompute=none")


def test_other_frameworks_are_refused_in_a_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="trains with maxtext"):
        read_one(tmp_path, "steps: 3", framework="maxtext")


def test_changes_are_in_the_words_of_the_file(tmp_path: Path) -> None:
    overrides = (
        "global_batch_size: 32\ntensor_model_parallel_size: 4\nsequence_parallel: true\nmicro_batch_size: 1"
    )
    files = {"experiment.yaml": experiment(overrides, "own.yaml"), "own.yaml": PRESET, "base.yaml": BASE}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    answer = check([tmp_path / name for name in files], device="h100", world_size=8)
    changes = {change.flag: change for change in answer.changes}
    degree = changes["tensor_model_parallel_size"]
    assert (degree.before, degree.line) == (
        "4",
        1 + files["experiment.yaml"].splitlines().index("      tensor_model_parallel_size: 4"),
    )
    assert not [name for name in changes if name.startswith("--")]
