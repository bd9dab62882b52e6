"""Configurations of GPT-NeoX are read as its own arguments are: several files, hyphens and defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from costmodels.errors import InputError
from tests.planner.test_public_cases import written

MODEL = """\
{"pipe_parallel_size": 1, "model_parallel_size": 2, "num_layers": 4, "hidden_size": 512, "norm": "rmsnorm",
"num_attention_heads": 8, "seq_length": 512, "max_position_embeddings": 512, "pos_emb": "rotary"
}
"""

TRAINING = """\
{"precision": "bfloat16", "zero_optimization": {"stage": 1},
"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2
}
"""


def test_files_of_one_job_are_read_together(tmp_path: Path) -> None:
    setup = '{"data_path": "data/enwik8", "vocab_file": "data/gpt2-vocab.json", "launcher": "slurm"}\n'
    texts = {"model.yml": MODEL, "training.yml": TRAINING, "setup.yml": setup}
    found = written(tmp_path, texts, world_size=8)
    assert found.legal and found.layout.describe().startswith("tp=2 pp=1 dp=4 zero=1 mbs=4 x 2")
    wrong = TRAINING.replace('"bfloat16"', '"bfloat16", "new_batch_size": 4')
    found = written(tmp_path, {**texts, "training.yml": wrong}, world_size=8)
    (problem,) = [one for one in found.reading.problems if one.severity == "unknown"]
    assert problem.flag == "new_batch_size" and Path(problem.file).name == "training.yml"


def test_a_key_in_two_files_is_refused(tmp_path: Path) -> None:
    texts = {"model.yml": MODEL, "training.yml": TRAINING.replace("{", '{"num-layers": 8, ', 1)}
    with pytest.raises(InputError, match="both have the key num-layers"):
        written(tmp_path, texts, world_size=8)


def test_keys_with_hyphens_are_the_same_keys(tmp_path: Path) -> None:
    whole = MODEL.replace("\n}\n", ",\n") + TRAINING.removeprefix("{")
    hyphens = whole.replace("_", "-")
    found = [written(tmp_path, {"job.yml": text}, world_size=8) for text in (whole, hyphens)]
    assert found[0].legal and found[0].layout == found[1].layout
    assert [one.reading.problems for one in found] == [(), ()]


@pytest.mark.parametrize(
    ("keys", "layers", "top_k"),
    [
        ('"moe_num_experts": 8', 4, 1),
        ('"moe_num_experts": 8, "moe_top_k": 2, "moe_expert_interval": 2', 2, 2),
        ('"moe_num_experts": 1', 0, 1),
    ],
)
def test_layers_with_experts_have_gpt_neoxs_defaults(
    tmp_path: Path, keys: str, layers: int, top_k: int
) -> None:
    text = MODEL.replace("\n}\n", f",\n{keys},\n") + TRAINING.removeprefix("{")
    model = written(tmp_path, {"job.yml": text}, world_size=8).reading.model
    assert model is not None and model.moe_layers == layers
    assert not layers or model.top_k == top_k


def test_the_base_of_rotary_positions_is_read(tmp_path: Path) -> None:
    text = MODEL.replace("\n}\n", ',\n"rotary_emb_base": 1000000,\n') + TRAINING.removeprefix("{")
    model = written(tmp_path, {"job.yml": text}, world_size=8).reading.model
    assert model is not None and model.rope_theta == 1e6
