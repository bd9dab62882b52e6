"""The engine catalogue, and constants that differ by device."""

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

import costmodels
from costmodels.catalogue import device_names, load_device, load_engine

NAMES = list(
    yaml.safe_load((Path(costmodels.__file__).parent / "catalogue" / "engines.yaml").read_text())["engines"]
)


def test_the_catalogue_has_the_engines_that_are_promised():
    assert set(NAMES) >= {"bundled", "megatron", "megatron-deepspeed", "nanotron", "fsdp", "nemo"}


@pytest.mark.parametrize("name", NAMES)
def test_every_engine_loads_for_every_kind_of_device(name, a100):
    entry = load_engine(name)
    assert entry.source
    assert entry.for_device(a100.model_copy(update={"architecture": "", "kind": "cpu"})).name == name
    for policy in entry.memory.values():
        assert policy.optimizer >= 8  # Adam's moments


@pytest.mark.parametrize(
    ("name", "precision", "total", "sharded"),
    [("nanotron", "bf16", 20, 12), ("megatron", "bf16", 18, 12), ("bundled", "fp32", 20, 12)],
)
def test_bytes_per_parameter_are_those_published(name, precision, total, sharded, engine):
    policy = engine(name).memory[precision]
    assert policy.parameters + policy.shard + policy.gradients + policy.optimizer == total
    assert policy.shard + policy.optimizer == sharded


def test_the_architecture_wins_over_the_kind_and_the_name_says_nothing(a100, engine):
    fitted = engine(
        "nanotron",
        devices={
            "ampere": {"gemm_efficiency": 0.6},
            "gpu": {"gemm_efficiency": 0.7},
            "a100": {"gemm_efficiency": 0.5},
        },
    )
    assert fitted.for_device(a100).gemm_efficiency == 0.6
    assert fitted.for_device(a100.model_copy(update={"name": "mine"})).gemm_efficiency == 0.6
    assert fitted.for_device(a100.model_copy(update={"architecture": ""})).gemm_efficiency == 0.7
    assert fitted.for_device(a100.model_copy(update={"architecture": "cdna3"})).gemm_efficiency == 0.7
    other = fitted.for_device(a100.model_copy(update={"architecture": "ascend910b", "kind": "npu"}))
    assert other.gemm_efficiency == engine("nanotron").gemm_efficiency


def test_an_override_of_an_unknown_constant_is_refused(engine):
    with pytest.raises(
        ValidationError, match="overrides gemm for ampere devices; an override is one of memory, "
    ):
        engine("nanotron", devices={"ampere": {"gemm": 0.5}})


def test_the_cpu_hides_no_communication(a100):
    cpu = a100.model_copy(update={"name": "cpu", "kind": "cpu", "architecture": ""})
    assert load_engine("bundled").for_device(cpu).data_parallel_overlap == 0
    assert load_engine("bundled").for_device(a100).data_parallel_overlap > 0


@pytest.mark.parametrize("name", NAMES)
def test_constants_are_named_by_architectures_and_kinds_that_exist(name):
    devices = [load_device(device) for device in device_names()]
    known = {device.architecture for device in devices} | {device.kind for device in devices}
    assert set(load_engine(name).devices) <= known
