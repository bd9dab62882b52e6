"""The engine catalogue, and constants that differ by device."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

import costmodels
from costmodels.catalogue import device_names, load_device, load_engine
from costmodels.errors import InputError
from costmodels.spec.engine import GROUPS, Engine
from costmodels.spec.flat_constants import former_names

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
            "ampere": {"gemm": {"efficiency": 0.6}},
            "gpu": {"gemm": {"efficiency": 0.7}},
            "a100": {"gemm": {"efficiency": 0.5}},
        },
    )
    assert fitted.for_device(a100).gemm.efficiency == 0.6
    assert fitted.for_device(a100.model_copy(update={"name": "mine"})).gemm.efficiency == 0.6
    assert fitted.for_device(a100.model_copy(update={"architecture": ""})).gemm.efficiency == 0.7
    assert fitted.for_device(a100.model_copy(update={"architecture": "cdna3"})).gemm.efficiency == 0.7
    other = fitted.for_device(a100.model_copy(update={"architecture": "ascend910b", "kind": "npu"}))
    assert other.gemm.efficiency == engine("nanotron").gemm.efficiency


def test_an_override_of_an_unknown_constant_is_refused(engine):
    with pytest.raises(
        ValidationError, match=r"overrides gemm\.speed, overlap for ampere devices; an override"
    ):
        engine("nanotron", devices={"ampere": {"gemm": {"speed": 0.5}, "overlap": 0.5}})
    with pytest.raises(ValueError, match=r"engine nanotron has no constant gemm\.speed"):
        load_engine("nanotron").with_constants({"gemm.speed": 0.5})


@pytest.mark.parametrize("name", NAMES)
def test_files_from_before_constants_had_groups_are_read(name):
    entry = load_engine(name)
    former = {present: old for old, present in former_names().items()}

    def flat(fields):
        result: dict[str, Any] = {}
        for group, value in fields.items():
            inner = value if group in GROUPS else {}
            result |= {
                former[key]: number for field, number in inner.items() if (key := (group, field)) in former
            }
            # Newer constants never had another name.
            newer = {field: number for field, number in inner.items() if (group, field) not in former}
            result = ({group: newer} if newer else {}) | result
            result |= {} if group in GROUPS else {group: value}
        return result

    fields = entry.model_dump()
    old = flat(fields) | {"devices": {key: flat(changes) for key, changes in fields["devices"].items()}}
    assert not {(group, field) for group in set(old) & set(GROUPS) for field in old[group]} & set(former)
    assert Engine.model_validate(old) == entry


def test_the_cpu_hides_no_communication(a100):
    cpu = a100.model_copy(update={"name": "cpu", "kind": "cpu", "architecture": ""})
    assert load_engine("bundled").for_device(cpu).overlap.data_parallel == 0
    assert load_engine("bundled").for_device(a100).overlap.data_parallel > 0


@pytest.mark.parametrize("name", NAMES)
def test_constants_are_named_by_architectures_and_kinds_that_exist(name):
    devices = [load_device(device) for device in device_names()]
    known = {device.architecture for device in devices} | {device.kind for device in devices}
    assert set(load_engine(name).devices) <= known


def test_an_engine_of_a_file_is_the_one_that_it_is_like_but_for_what_it_says(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(
        "like: megatron\ngemm: {efficiency: 0.5}\nruns: {schedules: [1f1b]}\nmemory: {bf16: {gradients: 2}}\n"
        "devices: {hopper: {network: {efficiency: 0.7}}}\n"
    )
    mine, other = load_engine(str(file)), load_engine("megatron")
    assert mine.name == "mine" and mine.source == "like megatron"
    assert mine.runs == other.runs.model_copy(update={"schedules": ("1f1b",)})
    policy = other.memory["bf16"].model_copy(update={"gradients": 2.0})
    assert mine.memory == {**other.memory, "bf16": policy}
    for device in map(load_device, device_names()):
        # Said for the engine, a constant is the same on devices that the other has another one for.
        changed = {"gemm.efficiency": 0.5, "memory": mine.memory}
        if device.architecture == "hopper":
            changed["network.efficiency"] = 0.7
        expected = other.for_device(device).with_constants(changed).model_copy(update={"runs": mine.runs})
        assert mine.for_device(device).model_dump(exclude={"name", "source"}) == expected.model_dump(
            exclude={"name", "source"}
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("like: megatrn", "unknown engine 'megatrn': did you mean megatron"),
        ("{like: megatron, name: nemo}", "engine nemo is in the catalogue; say `name:` with another name"),
        ("{like: megatron, gemm: {eficiency: 1}}", "unknown field gemm.eficiency; did you mean efficiency?"),
        ("{like: megatron, gemms: {efficiency: 1}}", "unknown field gemms; did you mean gemm?"),
        (
            "{like: megatron, devices: {hopper: {gemm: {efficiency: 2}}}}",
            "devices hopper: gemm.efficiency is 2",
        ),
        ("{like: megatron, devices: {hopper: {gemm_efficiency: 2}}}", "devices hopper: gemm.efficiency is 2"),
        ("{like: megatron, devices: 3}", "devices is 3"),
        ("gemm_efficiency: 0.5", "fields memory, attention, elementwise, "),
    ],
)
def test_a_broken_engine_file_is_named_with_its_fault(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "broken.yaml"
    file.write_text(text)
    with pytest.raises(InputError) as error:
        load_engine(str(file))
    assert message in str(error.value) and "\n" not in str(error.value)
