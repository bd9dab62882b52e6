"""Keyword arguments that nobody knows, and which one was meant."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar

from costmodels.spelling import nearest

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def names_unknown(
    *others: Iterable[str],
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Let a function name the nearest of its keywords to one that it does not know.

    Args:
        others: keywords that it passes on.

    The function then raises `TypeError`, as Python does.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        kinds = (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL)
        own = [one.name for one in signature(function).parameters.values() if one.kind not in kinds]
        known = dict.fromkeys([*own, *(name for some in others for name in some)])

        @wraps(function)
        def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            for name in kwargs:
                if name not in known:
                    hint = nearest(name, known) or f"it takes {', '.join(known)}"
                    raise TypeError(
                        f"{function.__name__}() got an unexpected keyword argument {name!r}; {hint}"
                    )
            return function(*args, **kwargs)

        return checked

    return decorate


def keywords(function: Callable[..., object]) -> list[str]:
    """Those that a function takes by name, but for what it passes on."""
    every = signature(function).parameters.values()
    return [one.name for one in every if one.kind is Parameter.KEYWORD_ONLY]
