"""Exports are taken by the software's own parsers, where it is installed (`pip install '.[frameworks]'`).

Megatron-LM's arguments and nanotron's main branch are on no package index: they take part where their
sources are on PYTHONPATH. `benchmarks/frameworks.py` runs all of this, and says what took part.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from costmodels.catalogue import load_model
from planner import Plan
from planner.formats.targets import TARGETS
from tests.planner.test_exports import ENGINES, WORLD, plans

pytestmark = pytest.mark.frameworks

DRAWS = settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def installed(name: str, why: str = "") -> Any:
    """A module of the software, or a skip that says what is missing."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # Some want devices or each other while they are imported.
        pytest.skip(f"{name} cannot be imported{why}: {type(error).__name__}: {error}"[:200])


def is_installed(package: str) -> bool:
    """Return whether a package is there, and no stand-in of it."""
    module = sys.modules.get(package)
    return not isinstance(module, MagicMock) and importlib.util.find_spec(package) is not None


@pytest.fixture
def rank_of_job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of the first rank of a job."""
    for name, value in {
        "RANK": 0,
        "LOCAL_RANK": 0,
        "WORLD_SIZE": WORLD,
        "CUDA_DEVICE_MAX_CONNECTIONS": 1,
    }.items():
        monkeypatch.setenv(name, str(value))
    yield


@given(data=st.data())
@DRAWS
def test_megatron_validates_the_flags(
    data: st.DataObject, rank_of_job: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    properties = type("Properties", (), {"major": 9, "minor": 0, "name": "H100", "total_memory": 1 << 36})
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: properties())
    arguments = installed("megatron.training.arguments", " (Megatron-LM's sources on PYTHONPATH)")
    plan = data.draw(plans(ENGINES["megatron"]))
    words = shlex.split(TARGETS["megatron"](plan).text)
    words += ["--tokenizer-type", "NullTokenizer", "--mock-data", "--train-iters", "1", "--lr", "1e-4"]
    words += ["--no-rope-fusion"]  # Transformer Engine's
    monkeypatch.setattr("sys.argv", ["pretrain_gpt.py", *words])
    monkeypatch.setenv("NVTE_CPU_OFFLOAD_V1", "1")
    parsed = arguments.validate_args(arguments.parse_args())
    layout = plan.layout
    assert parsed.data_parallel_size == layout.data_parallel
    assert parsed.virtual_pipeline_model_parallel_size in (None, layout.virtual_pipeline_parallel)
    assert parsed.use_distributed_optimizer == (layout.zero_stage == 1)
    assert arguments.core_transformer_config_from_args(parsed).num_layers == plan.model.layers


@given(data=st.data())
@DRAWS
def test_megatron_core_makes_its_objects_of_bridges_overrides(data: st.DataObject) -> None:
    import torch

    transformer = installed("megatron.core.transformer.transformer_config").TransformerConfig
    distributed = installed("megatron.core.distributed").DistributedDataParallelConfig
    optimizer = installed("megatron.core.optimizer").OptimizerConfig
    plan = data.draw(plans(ENGINES["megatron-bridge"]))
    values = yaml.safe_load(TARGETS["megatron-bridge"](plan).text)
    known = {field.name for field in dataclasses.fields(transformer)}
    config = transformer(
        **{name: value for name, value in values["model"].items() if name in known},
        pipeline_dtype=torch.bfloat16,
    )
    assert config.tensor_model_parallel_size == plan.layout.tensor_parallel
    distributed(**values.get("ddp", {}))
    optimizer(**values.get("optimizer", {}))


def test_bridge_has_the_other_fields() -> None:
    """Fields that Megatron-Core has not are read off Bridge's sources: it imports Transformer Engine."""
    import ast
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        files = distribution("megatron-bridge").files or []
    except PackageNotFoundError:
        pytest.skip("megatron-bridge is not installed")
    transformer = installed("megatron.core.transformer.transformer_config").TransformerConfig
    known = {field.name for field in dataclasses.fields(transformer)}
    found: set[str] = set()
    for file in files:
        if str(file).endswith(
            ("models/gpt_provider.py", "training/config.py", "training/mixed_precision.py")
        ):
            tree = ast.parse(Path(str(file.locate())).read_text(encoding="utf-8"))
            found |= {
                node.target.id
                for node in ast.walk(tree)
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            }
            found |= {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    from planner.formats.nemo.bridge_names import CHUNKS, KEYS, RECIPES

    fields = [
        path.partition(".")[2] for path in (*KEYS.values(), CHUNKS) if path.startswith(("model.", "train."))
    ]
    latent = {"q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"}
    assert not {name for name in fields if name not in known | found | latent}
    assert set(RECIPES) <= found


@given(data=st.data())
@DRAWS
def test_torchtitan_parses_the_flags_and_shares_out_layers_alike(data: st.DataObject) -> None:
    installed("tyro")
    manager = installed("torchtitan.config.manager").ConfigManager
    pipelines = installed("torchtitan.distributed.pipeline_parallel")
    dims = installed("torchtitan.distributed").ParallelDims
    installed("torchtitan.models.llama3.config_registry")
    plan = data.draw(plans(ENGINES["torchtitan"]))
    export = TARGETS["torchtitan"](plan)
    words = ["--module", "llama3", "--config", "llama3_debugmodel", *shlex.split(export.text)]
    config = manager().parse_args(words)
    layout, parallel = plan.layout, config.parallelism
    assert dims.from_config(parallel, layout.world_size).dp_shard == parallel.data_parallel_shard_degree
    assert (parallel.tensor_parallel_degree, parallel.pipeline_parallel_degree) == (
        layout.tensor_parallel,
        layout.pipeline_parallel,
    )
    assert (config.activation_checkpoint is not None) == (layout.recompute == "full")
    if layout.pipeline_parallel > 1 and "layers_per_stage" not in export.inexpressible_fields:
        stages = pipelines._generate_llm_fqn_per_model_part(
            len(layout.layers_per_stage),
            plan.model.layers,
            parallel.pipeline_parallel_first_stage_less_layers,
            parallel.pipeline_parallel_last_stage_less_layers,
        )
        counts = tuple(sum(name.startswith("layers.") for name in stage) for stage in stages)
        assert counts == layout.layers_per_stage


def test_torchtitan_has_the_models_with_their_sizes() -> None:
    installed("tyro")
    from planner.formats.torchtitan.names import MODELS

    for name, (module, config, _) in MODELS.items():
        registry = installed(f"torchtitan.models.{module}.config_registry")
        assert hasattr(registry, config), (name, config)
        try:
            spec = getattr(registry, config)().model_spec.model
        except ValueError:
            continue  # Its number format wants a device that is not here.
        model = load_model(name)
        assert (spec.dim, len(spec.layers), spec.vocab_size) == (model.hidden, model.layers, model.vocab), (
            name
        )


@given(data=st.data())
@DRAWS
def test_deepspeed_takes_the_file(data: st.DataObject, monkeypatch: pytest.MonkeyPatch) -> None:
    module = installed("deepspeed.runtime.config")
    monkeypatch.setattr(module.dist, "get_rank", lambda: 0)
    plan = data.draw(plans(ENGINES["deepspeed"]))
    text = TARGETS["deepspeed"](plan).text
    layout = plan.layout

    class Units:
        """The interface that DeepSpeed asks for ranks that are split otherwise."""

        def get_data_parallel_world_size(self) -> int:
            return layout.data_parallel

    parsed = module.DeepSpeedConfig(yaml.safe_load(text), mpu=Units())
    assert parsed.train_batch_size == layout.global_batch_size
    assert parsed.zero_optimization_stage == layout.zero_stage
    assert parsed.gradient_accumulation_steps == layout.micro_batches
    assert (parsed.zero_config.offload_optimizer is not None) == (
        layout.offload_optimizer and layout.zero_stage > 0
    )


def test_transformers_takes_deepspeeds_file() -> None:
    installed("deepspeed")
    installed("accelerate")
    module = installed("transformers.integrations.deepspeed")
    from tests.planner.test_exports import LLAMA, found

    plan = found("deepspeed", LLAMA, 60.0).best
    assert plan is not None
    parsed = module.HfTrainerDeepSpeedConfig(yaml.safe_load(TARGETS["deepspeed"](plan).text))
    assert parsed.get_value("zero_optimization.stage") == plan.layout.zero_stage


@given(data=st.data())
@DRAWS
def test_accelerate_launches_with_the_file(data: st.DataObject, tmp_path: Path) -> None:
    launch = installed("accelerate.commands.launch")
    tools = installed("accelerate.utils.launch")
    plan = data.draw(plans(ENGINES["accelerate"]))
    file = tmp_path / "accelerate.yaml"
    export = TARGETS["accelerate"](plan)
    file.write_text(export.text)
    arguments = launch.launch_command_parser().parse_args(["--config_file", str(file), "train.py"])
    arguments, _, _ = launch._validate_launch_command(arguments)
    assert arguments.num_processes == plan.layout.world_size
    assert arguments.use_fsdp == (plan.layout.zero_stage >= 2)
    if not arguments.use_fsdp:
        return
    before = dict(os.environ)
    try:
        os.environ.update(tools.prepare_multi_gpu_env(arguments))
        check_environment(plan, export.inexpressible_fields)
    finally:
        os.environ.clear()
        os.environ.update(before)


def check_environment(plan: Plan, lost: frozenset[str]) -> None:
    """Compare the plan with the ranks' reading of the environment that `accelerate launch` gives them."""
    plugin = installed("accelerate.utils").FullyShardedDataParallelPlugin()
    assert plugin.reshard_after_forward == (plan.layout.zero_stage == 3)
    assert plugin.activation_checkpointing == (plan.layout.recompute == "full")
    if os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        parallel = installed("accelerate.parallelism_config").ParallelismConfig()
        assert parallel.cp_size == plan.layout.context_parallel
        assert "zero_replicas" in lost or parallel.dp_replicate_size == plan.layout.zero_replicas


KERNELS = (
    *("flash_attn", "flash_attn.flash_attn_interface", "flash_attn.layers", "flash_attn.layers.rotary"),
    *(
        "flash_attn.ops",
        "flash_attn.ops.triton",
        "flash_attn.ops.triton.layer_norm",
        "flash_attn.bert_padding",
    ),
    *("flash_attn.modules", "flash_attn.modules.mha", "grouped_gemm", "grouped_gemm.ops"),
)
"""Packages of CUDA kernels that nanotron imports, and needs for no configuration."""


@given(data=st.data())
@DRAWS
def test_nanotron_reads_the_file(data: st.DataObject, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KERNELS:
        if name not in sys.modules and not is_installed(name.partition(".")[0]):
            monkeypatch.setitem(sys.modules, name, MagicMock(__version__="2.7.0"))
    config = installed("nanotron.config", " (its main branch on PYTHONPATH)")
    if not hasattr(config, "AdamWOptimizerArgs"):
        pytest.skip("this release of nanotron is older than the form of its main branch")
    plan = data.draw(plans(ENGINES["nanotron"]))
    export = TARGETS["nanotron"](plan)
    if "context_parallel" in export.inexpressible_fields:
        return
    values = yaml.safe_load(export.text)
    parsed = config.get_config_from_dict(values)
    assert parsed.parallelism.dp == plan.layout.data_parallel
    assert parsed.global_batch_size == plan.layout.global_batch_size
