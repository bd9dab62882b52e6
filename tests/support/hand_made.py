"""Models, clusters and engines by hand, so that tests know every number that goes in."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import costmodels
from costmodels import Cluster, Device, Engine, Layout, Link, ModelSpec, even_split
from costmodels.catalogue import load_engine
from costmodels.spec.engine import GROUPS, constant_fields, merge_fields
from tests.support import models

GIB = 2.0**30


@pytest.fixture
def gpt() -> ModelSpec:
    """A GPT whose vocabulary needs no padding."""
    return ModelSpec(name="gpt", layers=8, hidden=1024, heads=16, vocab=51200, seq=2048)


@pytest.fixture
def llama() -> ModelSpec:
    """A Llama 2 70B."""
    sizes = {"layers": 80, "hidden": 8192, "ffn": 28672, "heads": 64, "kv_heads": 8, "vocab": 32000}
    return models.llama("llama", **sizes, seq=4096)


@pytest.fixture
def mixture(llama: ModelSpec) -> ModelSpec:
    """Experts in all but the first two layers."""
    return ModelSpec.model_validate(
        {
            **llama.model_dump(),
            "layers": 16,
            "hidden": 2048,
            "ffn": 8192,
            "heads": 16,
            "head_dim": 128,
            "experts": 16,
            "top_k": 2,
            "expert_ffn": 1024,
            "shared_expert_ffn": 1024,
            "dense_layers": 2,
        }
    )


@pytest.fixture
def a100() -> Device:
    """NVIDIA A100-SXM4-80GB with one 200 Gb/s network card for each device (NVIDIA data sheet)."""
    return Device(
        name="a100-80gb",
        vendor="nvidia",
        architecture="ampere",
        peak_flops={"fp32": 19.5e12, "tf32": 156e12, "fp16": 312e12, "bf16": 312e12},
        memory_bytes=80 * GIB,
        memory_bandwidth=2.039e12,
        cores=108,
        intra_node=Link(name="NVLink 3", bandwidth=300e9, latency=3e-6),
        inter_node=Link(name="HDR InfiniBand", bandwidth=25e9, latency=5e-6),
        context_bytes=0.6 * GIB,
    )


@pytest.fixture
def cluster(a100: Device) -> Callable[..., Cluster]:
    """Makes a cluster of A100s: `cluster(64)`, `cluster(16, devices_per_node=4)`."""

    def make(world_size: int, devices_per_node: int = 8) -> Cluster:
        return Cluster(
            device=a100,
            world_size=world_size,
            devices_per_node=min(devices_per_node, world_size),
            memory_bytes=a100.memory_bytes,
        )

    return make


@pytest.fixture
def engine() -> Callable[..., Engine]:
    """Makes an engine of the catalogue with other constants: `engine("megatron", gemm_efficiency=0.5)`.

    Without what was fitted for single architectures, which would replace them once more.
    """

    def make(name: str, devices: object = None, **constants: object) -> Engine:
        changes = constant_fields({_constant(key): value for key, value in constants.items()})
        fields = merge_fields(load_engine(name).model_dump(), changes)
        return Engine.model_validate({**fields, "devices": devices or {}})

    return make


def _constant(keyword: str) -> str:
    """`gemm.efficiency`, of `gemm_efficiency`."""
    group, _, field = keyword.partition("_")
    return f"{group}.{field}" if group in GROUPS else keyword


@pytest.fixture
def layout() -> Callable[..., Layout]:
    """Makes a layout from abbreviations: `layout(model, tp=2, pp=4, dp=2, mbs=1, m=8)`."""

    def make(model: ModelSpec, m: int = 1, mbs: int = 1, **degrees: object) -> Layout:
        fields: dict[str, object] = {
            costmodels.SHORT_NAMES.get(name, name): value for name, value in degrees.items()
        }
        pp = int(str(fields.get("pipeline_parallel", 1)))
        vpp = int(str(fields.get("virtual_pipeline_parallel", 1)))
        dp = int(str(fields.get("data_parallel", 1)))
        fields.setdefault("layers_per_stage", even_split(model.layers, pp * vpp))
        fields.setdefault("schedule", "interleaved" if vpp > 1 else "1f1b")
        return Layout.model_validate({**fields, "micro_batch_size": mbs, "global_batch_size": mbs * dp * m})

    return make
