"""`Engine`: the software that executes a layout. Its constants are data (`catalogue/engines.yaml`)."""

from collections.abc import Collection, Mapping
from typing import Any

from pydantic import Field, ValidationError, model_validator

from costmodels.errors import InputError
from costmodels.spec.abilities import Abilities
from costmodels.spec.constants import (
    ActivationConstants,
    AllocatorConstants,
    AttentionConstants,
    CheckpointConstants,
    Constants,
    ElementwiseConstants,
    ExpertConstants,
    GemmConstants,
    HostConstants,
    LossConstants,
    MemoryRangeConstants,
    MuonConstants,
    NetworkConstants,
    OverlapConstants,
    ShardingConstants,
)
from costmodels.spec.flat_constants import in_groups
from costmodels.spec.hardware import Device
from costmodels.spec.record import Count, Name, NonNegative, Positive, Record


class MemoryPolicy(Record):
    """Bytes that an engine keeps and sends for each parameter, for one number format."""

    parameters: NonNegative
    """Bytes of the copy of a parameter that GEMMs read; sharded by ZeRO 3."""
    gradients: NonNegative
    """Bytes of an accumulated gradient; sharded by ZeRO 2 and 3."""
    gradients_alone: NonNegative | None = None
    """Bytes of an accumulated gradient where no other rank holds the parameter; `gradients` when not
    given."""
    layer_casts: NonNegative = 0.0
    """Bytes of a copy of a layer's parameter in the format of its GEMMs, kept during a step."""
    optimizer: NonNegative
    """Bytes of master copy and optimizer moments; sharded by ZeRO 1 and above."""
    shard: NonNegative = 0.0
    """Bytes of a second copy that data parallelism keeps beside the gathered one below ZeRO 3; sharded by
    ZeRO 1."""
    reduced: Positive = 4.0
    """Bytes of one gradient element in a reduction."""
    gathered: Positive = 4.0
    """Bytes of one parameter in an all-gather."""
    stepping_whole: NonNegative = 0.0
    """Bytes for each parameter gathered in the optimizer step, with ZeRO 1 and above."""
    stepping_shard: NonNegative = 0.0
    """Bytes for each parameter of a rank's shard sent in the optimizer step, with ZeRO 1 and above."""
    stepping_cast: NonNegative = 0.0
    """Bytes of the gradient copy that the optimizer reads, for each parameter that a rank updates."""


class Spread(Record):
    """Widths of the 80 % prediction interval of a step time by cause, as logarithms
    (`costmodels/time/uncertainty.py`)."""

    base: NonNegative = 0.15
    """Width of the whole step: large where the engine was never measured on the device."""
    experts: NonNegative | None = None
    """`base` of models with experts; the same when not given."""
    narrow: NonNegative = 0.0
    """Further width of the whole step at a hidden size of 1024; proportionally less for wider models."""
    measured: NonNegative = 0.02
    """Width of a whole step whose layer shape was measured often; it replaces all other widths."""
    network: NonNegative = 0.15
    """Width of the share of exposed communication, for the first node and for each doubling of nodes."""
    launch: NonNegative = 0.3
    """Width of the share of the step in which the device waits for the host."""
    bubble: NonNegative = 0.3
    """Width of the share of the step in which the slowest pipeline rank waits for others."""


class MeasuredLayer(Record):
    """Ratio of measured to predicted times of layers of one shape."""

    hidden: Count
    tensor_parallel: Count
    tokens: Count
    """Tokens of one microbatch on a device."""
    factor: Positive
    """Measured over predicted time of a layer, forward and backward."""
    rows: Count = 1
    """Number of measured steps behind the factor."""


class Engine(Record):
    """Constants of one training engine; rates are shares of the device's data-sheet peak."""

    name: Name
    memory: dict[str, MemoryPolicy]
    """Bytes per parameter by precision: `fp32`, `fp16`, `bf16`, `fp8`."""
    gemm: GemmConstants
    attention: AttentionConstants
    elementwise: ElementwiseConstants
    network: NetworkConstants
    host: HostConstants
    overlap: OverlapConstants
    activations: ActivationConstants = ActivationConstants()
    loss: LossConstants = LossConstants()
    allocator: AllocatorConstants
    memory_range: MemoryRangeConstants = MemoryRangeConstants()
    memory_spread: NonNegative = 0.0
    """Half the width of the 80 % prediction interval of the peak, as a natural logarithm; 0 where
    `memory_range` is used alone."""
    sharding: ShardingConstants = ShardingConstants()
    experts: ExpertConstants = ExpertConstants()
    muon: MuonConstants = MuonConstants()
    checkpoints: CheckpointConstants = CheckpointConstants()
    measured_layers: tuple[MeasuredLayer, ...] = ()
    """Corrections of dense layers by their shape, for one device (`costmodels/time/measured_layers.py`)."""
    runs: Abilities = Abilities()
    """Layouts that the engine can run; all layouts in older plan files."""
    spread: Spread = Spread()
    """Distance of measured steps from the estimate."""
    devices: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Constants that differ on an architecture (`Device.architecture`) or a kind of device, by the name of
    that."""
    source: str = ""

    @model_validator(mode="before")
    @classmethod
    def _in_groups(cls, values: Any) -> Any:
        return in_groups(values) if isinstance(values, dict) else values

    @model_validator(mode="after")
    def _check(self) -> "Engine":
        for key, overrides in self.devices.items():
            if unknown := [name for name in constant_names(overrides) if not _is_constant(name)]:
                raise ValueError(
                    f"engine {self.name} overrides {', '.join(unknown)} for {key} devices; an override is "
                    f"memory, memory_spread, spread, measured_layers, or a constant of {', '.join(GROUPS)}"
                )
        return self

    def memory_policy(self, precision: str) -> MemoryPolicy:
        """Bytes per parameter in one precision (tf32 stores fp32).

        Raises:
            InputError: the engine does not train in that precision.
        """
        name = "fp32" if precision == "tf32" else precision
        if name not in self.memory:
            raise InputError(
                f"precision {precision}: engine {self.name} does not train in it; "
                f"use {', '.join(self.memory)}"
            )
        return self.memory[name]

    def with_constants(self, constants: Mapping[str, Any]) -> "Engine":
        """The engine with other constants on every device, by names such as `gemm.efficiency`.

        Raises:
            ValueError: there is no constant of a name.
        """
        if unknown := [name for name in constants if not _is_constant(name)]:
            raise ValueError(f"engine {self.name} has no constant {', '.join(unknown)}")
        changes = {
            group: getattr(self, group).model_copy(update=value) if group in GROUPS else value
            for group, value in constant_fields(constants).items()
        }
        devices = {key: without_constants(overrides, constants) for key, overrides in self.devices.items()}
        return self.model_copy(update={**changes, "devices": devices})

    def for_device(self, device: Device) -> "Engine":
        """The engine with its constants for `device`: those of the device itself, of its architecture, or
        else of its kind.

        Raises:
            InputError: the device's own constants are invalid.
        """
        own = device.constants.get(self.name, {})
        if not self.devices and not own:
            return self
        key = device.architecture if device.architecture in self.devices else device.kind
        constants = merge_fields(self.model_dump(exclude={"devices"}), self.devices.get(key, {}))
        try:
            return Engine.model_validate(merge_fields(constants, own))
        except ValidationError as error:
            item = error.errors(include_url=False)[0]
            name = ".".join(map(str, item["loc"]))
            raise InputError(
                f"device {device.name}: constants of {self.name}: {name} is {item['input']!r}: {item['msg']}"
            ) from None


GROUPS = tuple(
    name
    for name, field in Engine.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Constants)
)
"""Fields of `Engine` that are groups of constants."""


def _is_constant(name: str) -> bool:
    group, _, field = name.partition(".")
    if group in GROUPS:
        kind: Any = Engine.model_fields[group].annotation
        return field in kind.model_fields
    return name in ("source", "memory", "memory_spread", "spread", "measured_layers")


def constant_fields(constants: Mapping[str, Any]) -> dict[str, Any]:
    """The nested fields of an engine, from constants by names such as `gemm.efficiency`."""
    fields: dict[str, Any] = {}
    for name, value in constants.items():
        group, _, field = name.partition(".")
        if field:
            fields.setdefault(group, {})[field] = value
        else:
            fields[group] = value
    return fields


def constant_names(fields: Mapping[str, Any]) -> list[str]:
    """Names such as `gemm.efficiency` of the constants that given fields of an engine set."""
    names = []
    for group, value in fields.items():
        inner = isinstance(value, dict) and group in GROUPS
        names += [f"{group}.{field}" for field in value] if inner else [group]
    return names


def merge_fields(fields: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of an engine, replaced by those of `changes`; in groups constant by constant."""
    result = {**fields, **changes}
    for group in GROUPS:
        if group in fields and group in changes:
            result[group] = {**fields[group], **changes[group]}
    return result


def without_constants(fields: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Fields of an engine without the constants of given names such as `gemm.efficiency`."""
    kept = {name: value for name, value in fields.items() if name not in names}
    for group in GROUPS:
        if group in kept:
            kept[group] = {
                field: value for field, value in kept[group].items() if f"{group}.{field}" not in names
            }
    return kept
