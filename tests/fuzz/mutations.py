"""Corrupting files: what disks, editors and other programs do to them, and what nobody would."""

from __future__ import annotations

import copy
import json
import random
import re
import struct
from collections.abc import Callable
from typing import Any

DEEP = 3000
"""Levels of nesting that no reader of sane files needs."""

WEIRD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 10**6, 2**31, 2**63, 2**64, 10**18, 10**30, 10**400),
    *(0.0, -0.0, 0.5, 1.5, 1e-300, 1e308, -1e308, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        " ",
        "0",
        "-1",
        "1e9",
        "nan",
        "None",
        "\u0000",
        "\ud7ff\u00e9\u4e2d",
        "x" * 10_000,
        "../../etc/passwd",
    ),
    *([], {}, [[]], [None], [0] * 1000, {"": ""}, {"name": None}),
)

_BINARY_NUMBERS = (0, 1, 2**15, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)

_TEXT_NUMBERS = ("0", "-1", "1e999", "NaN", "Infinity", "9" * 5000, "1" * 20, "0x10", "1_0", "٣", "1.5", "")

_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


def flip_bits(data: bytes, source: random.Random) -> bytes:
    """One to eight bits the other way round."""
    changed = bytearray(data)
    for _ in range(source.randint(1, 8)):
        if changed:
            at = source.randrange(len(changed))
            changed[at] ^= 1 << source.randrange(8)
    return bytes(changed)


def truncate(data: bytes, source: random.Random) -> bytes:
    """The beginning only, as after a crash or on a full disk."""
    return data[: source.randrange(len(data) + 1)]


def overwrite(data: bytes, source: random.Random) -> bytes:
    """A range replaced by random bytes or zeros: a lost block."""
    start = source.randrange(len(data) + 1)
    length = source.randint(1, max(1, min(512, len(data) - start)))
    filling = bytes(length) if source.random() < 0.5 else source.randbytes(length)
    return data[:start] + filling + data[start + length :]


def insert(data: bytes, source: random.Random) -> bytes:
    """Bytes added somewhere, or at the end."""
    at = len(data) if source.random() < 0.3 else source.randrange(len(data) + 1)
    return data[:at] + source.randbytes(source.randint(1, 64)) + data[at:]


def move(data: bytes, source: random.Random) -> bytes:
    """A slice deleted, doubled or swapped with its neighbour."""
    a, b, c = sorted(source.randrange(len(data) + 1) for _ in range(3))
    one, two = data[a:b], data[b:c]
    parts = {"delete": two, "double": one + one + two, "swap": two + one}
    return data[:a] + parts[source.choice(list(parts))] + data[c:]


def huge_field(data: bytes, source: random.Random) -> bytes:
    """A number of 4 or 8 bytes replaced by one at the edge of its range."""
    if len(data) < 8:
        return flip_bits(data, source)
    code = source.choice("iq")
    at = source.randrange(len(data) - 7)
    value = source.choice(_BINARY_NUMBERS) & (2**32 - 1 if code == "i" else 2**64 - 1)
    packed = struct.pack("<I" if code == "i" else "<Q", value)
    return data[:at] + packed + data[at + len(packed) :]


def text_number(data: bytes, source: random.Random) -> bytes:
    """A number in a text replaced by a text that is none, or is too large."""
    found = list(_NUMBER.finditer(data))
    if not found:
        return flip_bits(data, source)
    one = source.choice(found)
    return data[: one.start()] + source.choice(_TEXT_NUMBERS).encode() + data[one.end() :]


def nest(data: bytes, source: random.Random) -> bytes:
    """Brackets without end."""
    bracket = source.choice((b"[", b'{"a":', b"- ", b"(", b"{"))
    return source.choice((bracket * DEEP, data[: len(data) // 2] + bracket * DEEP, bracket * DEEP + data))


BYTES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(flip_bits, truncate, overwrite, insert, move, huge_field, text_number, nest),
)


def change_value(content: Any, source: random.Random) -> Any:
    """A parsed JSON or YAML text with one to three values replaced, swapped, renamed or taken away."""
    changed = copy.deepcopy(content)
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        places = list(_places(changed))
        if not places:
            break
        where, key = source.choice(places)
        kind = source.choice(("weird", "weird", "weird", "scale", "delete", "swap", "rename"))
        if kind == "weird":
            where[key] = copy.deepcopy(source.choice(WEIRD))
        elif kind == "scale" and isinstance(where[key], int | float) and not isinstance(where[key], bool):
            where[key] = where[key] * source.choice((-1, 2, 3, 1000, 10**9)) + source.choice((0, 1))
        elif kind == "delete":
            del where[key]
        elif kind == "swap":
            other, name = source.choice(places)
            where[key], other[name] = copy.deepcopy(other[name]), copy.deepcopy(where[key])
        elif isinstance(where, dict):
            where[f"{key}x"] = where.pop(key)
    return changed


def _places(content: Any) -> Any:
    """All (container, key) of a nested value."""
    items = list(content.items()) if isinstance(content, dict) else list(enumerate(content))
    for key, value in items:
        yield content, key
        if isinstance(value, dict | list):
            yield from _places(value)


def corrupt(data: bytes, source: random.Random, parse: Callable[[str], Any] | None = None) -> bytes:
    """A corrupted copy of a file.

    Args:
        parse: reads the text of a file of values, JSON or YAML; every second copy is changed in its values.
    """
    if parse is not None and source.random() < 0.6:
        changed = change_value(parse(data.decode()), source)
        # YAML reads JSON, but for the numbers that JSON does not have.
        return json.dumps(changed, ensure_ascii=source.random() < 0.5).encode("utf-8", "surrogatepass")
    return source.choice(BYTES)(data, source)
