"""Recipes of Megatron-Bridge and NeMo, and NeMo's YAML, are read as the flags that they stand for."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from costmodels.errors import InputError
from planner import check
from planner.formats.facts.reading import Reading
from planner.formats.files import read_files

BRIDGE = """
SEQUENCE = 4 * 1024

def small_config():
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").get_model_config()
    cfg.model.tensor_model_parallel_size = 1
    cfg.train.micro_batch_size = 1
    cfg.train.global_batch_size = 128
    return cfg

def llama3_70b_pretrain_64gpu_h100_bf16_config():
    cfg = small_config()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-70B").get_model_config()
    cfg.model.tensor_model_parallel_size = 4
    cfg.model.pipeline_model_parallel_size = 4
    cfg.model.virtual_pipeline_model_parallel_size = 5
    cfg.model.context_parallel_size = 1
    cfg.model.sequence_parallel = True
    cfg.model.seq_length = SEQUENCE
    cfg.model.recompute_granularity = None
    os.remove("everything")
    return cfg
"""

NEMO2 = """
def trainer(tensor_parallelism: int = 4, pipeline_parallelism: int = 2, num_nodes: int = 4):
    strategy = run.Config(
        nl.MegatronStrategy,
        tensor_model_parallel_size=tensor_parallelism,
        pipeline_model_parallel_size=pipeline_parallelism,
        sequence_parallel=True,
    )
    return run.Config(nl.Trainer, devices=8, num_nodes=num_nodes, strategy=strategy)

def pretrain_recipe(num_nodes: int = 8):
    data = run.Config(MockDataModule, seq_length=8192, global_batch_size=128, micro_batch_size=1)
    model = run.Config(LlamaModel, config=run.Config(Llama3Config70B))
    return run.Partial(pretrain, model=model, trainer=trainer(num_nodes=num_nodes), data=data)
"""

NEMO = """
trainer: {num_nodes: 4, devices: 8, precision: bf16}
model:
  micro_batch_size: 2
  global_batch_size: 256
  tensor_model_parallel_size: 4
  pipeline_model_parallel_size: 2
  virtual_pipeline_model_parallel_size: 4
  encoder_seq_length: 2048
  max_position_embeddings: ${.encoder_seq_length}
  num_layers: 48
  hidden_size: 6144
  ffn_hidden_size: ${multiply:4, ${.hidden_size}}
  num_attention_heads: 64
  activations_checkpoint_granularity: selective
  sequence_parallel: True
  optim: {name: distributed_fused_adam, lr: 1e-4}
"""


def read(tmp_path: Path, name: str, text: str, define: dict[str, str] | None = None) -> Reading:
    """The reading of a file with this text."""
    file = tmp_path / name
    file.write_text(text)
    return read_files([file], define=define)


def test_a_recipe_of_megatron_bridge(tmp_path: Path) -> None:
    reading = read(tmp_path, "recipe.py", BRIDGE)
    assert (reading.framework, reading.world_size, reading.device) == ("megatron-bridge", 64, "h100")
    assert reading.model is not None and (reading.model.name, reading.model.seq) == ("llama3-70b", 4096)
    assert reading.layout is not None
    assert reading.layout.describe() == "tp=4+sp pp=4 vpp=5 dp=4 zero=1 mbs=1 x 32 recompute=none"
    answer = check(tmp_path / "recipe.py")
    sections = {change.flag.partition(".")[0] for change in answer.changes}
    assert answer.legal and sections <= {"model", "train", "ddp", "optimizer"}


def test_another_recipe_by_its_name(tmp_path: Path) -> None:
    reading = read(tmp_path, "recipe.py", BRIDGE, {"recipe": "small_config"})
    assert reading.model is not None and reading.model.name == "llama3-8b"
    with pytest.raises(InputError, match="no recipe 'smal_config'; did you mean"):
        read(tmp_path, "recipe.py", BRIDGE, {"recipe": "smal_config"})


def test_functions_that_call_each_other_pass_their_values_on(tmp_path: Path) -> None:
    reading = read(tmp_path, "recipe.py", NEMO2)
    assert (reading.framework, reading.world_size, reading.local_world_size) == ("nemo", 64, 8)
    assert reading.layout is not None
    assert reading.layout.describe() == "tp=4+sp pp=2 dp=8 zero=1 mbs=1 x 16 recompute=none"


def test_yaml_of_nemo(tmp_path: Path) -> None:
    reading = read(tmp_path, "conf.yaml", NEMO)
    assert reading.model is not None and reading.model.ffn == 24576 and reading.layout is not None
    assert reading.layout.describe() == "tp=4+sp pp=2 vpp=4 dp=4 zero=1 mbs=2 x 32 recompute=selective"
    wrong = read(tmp_path, "conf.yaml", NEMO.replace("global_batch_size: 256", "global_batch_size: 100"))
    found = [(one.flag, one.line) for one in wrong.problems if one.severity == "illegal"]
    assert found == [("model.global_batch_size", 5)]


OVERRIDES = """
TP=2
srun python3 /opt/NeMo/examples/megatron_gpt_pretraining.py --config-path=conf --config-name=gpt \\
  trainer.num_nodes=2 trainer.devices=8 model.tensor_model_parallel_size=$TP \\
  ++model.micro_batch_size=1 model.global_batch_size=32
"""


def test_keys_that_a_script_gives_change_those_of_a_file(tmp_path: Path) -> None:
    script, whole = tmp_path / "run.sh", tmp_path / "gpt.yaml"
    script.write_text(OVERRIDES)
    whole.write_text(
        "trainer: {num_nodes: 1, devices: 8, precision: bf16}\n"
        "model: {num_layers: 8, hidden_size: 512, num_attention_heads: 8, encoder_seq_length: 512, "
        "max_position_embeddings: 512, micro_batch_size: 4, tensor_model_parallel_size: 1}\n"
    )
    together = read_files([script, whole])
    assert together.framework == "nemo" and together.layout is not None and together.world_size == 16
    assert together.layout.describe() == "tp=2 pp=1 dp=8 zero=0 mbs=1 x 4 recompute=none"
    alone = read_files([script])
    assert alone.layout is None and "no --num-layers" in alone.problems[0].text.replace(
        "model.num_layers", "--num-layers"
    )


def test_python_without_a_recipe(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no function in it sets degrees of parallelism"):
        read(tmp_path, "other.py", "print('hello')\n")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(tmp_path, "recipe.py", BRIDGE + "\nSTYLE = [0x1for x in ()]\n").layout is not None
    with pytest.raises(InputError, match="not valid Python"):
        read(tmp_path, "other.py", "def f(:\n")


@pytest.mark.parametrize(
    ("imported", "called"),
    [
        ("from nemo.collections.llm.recipes import base", "base.pretrain_recipe"),
        ("from nemo.collections.llm.recipes import base as other", "other.pretrain_recipe"),
        ("from .base import pretrain_recipe as base_recipe", "base_recipe"),
    ],
)
def test_files_that_are_given_together_may_have_functions_of_one_name(
    tmp_path: Path, imported: str, called: str
) -> None:
    long = f"""
{imported}

def trainer(num_nodes: int = 2):
    return base.trainer(tensor_parallelism=8, pipeline_parallelism=1, num_nodes=num_nodes)

def pretrain_recipe(num_nodes: int = 2):
    recipe = {called}(num_nodes=num_nodes)
    recipe.trainer = trainer(num_nodes=num_nodes)
    recipe.data = run.Config(MockDataModule, seq_length=32768, global_batch_size=64, micro_batch_size=1)
    return recipe
"""
    for name, text in (("long.py", long), ("base.py", NEMO2)):
        (tmp_path / name).write_text(text)
    reading = read_files([tmp_path / "long.py", tmp_path / "base.py"])
    assert reading.layout is not None and reading.model is not None, reading.problems
    assert reading.layout.describe().startswith("tp=8+sp pp=1 dp=2") and reading.model.seq == 32768
    assert (reading.layout.global_batch_size, reading.world_size) == (64, 16)


@pytest.mark.parametrize(
    "lines, gradients",
    [
        ("cfg.ddp.grad_reduce_in_fp32 = True", 4),
        ("cfg.mixed_precision = 'bf16_mixed'\n    cfg.ddp.grad_reduce_in_fp32 = False", 4),
        ("cfg.mixed_precision.grad_reduce_in_fp32 = False\n    cfg.ddp.grad_reduce_in_fp32 = True", 2),
        ("cfg.ddp.grad_reduce_in_fp32 = False", 2),
    ],
)
def test_a_recipe_that_sums_gradients_in_fp32_is_priced_with_them(
    tmp_path: Path, lines: str, gradients: int
) -> None:
    file = tmp_path / "recipe.py"
    file.write_text(BRIDGE.replace("    os.remove", f"    {lines}\n    os.remove"))
    recipe = "llama3_70b_pretrain_64gpu_h100_bf16_config"
    found = check([file], define={"recipe": recipe}, device="h100", world_size=64)
    assert found.plan is not None
    stages = found.plan.estimate.memory
    assert stages[0].gradients == pytest.approx(gradients / 2 * stages[0].parameters)


def test_files_of_one_name_are_told_apart_by_the_folders_of_their_imports(tmp_path: Path) -> None:
    changed = """
from software.recipes.small.model import pretrain_config as _base

def pretrain_config():
    cfg = _base()
    cfg.train.micro_batch_size = 2
    return cfg
"""
    base = BRIDGE.replace("llama3_70b_pretrain_64gpu_h100_bf16_config", "pretrain_config")
    for folder, text in (("fast/small", changed), ("recipes/small", base)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "model.py").write_text(text)
    files = [tmp_path / "fast/small/model.py", tmp_path / "recipes/small/model.py"]
    reading = read_files(files, define={"recipe": "pretrain_config"}, world_size=64)
    assert reading.layout is not None and reading.model is not None, reading.problems
    assert (reading.layout.tensor_parallel, reading.layout.micro_batch_size) == (4, 2)
    alone = check(files[:1], define={"recipe": "pretrain_config"}, device="h100", world_size=64)
    assert alone.legal is None
    assert {"train.global_batch_size", "model.tensor_model_parallel_size"} <= {
        problem.flag for problem in alone.unknown
    }


TABLE = """
LAYOUTS = {(1, 1): None, (2, 1): [["embedding"] + ["decoder"] * 18, ["decoder"] * 14 + ["loss"]]}

def layout_of(stages, chunks):
    chunks = 1 if chunks is None else chunks
    if (stages, chunks) not in LAYOUTS:
        raise ValueError("no layout")
    layout = LAYOUTS[(stages, chunks)]
    if layout is not None:
        layout = list([list(stage) for stage in layout])
    return layout

def set_layout(model):
    model.pipeline_model_parallel_layout = layout_of(model.pipeline_model_parallel_size, None)

def pretrain_config():
    cfg = _pretrain_common()
    hf_path = "meta-llama/Meta-Llama-3-8B"
    cfg.model = AutoBridge.from_hf_pretrained(hf_path).to_megatron_provider()
    cfg.model.tensor_model_parallel_size = 1
    cfg.model.pipeline_model_parallel_size = 2
    cfg.model.context_parallel_size = 1
    cfg.model.seq_length = {"short": 4096}.get("short")
    cfg.model.rotary_base = float(cfg.model.rotary_base)
    cfg.train.global_batch_size = 64
    cfg.train.micro_batch_size = 1
    set_layout(cfg.model)
    return cfg
"""


def test_tables_of_layouts_are_looked_up_and_names_of_other_modules_followed(tmp_path: Path) -> None:
    for name, text in (
        ("fast.py", "from software.alias import usual\n\ndef fast():\n    cfg = usual()\n    return cfg\n"),
        ("alias.py", "from software.slow import pretrain_config as usual\n"),
        ("slow.py", TABLE),
    ):
        (tmp_path / name).write_text(text)
    files = [tmp_path / name for name in ("fast.py", "alias.py", "slow.py")]
    reading = read_files(files, define={"recipe": "fast"}, world_size=16)
    assert not [problem for problem in reading.problems if problem.severity != "note"]
    assert reading.model is not None and reading.model.name == "llama3-8b" and reading.model.seq == 4096
    assert reading.layout is not None and reading.layout.layers_per_stage == (18, 14)


def test_a_recipe_of_muon_has_its_optimizer_and_the_last_value_of_each_field(tmp_path: Path) -> None:
    changes = """
    cfg.sharing = DistributedDataParallelConfig(use_distributed_optimizer=True)
    cfg.optimizer, cfg.scheduler = distributed_muon_with_cosine_annealing(max_lr=3e-4)
    cfg.ddp.use_distributed_optimizer = False
    os.remove"""
    file = tmp_path / "recipe.py"
    file.write_text(BRIDGE.replace("    os.remove", changes))
    define = {"recipe": "llama3_70b_pretrain_64gpu_h100_bf16_config"}
    layout = read_files([file], define=define, world_size=64).layout
    assert layout is not None and layout.zero_stage == 1
    assert (layout.optimizer, layout.muon_mode) == ("muon", "blockwise")
    file.write_text(file.read_text().replace("distributed_muon_with_cosine_annealing", "other"))
    for own, stage in (("True", 1), ("False", 0)):
        # One of both fields is enough.
        added = f"    cfg.optimizer.use_distributed_optimizer = {own}\n    os.remove"
        (tmp_path / "own.py").write_text(file.read_text().replace("    os.remove", added))
        layout = read_files([tmp_path / "own.py"], define=define, world_size=64).layout
        assert layout is not None and (layout.optimizer, layout.zero_stage) == ("adam", stage)


@pytest.mark.parametrize(
    "made, precision",
    [
        ("_perf_precision('fp8_cs')", "fp8"),
        ("_perf_precision('bf16')", "bf16"),
        ("bf16_with_mxfp8_mixed()", "mxfp8"),
        ("precision_of(variant)", None),
    ],
)
def test_number_formats_are_those_of_functions_or_not_known(
    tmp_path: Path, made: str, precision: str | None
) -> None:
    file = tmp_path / "recipe.py"
    file.write_text(BRIDGE.replace("    os.remove", f"    cfg.mixed_precision = {made}\n    os.remove"))
    define = {"recipe": "llama3_70b_pretrain_64gpu_h100_bf16_config"}
    reading = read_files([file], define=define, world_size=64)
    unknown = [problem.flag for problem in reading.problems if problem.severity == "unknown"]
    assert unknown == ([] if precision else ["mixed_precision"])
    assert precision is None or reading.precision == precision


def test_what_a_base_that_is_not_given_may_say_makes_no_recipe_illegal(tmp_path: Path) -> None:
    text = BRIDGE.replace("cfg = small_config()", "cfg = llama3_70b_pretrain_config()")
    text = text.replace("    os.remove", "    cfg.train.micro_batch_size = 1\n    os.remove")
    text = text.replace("    os.remove", "    cfg.train.global_batch_size = 64\n    os.remove")
    file = tmp_path / "recipe.py"
    define = {"recipe": "llama3_70b_pretrain_64gpu_h100_bf16_config"}
    made, size = "    cfg.model = AutoBridge", "virtual_pipeline_model_parallel_size = 5"
    for base, legal in (("llama3_70b_pretrain_config", None), ("_pretrain_common", False)):
        start, end = text.rsplit(made, 1)
        kept = start + end.partition("\n")[2]  # The model is the base's.
        kept = kept.replace("llama3_70b_pretrain_config()", f"{base}()").replace(size, size[:-1] + "3")
        file.write_text(kept)
        found = check([file], define=define, model="llama3-70b", device="h100", world_size=64)
        assert found.legal is legal
        assert "do not split evenly over 12 pipeline stages" in str(found.problems)
