"""torchtitan's configurations in Python, and its files of every release, are the same job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from costmodels.catalogue import load_model
from costmodels.errors import InputError
from planner.inputs.model import with_seq
from tests.planner.test_public_cases import Read, written

REGISTRY = """\
from torchtitan.components.optimizer import default_adamw
from torchtitan.components.quantization import Float8LinearConverter, OwnConverter
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.trainer import Trainer

from . import model_registry


def llama3_8b() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(
        loss=ChunkedLossWrapper.Config(vocab_size=decoder_vocab_size(model_spec)),
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        training=TrainingConfig(local_batch_size=2, seq_len=4096, steps=1000),
        parallelism=ParallelismConfig(tensor_parallel_degree=2),
        activation_checkpoint=FullAC.Config(),
    )


def llama3_8b_wide(degree: int = 4) -> Trainer.Config:
    config = llama3_8b()
    config.parallelism.tensor_parallel_degree = degree
    config.training.local_batch_size *= 2
    return config


def llama3_8b_without() -> Trainer.Config:
    config = llama3_8b()
    config.parallelism = ParallelismConfig(data_parallel_replicate_degree=2)
    config.activation_checkpoint = None
    return config


def llama3_8b_narrow() -> Trainer.Config:
    config = llama3_8b()
    config.model_spec = model_registry("8B", converters=[Float8LinearConverter.Config(recipe_name="rowwise")])
    return config


def llama3_8b_own() -> Trainer.Config:
    config = llama3_8b()
    config.model_spec = model_registry("8B", converters=[OwnConverter.Config(rank=8)])
    return config


def llama3_8b_pipeline() -> Trainer.Config:
    config = llama3_8b()
    config.training = TrainingConfig(num_tokens_per_microbatch_per_dp_rank=2 * 4096, max_context_length=4096)
    config.parallelism = ParallelismConfig(pipeline_parallel_degree=2, num_pp_microbatches=4)
    return config


def llama3_8b_listed() -> Trainer.Config:
    config = llama3_8b_pipeline()
    config.parallelism.module_fqns_per_model_part = [
        ["tok_embeddings", *[]] + ["layers." + str(0)],
        ["layers.1", "norm", "output"],
    ]
    return config


def llama3_8b_if(wide: bool = False) -> Trainer.Config:
    config = llama3_8b()
    if wide:
        config.parallelism.tensor_parallel_degree = 8
    return config
"""


def registry(folder: Path, recipe: str, text: str = REGISTRY, **given: Any) -> Read:
    """The reading of a configuration of a registry."""
    define = {"recipe": recipe, **given.pop("define", {})}
    (folder / "llama3").mkdir(exist_ok=True)
    return written(folder, {"llama3/config_registry.py": text}, define=define, world_size=16, **given)


@pytest.mark.parametrize(
    ("recipe", "shown"),
    [
        ("llama3_8b", "tp=2+sp pp=1 dp=8 zero=3 mbs=2 x 1 recompute=full"),
        ("llama3_8b_wide", "tp=4+sp pp=1 dp=4 zero=3 mbs=4 x 1 recompute=full"),
        ("llama3_8b_without", "tp=1 pp=1 dp=16 zero=3 zero_replicas=2 mbs=2 x 1 recompute=none"),
        ("llama3_8b_narrow", "tp=2+sp pp=1 dp=8 zero=3 mbs=2 x 1 recompute=full fp8_recipe=rowwise"),
        ("llama3_8b_pipeline", "tp=1 pp=2 dp=8 zero=2 mbs=2 x 4 recompute=full"),
        ("llama3_8b_if", "tp=2+sp pp=1 dp=8 zero=3 mbs=2 x 1 recompute=full"),
    ],
)
def test_a_configuration_in_python_is_followed(recipe: str, shown: str, tmp_path: Path) -> None:
    read = registry(tmp_path, recipe)
    assert read.legal, read.reading.problems
    assert read.shown == shown.replace("zero=2", "zero=1")  # A pipeline keeps its gradients whole.
    assert read.reading.framework == "torchtitan" and read.reading.training["--lr"] == "0.0003"
    assert read.reading.model == with_seq(load_model("llama3-8b"), 4096)


def test_parameters_are_given(tmp_path: Path) -> None:
    assert registry(tmp_path, "llama3_8b_if", define={"wide": "true"}).layout.tensor_parallel == 8
    assert registry(tmp_path, "llama3_8b_wide", define={"degree": "2"}).layout.tensor_parallel == 2


def test_which_configuration_trains_has_to_be_said(tmp_path: Path) -> None:
    (tmp_path / "llama3").mkdir()
    read = written(tmp_path, {"llama3/config_registry.py": REGISTRY}, world_size=16)
    assert read.legal is None and read.unknown == ("recipe",)
    one = REGISTRY.partition("def llama3_8b_wide")[0]
    alone = written(tmp_path, {"llama3/config_registry.py": one}, world_size=16)
    assert alone.legal and alone.reading.assumed[0] == "recipe llama3_8b"
    with pytest.raises(InputError, match="llama3_8b_wide"):
        registry(tmp_path, "llama3_8b_wid")


@pytest.mark.parametrize(
    ("recipe", "old", "new", "unknown"),
    [
        ("llama3_8b_own", "", "", "model.converters"),
        ("llama3_8b_listed", "", "", "parallelism.module_fqns_per_model_part"),
        ("llama3_8b", "seq_len=4096", "seq_len=own()", "training.seq_len"),
        ("llama3_8b", "        model_spec=model_spec,\n", "", "model_spec"),
        ("llama3_8b", 'model_registry("8B")', "model_registry(SIZE)", "model.flavor"),
        ("llama3_8b", "steps=1000", 'dtype="bfloat16"', "training.dtype"),
        ("llama3_8b", "steps=1000", "own_batch_size=4", "training.own_batch_size"),
        ("llama3_8b_pipeline", "2 * 4096", "6000", "training.num_tokens_per_microbatch_per_dp_rank"),
        ("llama3_8b_if", "if wide", "if wide or own()", "parallelism.tensor_parallel_degree"),
    ],
)
def test_what_cannot_be_evaluated_or_priced_is_not_known(
    recipe: str, old: str, new: str, unknown: str, tmp_path: Path
) -> None:
    read = registry(tmp_path, recipe, REGISTRY.replace(old, new) if old else REGISTRY)
    assert read.legal is None and unknown in read.unknown


def test_configurations_start_from_those_of_other_files(tmp_path: Path) -> None:
    child = """\
from torchtitan.models.llama3.config_registry import llama3_8b
from torchtitan.trainer import Trainer


def own_8b() -> Trainer.Config:
    config = llama3_8b()
    config.parallelism.tensor_parallel_degree = 8
    return config
"""
    (tmp_path / "llama3").mkdir()
    files = {"own.py": child, "llama3/config_registry.py": REGISTRY}
    both = written(tmp_path, files, world_size=16, define={"recipe": "own_8b"})
    assert both.legal and both.layout.tensor_parallel == 8
    alone = written(tmp_path, {"own.py": child}, world_size=16, define={"recipe": "own_8b"})
    (problem,) = [one for one in alone.reading.problems if "llama3_8b()" in one.text]
    assert alone.legal is None and problem.line == 6


COMMAND = """\
torchrun --nproc_per_node 8 -m torchtitan.train --module llama3 --config llama3_8b \\
  --training.local_batch_size 4
"""


def test_a_command_changes_the_configuration_that_it_names(tmp_path: Path) -> None:
    (tmp_path / "llama3").mkdir()
    both = written(tmp_path, {"run.sh": COMMAND, "llama3/config_registry.py": REGISTRY}, world_size=8)
    assert both.legal and both.shown == "tp=2+sp pp=1 dp=4 zero=3 mbs=4 x 1 recompute=full"
    assert both.reading.model == with_seq(load_model("llama3-8b"), 4096)
    alone = written(tmp_path, {"run.sh": COMMAND}, world_size=8)
    assert alone.legal is None
    assert {"training.seq_len", "activation_checkpoint.mode"} <= set(alone.unknown)
    assert "training.local_batch_size" not in alone.unknown


FILE = """\
model = {name = "llama3", flavor = "8B"}
parallelism = {data_parallel_shard_degree = -1, tensor_parallel_degree = 2}
training = {local_batch_size = 1, seq_len = 4096}
activation_checkpoint = {mode = "full"}
"""


@pytest.mark.parametrize(
    ("command", "devices"),
    [
        ("MODULE=llama3 CONFIG=llama3_8b ./run_train.sh --training.local_batch_size 4", 8),
        ("export MODULE=llama3 CONFIG=llama3_8b NGPU=4\nbash run_train.sh --training.local_batch_size=4", 4),
        ("NGPU=16 CONFIG=llama3_8b srun ./run_train.sh --training.local_batch_size 4", 16),
        (f"{COMMAND}", 8),
    ],
)
def test_its_own_script_takes_variables(command: str, devices: int, tmp_path: Path) -> None:
    (tmp_path / "llama3").mkdir()
    both = written(tmp_path, {"run.sh": command, "llama3/config_registry.py": REGISTRY})
    assert both.legal and both.shown == f"tp=2+sp pp=1 dp={devices // 2} zero=3 mbs=4 x 1 recompute=full"
    assert both.reading.world_size == both.reading.local_world_size == devices
    alone = written(tmp_path, {"run.sh": command})
    assert alone.legal is None and "training.seq_len" in alone.unknown


@pytest.mark.parametrize(
    "command",
    [
        "CONFIG_FILE=train_configs/own.toml ./run_train.sh --training.local_batch_size 4",
        "torchrun --nproc_per_node 8 torchtitan/train.py --job.config_file own.toml "
        "--training.local_batch_size 4",
    ],
)
def test_a_command_changes_the_file_that_it_names(command: str, tmp_path: Path) -> None:
    both = written(tmp_path, {"run.sh": command, "own.toml": FILE})
    assert both.legal and both.shown == "tp=2+sp pp=1 dp=4 zero=3 mbs=4 x 1 recompute=full"
    alone = written(tmp_path, {"run.sh": command})
    assert alone.legal is None and alone.unknown == ("job.config_file",)


def test_two_commands_are_two_jobs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="each start a job"):
        written(tmp_path, {"one.sh": COMMAND, "two.sh": COMMAND})


MODEL = """\
[model]
name = "llama3"
flavor = "8B"
norm_type = "rmsnorm"

[activation_checkpoint]
mode = "full"
"""

RELEASES = {
    "June 2024": """\
[training]
batch_size = 8
seq_len = 4096
data_parallel_degree = -1
tensor_parallel_degree = 2
fp8_linear = ""

[experimental]
pipeline_parallel_degree = 2
pipeline_parallel_microbatches = 4
""",
    "October 2024": """\
[training]
batch_size = 8
seq_len = 4096
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 2

[experimental]
pipeline_parallel_degree = 2
pipeline_parallel_microbatches = 4
context_parallel_degree = 1

[float8]
enable_float8_linear = false
""",
    "March 2025": """\
[training]
batch_size = 8
seq_len = 4096

[parallelism]
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_microbatches = 4
pipeline_parallel_split_points = ["layers.16"]
""",
    "0.2": """\
[training]
local_batch_size = 8
seq_len = 4096

[parallelism]
tensor_parallel_degree = 2
pipeline_parallel_degree = 2
pipeline_parallel_microbatch_size = 2
module_fqns_per_model_part = [["tok_embeddings", LOWER], [UPPER, "norm", "output"]]
""".replace("LOWER", ", ".join(f'"layers.{layer}"' for layer in range(16))).replace(
        "UPPER", ", ".join(f'"layers.{layer}"' for layer in range(16, 32))
    ),
}


@pytest.mark.parametrize("release", RELEASES)
def test_files_of_every_release_have_their_names(release: str, tmp_path: Path) -> None:
    read = written(tmp_path, {"job.toml": MODEL + RELEASES[release]}, world_size=16)
    assert read.legal, read.reading.problems
    assert read.shown == "tp=2+sp pp=2 dp=4 zero=1 mbs=2 x 4 recompute=full"
    assert read.layout.layers_per_stage == (16, 16)


@pytest.mark.parametrize(
    ("old", "new", "shown"),
    [
        # As many microbatches as stages, of which the middle ones have the layers that are left over.
        ("pipeline_parallel_microbatches = 4\n", "", (2, 4)),
        ("pipeline_parallel_microbatches = 4\n", 'pipeline_parallel_schedule = "Interleaved1F1B"\n', (4, 2)),
    ],
)
def test_defaults_are_those_of_the_release(
    old: str, new: str, shown: tuple[int, int], tmp_path: Path
) -> None:
    read = written(tmp_path, {"job.toml": MODEL + RELEASES["June 2024"].replace(old, new)}, world_size=16)
    assert read.legal and (read.layout.micro_batches, read.layout.micro_batch_size) == shown


def test_faults_are_named_in_the_words_of_the_file(tmp_path: Path) -> None:
    text = MODEL + RELEASES["June 2024"].replace("microbatches = 4", "microbatches = 3")
    (problem,) = written(tmp_path, {"job.toml": text}, world_size=16).reading.problems
    assert (problem.severity, problem.flag) == ("illegal", "training.batch_size")
    assert text.splitlines()[(problem.line or 0) - 1] == "batch_size = 8"
    words = written(tmp_path, {"job.toml": text}, world_size=16).reading.words
    assert words["parallelism.pipeline_parallel_degree"] == "experimental.pipeline_parallel_degree"
    defined = written(tmp_path, {"job.toml": text}, world_size=16, define={"batch_size": "9"})
    assert defined.legal and defined.layout.micro_batch_size == 3


def test_float8_of_early_releases(tmp_path: Path) -> None:
    text = RELEASES["October 2024"].replace("float8_linear = false", "float8_linear = true")
    assert written(tmp_path, {"job.toml": MODEL + text}, world_size=16).reading.precision == "fp8"
