"""Layers that MindSpeed-LLM counts differently: no-op layers, and leading dense layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from planner.formats.facts.flag_catalogue import GivenFlag
from planner.formats.facts.reading import Problems
from planner.options.experts import MOST_LAYERS

Given = Mapping[str, GivenFlag]


def noop_layers(given: Given) -> tuple[int, ...]:
    """Numbers, from 0, of no-op layers (`--noop-layers`); empty where the value is not a list."""
    flag = given.get("--noop-layers")
    if flag is None or not re.fullmatch(r"[0-9]{1,5}([, ]+[0-9]{1,5})*", flag.text):
        return ()
    return tuple(sorted({int(number) for number in re.findall("[0-9]+", flag.text)}))


def take_out_noops(values: dict[str, Any], given: Given, problems: Problems) -> None:
    """Reduce the number of layers to those that are not no-ops."""
    flag = given.get("--noop-layers")
    layers = values.get("num_layers")
    if flag is None or layers is None:
        return
    idle = noop_layers(given)
    if not idle or idle[-1] >= layers or len(idle) >= layers:
        text = f"{flag.text}: expected numbers from 0 to {layers - 1} with commas between"
        problems.add("illegal", text, flag.name, flag.line, certain=True)
        return
    values["num_layers"] = layers - len(idle)


def dense_layers(first: str, freq: str | None, layers: int) -> str | None:
    """Megatron-LM's list of layers for MindSpeed-LLM's leading dense layers and frequency; None without
    these."""
    numbers = [text for text in (first, freq or "1") if re.fullmatch(r"-?[0-9]{1,5}", text)]
    if len(numbers) < 2 or layers > MOST_LAYERS:
        return None
    dense, each = max(int(numbers[0]), 0), max(int(numbers[1]), 1)
    kinds = [int(at >= dense and at % each == 0) for at in range(layers)]
    return str(kinds) if 1 in kinds and (0 in kinds or freq is not None) else None
