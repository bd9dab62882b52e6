"""Pins: degrees of freedom that the user fixes or narrows, such as `tp=8`, `tp=2..8` or `tp=2,4`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from costmodels.dataclass import dataclass
from costmodels.errors import InputError
from costmodels.spec.hardware import Precision
from costmodels.spec.layout import (
    CHUNKS_OF_SCHEDULES,
    SHORT_NAMES,
    ContextParallelForm,
    Fp8Recipe,
    GradientReduction,
    Layout,
    MuonMode,
    Optimizer,
    Recompute,
    RecomputeMethod,
    RecomputeModule,
    Schedule,
    recompute_conflict,
    schedule_takes,
)
from costmodels.spec.table import BOOLEANS, FORMATS
from costmodels.spelling import near_names, nearest
from planner.inputs.choice import EXAMPLES, Choice, Value, Values, span
from planner.inputs.layout_notation import degrees_in


@dataclass(frozen=True)
class WherePossible:
    """A value that holds where its group has at least two ranks; elsewhere the default holds."""

    value: int | bool | str

    def __str__(self) -> str:
        return f"{self.value} where possible"


PinValue = int | bool | str | tuple[int, ...] | tuple[str, ...] | WherePossible | Choice
Pins = dict[str, PinValue]
"""Validated values by the full name of a field of `Layout`."""

PinInput = Mapping[str, object] | Iterable[str] | str | None
"""Pins from callers: a mapping, or strings `name=value`, with full or short names.

A string may name several degrees, as layouts are printed (`tp=4+sp pp=8`).
A value may be a range (`2..8`, `..4`, `2..`) or a list (`2,4`, or a Python list) where the search varies it.
"""

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
    "fp8_recipe": get_args(Fp8Recipe),
    "optimizer": get_args(Optimizer),
    "muon_mode": get_args(MuonMode),
}

_SYNONYMS = {("optimizer", "adamw"): "adam"}
"""Other names of a choice; for example, weight decay is decoupled in both."""

SYNONYMS = {
    "fsdp": "zero=3",
    "fsdp2": "zero=3",
    "ddp": "zero=0",
    "hsdp": "zero_replicas=2",
    "ulysses": "cp_form=all_to_all",
    "ring": "cp_form=ring",
    "gpipe": "schedule=1f1b",
    "zero_bubble": "schedule=interleaved_zb",
    "zb": "schedule=interleaved_zb",
    "zb1p": "schedule=interleaved_zb",
    "dualpipe": "schedule=dualpipev",
    **{f"zero{stage}": f"zero={stage}" for stage in range(4)},
}
"""Other software's names for a value of a degree, and the pin for each."""

_SWITCHES = (*BOOLEANS, "fp8_param_gather")

ZERO_STAGES = (0, 1, 2, 3)

LARGEST = 2**20
"""The largest value of a degree; bounded by the most devices, sequences of a step and layers."""

GROUP_DEGREES = ("sequence_parallel", "zero_stage", "context_parallel_form")
"""Degrees that need a group of ranks, and the degree of their group: tensor, data or context parallelism."""

RANGE_DEGREES = (
    "tensor_parallel",
    "pipeline_parallel",
    "virtual_pipeline_parallel",
    "context_parallel",
    "expert_parallel",
    "expert_tensor_parallel",
    "data_parallel",
    "zero_stage",
    "micro_batch_size",
)
"""Numbers that the search varies: ranges and lists of them may be given."""

WORD_DEGREES = ("recompute", "schedule", "context_parallel_form")
"""Degrees with words as values that the search varies."""


@dataclass(frozen=True)
class _Item:
    """A degree and its value in a pin or a ban."""

    name: str
    value: object
    verb: str = "pin"

    def wrong(self, expected: str) -> InputError:
        return InputError(f"{self.verb} {self.name}={self.value}: expected {expected}")


GivenPins = PinInput | Iterable[str | tuple[str, object]]
"""Pins as flags give them: pairs of a name and a parsed value, beside the strings of `--pin`."""


def parse_pins(pin: GivenPins, forbid: PinInput = None) -> Pins:
    """Validated pins by full name: the values of `pin` without those of `forbid`.

    Raises `InputError` for an unknown name, a value of the wrong kind, two values for one name, and a value
    that is both pinned and forbidden.
    """
    pins: Pins = {}
    for item in _items(pin, "pin"):
        value = _value(item)
        if pins.setdefault(item.name, value) != value:
            raise InputError(f"pin {item.name} is given twice: {pins[item.name]} and {value}")
    if "recompute_modules" in pins:
        pins.setdefault("recompute", "selective")
    forbidden: dict[str, list[_Item]] = {}
    for item in _items(forbid, "forbid"):
        forbidden.setdefault(item.name, []).append(item)
    for name, items in forbidden.items():
        pins[name] = _without(pins.get(name), name, items)
    _check_together({name: value for name, value in pins.items() if not isinstance(value, Choice)})
    return pins


def _without(pinned: PinValue | None, name: str, items: Sequence[_Item]) -> PinValue:
    """The rest of a pin of `name` when the values of `items` are forbidden."""
    groups = tuple(map(_group, items))
    said = ",".join(str(item.value) for item in items)
    if isinstance(pinned, WherePossible):
        raise InputError(f"forbid {name}={said}: it is pinned to {pinned}; give one of the two")
    if pinned is None or isinstance(pinned, Choice):
        before = pinned or Choice()
        choice = Choice(before.wanted, (*before.forbidden, *groups))
        known = _known(name)
        left = [value for value in known if value in choice]
        if known and not left:
            raise InputError(f"forbid {name}={said}: leaves none of {', '.join(map(str, known)).lower()}")
        return choice if name in RANGE_DEGREES + WORD_DEGREES else left[0]
    if isinstance(pinned, (int, str)) and any(pinned in group for group in groups):
        raise InputError(f"pin {name}={pinned} and forbid {name}={said} contradict each other")
    return pinned


def _group(item: _Item) -> Values:
    """The values that an item of `forbid` names."""
    value = _value(item)
    if isinstance(value, Choice) and value.wanted is not None:
        return value.wanted
    if isinstance(value, (Choice, WherePossible, tuple)) or not (
        _known(item.name) or item.name in RANGE_DEGREES
    ):
        raise InputError(
            f"{item.verb} {item.name}={item.value}: the search does not choose this degree; pin the "
            "value to use"
        )
    return (value,)


def _known(name: str) -> tuple[Value, ...]:
    """All values of a degree with few values; of a degree that is not searched, two."""
    if name in _SWITCHES:
        return False, True
    if name == "zero_stage":
        return ZERO_STAGES
    formats = (one for one in FORMATS if one != "precision")
    return _CHOICES[name] if name in (*WORD_DEGREES, "recompute_method", *formats) else ()


def degrees_of(layout: Layout) -> Pins:
    """All degrees of a layout, as pins."""
    values = {name: getattr(layout, name) for name in Layout.model_fields}
    if layout.context_parallel == 1:
        del values["context_parallel_form"]
    if not layout.recompute_modules:
        del values["recompute_modules"]
    return values


def degree_words() -> Iterator[str]:
    """Completions for the name of a degree."""
    yield from dict.fromkeys([*SHORT_NAMES, *Layout.model_fields])


def pin_words() -> Iterator[str]:
    """Completions for a pin: short and full names, and values of degrees with few values."""
    full = dict.fromkeys(Layout.model_fields)
    for short, name in [*SHORT_NAMES.items(), *zip(full, full, strict=True)]:
        values = _known(name) or ("",)
        yield from (f"{short}={str(value).lower()}" for value in values)


def _check_together(pins: Pins) -> None:
    """Refuse pins that no layout of any job can have together."""
    chunks, schedule = pins.get("virtual_pipeline_parallel"), pins.get("schedule")
    for kind in get_args(Schedule):
        if kind == schedule and chunks is not None and not schedule_takes(kind, int(str(chunks))):
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
    if pins.get("fp8_param_gather") is True and pins.get("zero_stage") == 0:
        raise InputError("pin fp8_param_gather needs zero_stage of at least 1, not 0: nothing is gathered")
    if pins.get("zero_replicas", 1) != 1 and pins.get("zero_stage") == 0:
        raise InputError(f"pin zero_replicas={pins['zero_replicas']} needs zero_stage of at least 1, not 0")


def with_pin(pins: Pins, name: str, value: int) -> Pins:
    """`pins` with one more number pinned. Raises `InputError` when `pins` have another value, or exclude this
    one."""
    pinned = pins.get(name, value)
    if isinstance(pinned, Choice) and pinned.wanted is None:
        if value not in pinned:
            raise InputError(f"pin {name}={value} and forbid {name} {pinned} contradict each other")
        pinned = value
    if pinned != value:
        raise InputError(f"pin {name} is given twice: {pinned} and {value}")
    found = {**pins, name: value}
    _check_together({name: value for name, value in found.items() if not isinstance(value, Choice)})
    return found


def where_possible(pins: Pins, name: str, value: int | bool | str) -> Pins:
    """`pins` with `name` (of `GROUP_DEGREES`) fixed where its group allows; a strict pin of `value` stays.

    Raises `InputError` when another value is pinned.
    """
    pinned = pins.get(name, WherePossible(value))
    if isinstance(pinned, Choice) and value in pinned:
        pinned = WherePossible(value)
    if pinned not in (value, WherePossible(value)):
        raise InputError(f"pin {name} is given twice: {pinned} and {value}")
    return {**pins, name: pinned}


def _items(pin: GivenPins, verb: str) -> Iterable[_Item]:
    if pin is None:
        return
    if isinstance(pin, Mapping):
        for name, value in pin.items():
            yield _Item(full_name(name, verb), value, verb)
        return
    for each in [pin] if isinstance(pin, str) else pin:
        if isinstance(each, str):
            yield from _items_of_text(each, verb)
        else:
            yield _Item(full_name(each[0], verb), each[1], verb)


def _items_of_text(given: str, verb: str) -> Iterator[_Item]:
    """The pins or bans in one string: `name=value`, or the degrees of a printed layout."""
    for text in [given] if verb == "forbid" else degrees_in(given):
        name, equals, value = text.partition("=")
        if not equals or not value.strip():
            plain = _plain(text)
            of_choices = (f"{degree}={plain}" for degree, values in _CHOICES.items() if plain in values)
            example = SYNONYMS.get(plain) or next(of_choices, "tensor_parallel=8")
            raise InputError(f"{verb} {text!r}: expected name=value, such as {example}")
        if "=" in value:
            several = list(degrees_in(text))
            if len(several) < 2:
                raise InputError(f"{verb} {text!r}: expected name=value with one value, such as tp=8")
            apart = " ".join(f"--{verb} {one}" for one in several)
            raise InputError(f"{verb} {text!r}: one degree each, as in {apart}")
        yield _Item(full_name(name.strip(), verb), value.strip(), verb)


def full_name(name: str, verb: str) -> str:
    """The full name of a degree; raises `InputError`, which begins with `verb`, for an unknown name."""
    if not name:
        raise InputError(f"{verb} without a name before its value; expected name=value, such as tp=8")
    plain = _plain(name)
    full = SHORT_NAMES.get(plain, plain)
    known = list(Layout.model_fields)
    if full in known:
        return full
    if plain in SYNONYMS:
        raise InputError(f"{verb} {name}: no such field; did you mean {SYNONYMS[plain]}?")
    hint = nearest(plain, [*SHORT_NAMES, *known]) or f"use one of {', '.join(known)}"
    raise InputError(f"{verb} {name}: no such field; {hint}")


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def _value(item: _Item) -> PinValue:
    if isinstance(item.value, WherePossible):
        if item.name not in GROUP_DEGREES:
            raise item.wrong(f"a plain value: only {' and '.join(GROUP_DEGREES)} need a group")
        _value(_Item(item.name, item.value.value))
        return item.value
    if isinstance(item.value, Choice):
        return item.value
    if item.name in RANGE_DEGREES + WORD_DEGREES:
        several = _several(item)
        if several is not None:
            return Choice(several)
    elif ".." in str(item.value):
        raise item.wrong(f"one value: ranges are for {', '.join(RANGE_DEGREES)}")
    return _single(item)


def _several(item: _Item) -> Values | None:
    """The range or the list in an item; None where it is one value."""
    given = item.value
    if isinstance(given, (list, tuple)):
        words = [str(word) for word in given]
    else:
        words = str(given).split(",")
        if item.name in RANGE_DEGREES and len(words) == 1:
            try:
                found = span(words[0])
            except ValueError:
                raise item.wrong(f"a range from the smaller to the larger, {EXAMPLES}") from None
            if found is not None:
                return found
    if len(words) == 1:
        return None
    values = [_single(_Item(item.name, word, item.verb)) for word in words]
    return tuple(dict.fromkeys(value for value in values if isinstance(value, (int, str))))


def _single(item: _Item) -> PinValue:
    text = str(item.value).strip().lower()
    if item.name in _SWITCHES:
        if text not in _WORDS:
            raise item.wrong("true or false")
        return _WORDS[text]
    if item.name in _CHOICES:
        text = _SYNONYMS.get((item.name, text), text)
        if text not in _CHOICES[item.name]:
            raise item.wrong(f"one of {', '.join(_CHOICES[item.name])}{_near_choice(item.name, text)}")
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


def _near_choice(name: str, text: str) -> str:
    """A suggestion of the nearest choice, to be appended to a list of all choices."""
    pin = SYNONYMS.get(_plain(text), "")
    near = near_names(text, _CHOICES[name], cutoff=0.7)
    if pin and full_name(pin.partition("=")[0], "") == name:
        return f"; did you mean {pin.partition('=')[2]}?"
    if pin:
        return f"; did you mean pin {pin}?"
    return f"; did you mean {near[0]}?" if near else ""


def _modules(item: _Item, words: Iterable[object]) -> tuple[str, ...]:
    known = get_args(RecomputeModule)
    given = [str(word).strip() for word in words]
    if not given or not set(given) <= set(known) or len(set(given)) < len(given):
        raise item.wrong(f"some of {', '.join(known)}, separated by commas, each once")
    return tuple(module for module in known if module in given)


def _count(item: _Item, text: str, expected: str) -> int:
    digits = text.strip()
    if not (digits.isascii() and digits.isdigit()) or not digits.strip("0"):
        raise item.wrong(expected)
    if len(digits.lstrip("0")) > len(str(LARGEST)) or int(digits) > LARGEST:
        raise item.wrong(f"{expected}, and at most {LARGEST}")
    return int(digits)
