"""The models, devices and engines of the catalogues, as records and as tables of a notebook."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

from costmodels.catalogue import device_names, engine_names, load_device, load_engine, load_model, model_names
from costmodels.spec.engine import Engine
from costmodels.spec.hardware import Device
from costmodels.spec.model import ModelSpec
from costmodels.spec.record import GIB, Record
from planner.plan_rows import data_frame, html_table

if TYPE_CHECKING:
    import pandas

RecordT = TypeVar("RecordT", bound=Record)


class Catalogue(tuple[RecordT, ...], Generic[RecordT]):
    """Records of one kind by name; a tuple that notebooks show as a table."""

    columns: tuple[str, ...]
    row: Callable[[RecordT], tuple[str, ...]]

    def __new__(
        cls, records: Sequence[RecordT], columns: tuple[str, ...], row: Callable[[RecordT], tuple[str, ...]]
    ) -> Catalogue[RecordT]:
        """The records, with the headings of their table and the cells of a row."""
        made = super().__new__(cls, records)
        made.columns, made.row = columns, row
        return made

    def __reduce__(self) -> tuple[type[tuple[RecordT, ...]], tuple[tuple[RecordT, ...]]]:
        return tuple, (tuple(self),)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all records."""
        return tuple(str(getattr(one, "name", "")) for one in self)

    def named(self, name: str) -> RecordT:
        """The record of a name; raises `KeyError` where there is none."""
        return dict(zip(self.names, self, strict=True))[name]

    def __repr__(self) -> str:
        return f"<Catalogue of {len(self)}: {', '.join(self.names)}>"

    def _repr_html_(self) -> str:
        return html_table(f"{len(self)} in the catalogue", self.columns, map(self.row, self))

    def to_pandas(self) -> pandas.DataFrame:
        """A row for each record with all its fields; raises `InputError` where pandas is not installed."""
        return data_frame([one.model_dump() for one in self])


def models() -> Catalogue[ModelSpec]:
    """The models of the catalogue.

    Examples:
        >>> import planner
        >>> planner.models().named("llama3-8b").layers
        32
    """
    columns = ("model", "parameters", "layers", "hidden", "experts", "sequence")
    return Catalogue([load_model(name) for name in model_names()], columns, _model_row)


def devices() -> Catalogue[Device]:
    """The devices of the catalogue.

    Examples:
        >>> import planner
        >>> "h100" in planner.devices().names
        True
    """
    columns = ("device", "vendor", "TFLOP/s", "GiB", "GB/s", "per node")
    return Catalogue([load_device(name) for name in device_names()], columns, _device_row)


def engines() -> Catalogue[Engine]:
    """The training engines of the catalogue.

    Examples:
        >>> import planner
        >>> "megatron" in planner.engines().names
        True
    """
    return Catalogue([load_engine(name) for name in engine_names()], ("engine", "precisions"), _engine_row)


def _model_row(spec: ModelSpec) -> tuple[str, ...]:
    sizes = (spec.layers, spec.hidden, spec.experts or "", spec.seq)
    return (spec.name, f"{spec.parameters / 1e9:.3g} B", *map(str, sizes))


def _device_row(device: Device) -> tuple[str, ...]:
    precision = device.default_precision
    return (
        device.name,
        device.vendor,
        f"{device.peak_flops[precision] / 1e12:.4g} {precision}",
        f"{device.memory_bytes / GIB:.1f}",
        f"{device.memory_bandwidth / 1e9:.5g}",
        str(device.devices_per_node),
    )


def _engine_row(engine: Engine) -> tuple[str, ...]:
    return engine.name, ", ".join(engine.memory)
