"""The choice among plans within the estimate's error of the fastest: the simplest of them, or the fastest."""

from __future__ import annotations

import reprlib
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from costmodels.catalogue.yaml_files import build, is_file_name, parse, user_fields
from costmodels.errors import InputError
from costmodels.spec.layout import Schedule
from costmodels.spec.record import GIB, NonNegative, Record
from costmodels.spelling import or_nearest

DATA = Path(__file__).with_name("complexity.yaml")

Prefer = Literal["simple", "fastest"]

PREFERENCES: tuple[Prefer, ...] = ("simple", "fastest")


USUAL_GIB, USUAL_SHARE = 2.0, 0.03
"""GiB, and the share of a device, that a plan should leave free by default; the smaller one counts."""


Points = Annotated[float, Field(ge=0, le=1e4, allow_inf_nan=False)]
"""Points of one feature of a layout. The sum of all features stays far below the points for too little
memory."""


class Complexity(Record):
    """Points for the features of a layout; `complexity.yaml` explains each."""

    name: str = "complexity"
    kinds: dict[str, Points]
    doublings: dict[str, Points]
    schedule: dict[Schedule, Points]
    zero_stage: dict[int, Points]
    zero_3_across_nodes: Points
    zero_replicas: Points
    recompute: dict[Literal["none", "selective", "full"], Points]
    recompute_modules: Points
    recompute_some_layers: Points
    offload_activations: Points
    offload_optimizer: Points
    cuda_graphs: Points
    cuda_graphs_of_several_devices: Points
    not_power_of_two: Points
    uneven_stages: Points
    outside_node: dict[str, Points]
    unmeasured: dict[str, Points]

    @property
    def least_recompute(self) -> float:
        """The least points of solved recomputation: other modules, or a part of the layers."""
        some = self.recompute_some_layers
        of_kinds = (
            self.recompute["selective"] + min(self.recompute_modules, some),
            self.recompute["full"] + some,
        )
        return min(of_kinds)


class Preference(Record):
    """The choice among plans within the estimate's error of each other, and the memory to leave free."""

    prefer: Prefer = "simple"
    headroom_gib: NonNegative | None = None
    """GiB that the fullest device should have left; `headroom_share` decides if None."""
    headroom_share: NonNegative | None = None
    """Share of a device's memory that a plan should leave free; if neither is given, the smaller default
    counts."""
    complexity: Complexity | None = None
    """The user's own points; this package's points if None."""

    def headroom_bytes(self, memory_bytes: float) -> float:
        """Bytes that the fullest device should have left."""
        if not self.asks_headroom:
            return min(USUAL_GIB * GIB, USUAL_SHARE * memory_bytes)
        return (self.headroom_gib or 0.0) * GIB + (self.headroom_share or 0.0) * memory_bytes

    @property
    def points(self) -> Complexity:
        """The points in use: the user's, or this package's."""
        return self.complexity or usual_complexity()

    @property
    def asks_headroom(self) -> bool:
        """True if the user gave the memory to leave free."""
        return self.headroom_gib is not None or self.headroom_share is not None

    @property
    def weighs(self) -> bool:
        """True if anything but speed decides."""
        return self.prefer == "simple" or self.asks_headroom


FASTEST = Preference(prefer="fastest")


@cache
def usual_complexity() -> Complexity:
    """The points of this package."""
    return build(Complexity, parse(DATA.read_text(encoding="utf-8"), DATA.name), DATA.name)


def parse_preference(prefer: str | None, headroom: str | float | None = None) -> Preference:
    """The preference that two words give: `simple`, `fastest` or a YAML file of points; `2`, `2GiB` or `3%`.

    Raises `InputError` for other words.
    """
    memory = _headroom(headroom)
    if prefer is None:
        return memory
    if is_file_name(str(prefer)):
        return memory.model_copy(update={"complexity": _own_complexity(str(prefer))})
    for known in PREFERENCES:
        if str(prefer).lower() == known:
            return memory.model_copy(update={"prefer": known})
    raise InputError(
        f"prefer {prefer}: expected one of {', '.join(PREFERENCES)}, or a YAML file of points"
        f"{or_nearest(str(prefer), PREFERENCES)}"
    )


def _own_complexity(path: str) -> Complexity:
    """The points of a user's file, which holds only the differences from this package's points."""
    given = user_fields(path, "preference")
    fields: dict[str, Any] = usual_complexity().model_dump()
    for name, value in given.items():
        usual = fields.get(name)
        if isinstance(usual, dict) and isinstance(value, dict):
            unknown = [key for key in value if key not in usual]
            if unknown:
                raise InputError(
                    f"preference file {path!r}: unknown {name} {unknown[0]}; known are "
                    f"{', '.join(map(str, usual))}"
                )
            value = {**usual, **value}
        fields[name] = value
    return build(Complexity, fields, f"preference file {path!r}")


def _headroom(given: str | float | None) -> Preference:
    """The preference for simple plans, with the memory that should stay free."""
    if given is None:
        return Preference()
    text = str(given).strip().lower()
    share = text.endswith("%")
    number = text.removesuffix("%") if share else text.removesuffix("gib").removesuffix("gb")
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not (0.0 <= value < (100.0 if share else 1e6)):
        raise InputError(
            f"headroom {reprlib.repr(given)}: expected GiB of a device to leave free, such as 2, or a share, "
            "such as 3%"
        )
    return Preference(headroom_share=value / 100.0) if share else Preference(headroom_gib=value)
