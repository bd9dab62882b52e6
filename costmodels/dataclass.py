"""`dataclasses.dataclass` with methods that all classes share.

The library compiles up to six methods for each class, which takes a tenth of a short question's time. The
library's other functions, such as `fields` and `replace`, work with these classes too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:

    def dataclass(
        made: type | None = None, /, *, frozen: bool = False, eq: bool = True, repr: bool = True
    ) -> type | Callable[[type], type]:
        """Make a class a dataclass; the options are the library's."""

        def decorate(made: type) -> type:
            return _with_methods(made, frozen, eq, repr)

        return decorate if made is None else decorate(made)


def _with_methods(made: type, frozen: bool, eq: bool, repr: bool) -> type:
    fields = dataclasses.fields(dataclasses.dataclass(init=False, repr=False, eq=False)(made))
    missing = dataclasses.MISSING
    names = tuple(field.name for field in fields)
    wanted = frozenset(names)
    defaults = {field.name: field.default for field in fields if field.default is not missing}
    factories = [
        (field.name, field.default_factory) for field in fields if field.default_factory is not missing
    ]
    compared = tuple(field.name for field in fields if field.compare)
    post = getattr(made, "__post_init__", None)
    shown = tuple(field.name for field in fields if field.repr)

    def initialise(self: Any, /, *values: Any, **named: Any) -> None:
        held = self.__dict__
        held.update(defaults)
        held.update(named)
        if values:
            held.update(zip(names, values, strict=False))
        for name, make in factories:
            if name not in held:
                held[name] = make()
        if (
            held.keys() != wanted
            or len(values) > len(names)
            or not named.keys().isdisjoint(names[: len(values)])
        ):
            raise TypeError(f"{made.__name__} takes {names}, not {values} and {named}")
        if post is not None:
            post(self)

    def equals(self: Any, other: Any) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return values_of(self) == values_of(other)

    def digest(self: Any) -> int:
        return hash(values_of(self))

    def values_of(self: Any) -> tuple[Any, ...]:
        held = self.__dict__
        return tuple([held[name] for name in compared])

    def text(self: Any) -> str:
        values = ", ".join(f"{name}={getattr(self, name)!r}" for name in shown)
        return f"{self.__class__.__qualname__}({values})"

    own: dict[str, Any] = {"__init__": initialise}
    if eq and "__eq__" not in made.__dict__:
        own |= {"__eq__": equals, "__hash__": digest if frozen else None}
    if repr and "__repr__" not in made.__dict__:
        own["__repr__"] = text
    if frozen:
        own |= {"__setattr__": _refuse, "__delattr__": _refuse}
    for name, method in own.items():
        setattr(made, name, method)
    return made


def _refuse(self: object, name: str, *_: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot change {name!r}")
