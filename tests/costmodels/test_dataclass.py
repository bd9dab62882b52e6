"""Dataclasses whose methods are shared behave as the library's own."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import field
from functools import cached_property
from typing import Any

import pytest

from costmodels.dataclass import dataclass


@dataclass(frozen=True)
class Frozen:
    first: int
    second: str = "b"
    third: list[int] = field(default_factory=list, compare=False, repr=False)

    @cached_property
    def twice(self) -> int:
        return 2 * self.first


@dataclass(frozen=True)
class Longer(Frozen):
    fourth: float = 0.5

    def __post_init__(self) -> None:
        if self.fourth < 0:
            raise ValueError(f"{self.fourth} is less than nothing")


@dataclass
class Open:
    first: int
    second: int = 2


def test_values_come_by_place_name_and_default() -> None:
    made = Longer(1, third=[3])
    assert (made.first, made.second, made.third, made.fourth) == (1, "b", [3], 0.5)
    assert Frozen(1).third is not Frozen(1).third
    with pytest.raises(ValueError, match="less than nothing"):
        Longer(1, fourth=-1.0)


@pytest.mark.parametrize(
    ("values", "named"),
    [((), {}), ((1, "b", [], 4), {}), ((1,), {"first": 2}), ((1,), {"other": 2}), ((), {"second": "c"})],
)
def test_wrong_values_are_refused(values: tuple[Any, ...], named: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="Frozen takes"):
        Frozen(*values, **named)


def test_equality_hash_and_text_are_those_of_the_fields() -> None:
    one, other = Frozen(1, "c", [1]), Frozen(1, "c", [2])
    # A cached property is no field.
    assert one.twice == 2 and one == other and hash(one) == hash(other) and one != Frozen(2, "c")
    assert Frozen(1) != Longer(1)
    assert repr(Longer(1)) == "Longer(first=1, second='b', fourth=0.5)"
    with pytest.raises(TypeError, match="unhashable"):
        hash(Open(1))


def test_frozen_ones_cannot_change_and_others_can() -> None:
    one, other = Frozen(1), Open(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.first = 2  # type: ignore[misc]
    with pytest.raises(dataclasses.FrozenInstanceError):
        del one.first
    other.first = 3
    assert other == Open(3)


def test_the_library_works_with_them() -> None:
    one = Longer(1, "c", [4])
    assert [each.name for each in dataclasses.fields(one)] == ["first", "second", "third", "fourth"]
    assert dataclasses.replace(one, first=2) == Longer(2, "c")
    assert dataclasses.asdict(one) == {"first": 1, "second": "c", "third": [4], "fourth": 0.5}
    assert copy.deepcopy(one) == one == pickle.loads(pickle.dumps(one))
