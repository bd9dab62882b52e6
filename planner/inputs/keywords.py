"""Keyword arguments of several functions: described once, and suggested for misspelled ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from typing import ParamSpec, TypeVar

from costmodels.spelling import nearest

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def keywords(
    group: type,
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Spell out a function's `**` keywords in its signature, and suggest the nearest keyword for an unknown
    one.

    Args:
        group: the `TypedDict` of these keywords; None stands for an omitted keyword.

    For an unknown one the function raises `TypeError`, as Python does.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        whole = signature(function)
        own = [one for one in whole.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
        others = [
            Parameter(name, Parameter.KEYWORD_ONLY, default=None, annotation=_text(hint))
            for name, hint in group.__annotations__.items()
        ]
        known = [one.name for one in (*own, *others)]

        @wraps(function)
        def checked(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            for name in kwargs:
                if name not in known:
                    hint = nearest(name, known) or f"it takes {', '.join(known)}"
                    raise TypeError(
                        f"{function.__name__}() got an unexpected keyword argument {name!r}; {hint}"
                    )
            return function(*args, **kwargs)

        checked.__signature__ = whole.replace(parameters=[*own, *others])  # type: ignore[attr-defined]
        return checked

    return decorate


def _text(hint: object) -> str:
    """The source text of an annotation."""
    return str(getattr(hint, "__forward_arg__", hint))
