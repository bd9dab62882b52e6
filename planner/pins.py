"""Pins: degrees of freedom that the user fixes, such as `tensor_parallel=8` or `tp=8`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from costmodels.errors import InputError
from costmodels.hardware import Precision
from costmodels.layout import (
    CHUNKS_OF_SCHEDULES,
    SHORT_NAMES,
    ContextParallelForm,
    GradientReduction,
    Layout,
    Optimizer,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
    Schedule,
    recompute_conflict,
    schedule_runs,
)
from costmodels.table import BOOLEANS


@dataclass(frozen=True)
class WherePossible:
    """A value that holds wherever the group it needs has two ranks at least; elsewhere the default."""

    value: int | bool | str

    def __str__(self) -> str:
        return f"{self.value} where possible"


PinValue = int | bool | str | tuple[int, ...] | tuple[str, ...] | WherePossible
Pins = dict[str, PinValue]
"""Values by the full name of a field of `Layout`, validated."""

PinInput = Mapping[str, object] | Iterable[str] | str | None
"""What callers may give: a mapping, or strings `name=value`; names full or short."""

_WORDS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}

_CHOICES: dict[str, tuple[str, ...]] = {
    "recompute": get_args(Recompute),
    "schedule": get_args(Schedule),
    "precision": get_args(Precision),
    "context_parallel_form": get_args(ContextParallelForm),
    "recompute_method": get_args(RecomputeMethod),
    "gradient_reduction": get_args(GradientReduction),
    "optimizer": get_args(Optimizer),
}

_SYNONYMS = {("optimizer", "adamw"): "adam"}
"""Other words for a choice: weight decay is decoupled either way."""

ZERO_STAGES = (0, 1, 2, 3)

GROUPED = ("sequence_parallel", "zero_stage", "context_parallel_form")
"""Degrees that need a group of ranks: the tensor-, the data- and the context-parallel one."""


@dataclass(frozen=True)
class _Item:
    name: str
    value: object

    def wrong(self, expected: str) -> InputError:
        return InputError(f"pin {self.name}={self.value}: expected {expected}")


def parse_pins(pin: PinInput) -> Pins:
    """Validated pins by full name.

    Raises `InputError` for an unknown name, a value of the wrong kind, or two values for one name.
    """
    pins: Pins = {}
    for item in _items(pin):
        value = _value(item)
        if pins.setdefault(item.name, value) != value:
            raise InputError(f"pin {item.name} is given twice: {pins[item.name]} and {value}")
    if "recompute_modules" in pins:
        pins.setdefault("recompute", "selective")
    _check_together(pins)
    return pins


def _check_together(pins: Pins) -> None:
    """Refuse pins that no layout can hold at the same time, whatever the job."""
    chunks, schedule = pins.get("virtual_pipeline_parallel"), pins.get("schedule")
    for kind in get_args(Schedule):
        if kind == schedule and chunks is not None and not schedule_runs(kind, int(str(chunks))):
            raise InputError(
                f"pin schedule={kind} contradicts virtual_pipeline_parallel={chunks}; {CHUNKS_OF_SCHEDULES}"
            )
    method = str(pins.get("recompute_method", "uniform"))
    if method == "block" and "recompute_num_layers" not in pins:
        raise InputError(
            "pin recompute_method=block needs recompute_num_layers (--recompute-num-layers), the layers of "
            "each stage that recompute"
        )
    if "recompute" in pins:
        modules: Any = pins.get("recompute_modules", ())
        layers = int(str(pins.get("recompute_num_layers", 1)))
        offloads = pins.get("offload_activations") is True
        conflict = recompute_conflict(str(pins["recompute"]), modules, method, layers, offloads)
        if conflict is not None:
            raise InputError(f"pin {conflict}")
    form = pins.get("context_parallel_form")
    if isinstance(form, str) and pins.get("context_parallel") == 1:
        raise InputError(f"pin context_parallel_form={form} needs context_parallel of at least 2, not 1")
    if pins.get("zero_replicas", 1) != 1 and pins.get("zero_stage") == 0:
        raise InputError(f"pin zero_replicas={pins['zero_replicas']} needs zero_stage of at least 1, not 0")


def where_possible(pins: Pins, name: str, value: int | bool | str) -> Pins:
    """`pins` and `name` (one of `GROUPED`), fixed wherever its group allows; a strict pin of `value` stays.

    Raises `InputError` when another value is pinned.
    """
    pinned = pins.get(name, WherePossible(value))
    if pinned not in (value, WherePossible(value)):
        raise InputError(f"pin {name} is given twice: {pinned} and {value}")
    return {**pins, name: pinned}


def _items(pin: PinInput) -> Iterable[_Item]:
    if pin is None:
        return
    if isinstance(pin, Mapping):
        for name, value in pin.items():
            yield _Item(_full_name(name), value)
        return
    for text in [pin] if isinstance(pin, str) else pin:
        name, equals, value = text.partition("=")
        if not equals or not value.strip():
            raise InputError(f"pin {text!r}: expected name=value, such as tensor_parallel=8")
        yield _Item(_full_name(name.strip()), value.strip())


def _full_name(name: str) -> str:
    full = SHORT_NAMES.get(name, name).replace("-", "_")
    known = list(Layout.model_fields)
    if full not in known:
        near = difflib.get_close_matches(full, known, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise InputError(f"pin {name}: no such field; {hint}use one of {', '.join(known)}")
    return full


def _value(item: _Item) -> PinValue:
    if isinstance(item.value, WherePossible):
        if item.name not in GROUPED:
            raise item.wrong(f"a plain value: only {' and '.join(GROUPED)} need a group")
        _value(_Item(item.name, item.value.value))
        return item.value
    text = str(item.value).strip().lower()
    if item.name in BOOLEANS:
        if text not in _WORDS:
            raise item.wrong("true or false")
        return _WORDS[text]
    if item.name in _CHOICES:
        text = _SYNONYMS.get((item.name, text), text)
        if text not in _CHOICES[item.name]:
            raise item.wrong(f"one of {', '.join(_CHOICES[item.name])}")
        return text
    if item.name == "layers_per_stage":
        parts = item.value if isinstance(item.value, (list, tuple)) else text.split(",")
        return tuple(_count(item, str(part), "layers of each stage such as 8,8,7,7") for part in parts)
    if item.name == "recompute_modules":
        return _modules(item, item.value if isinstance(item.value, (list, tuple)) else text.split(","))
    if item.name == "zero_stage":
        if text not in map(str, ZERO_STAGES):
            raise item.wrong(f"one of {', '.join(map(str, ZERO_STAGES))}")
        return int(text)
    return _count(item, text, "a whole number of at least 1")


def _modules(item: _Item, words: Iterable[object]) -> tuple[str, ...]:
    known = get_args(RecomputeModule)
    given = [str(word).strip() for word in words]
    if not given or not set(given) <= set(known) or len(set(given)) < len(given):
        raise item.wrong(f"some of {', '.join(known)}, separated by commas, each once")
    return tuple(module for module in known if module in given)


def _count(item: _Item, text: str, expected: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()) or int(digits) < 1:
        raise item.wrong(expected)
    return int(digits)
