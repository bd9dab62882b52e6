"""Flags and files of other software for a plan: each field is expressed, or reported as not expressible."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import field
from typing import Any

import yaml

from costmodels.dataclass import dataclass
from costmodels.spec.layout import Layout
from planner.formats.writing.written import written
from planner.formats.writing.yaml_dumper import Dumper

Values = dict[str, Any]
"""Values of keys by path, separated by points, such as `{"parallelism.tp": 2}`."""


@dataclass(frozen=True)
class Export:
    """A plan as flags or a file of other software."""

    target: str
    text: str
    """The text of the exported file: flags, one on each line, or the file itself."""
    inexpressible: tuple[str, ...]
    """Parts of a plan that the software does not support, each with the reason. A field of the layout comes
    first, as in `schedule=zbv: ...`."""
    layout_flags: Mapping[str, str]
    """Flags or paths of keys of the layout, with their values (empty for switches)."""
    notes: tuple[str, ...] = ()
    """Further notes; a note on a field of the layout has the form of `inexpressible`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the software needs to run the plan."""
    in_script: tuple[str, ...] = ()
    """Parts of a plan that its file never states, because the software takes them from its training script:
    in the form of `inexpressible`."""

    @property
    def inexpressible_fields(self) -> frozenset[str]:
        """Fields of `Layout` that are not expressed, not expressed separately, or not expressed in any
        plan."""
        return frozenset(name for name in self.named if name in Layout.model_fields)

    @property
    def named(self) -> frozenset[str]:
        """Names of fields of the layout, and of parts of the model, that are not expressed exactly."""
        return frozenset(
            text.partition("=")[0] for text in (*self.inexpressible, *self.in_script, *self.notes)
        )


def lacks(missing: list[str], layout: Layout, field: str, why: str) -> None:
    """Add to `missing` that a software does not support a field of a layout."""
    value = getattr(layout, field)
    missing.append(f"{field}={layout.describe_recompute() if field == 'recompute' else _text(value)}: {why}")


def lacks_recomputation(missing: list[str], layout: Layout, why: str) -> None:
    """Add to `missing` that a software does not support a layout's recomputation."""
    lacks(missing, layout, "recompute", why)
    for name, usual in (
        ("recompute_modules", ()),
        ("recompute_method", "uniform"),
        ("recompute_num_layers", 1),
    ):
        if getattr(layout, name) != usual:
            lacks(missing, layout, name, "as recompute")


def lacks_fp8(missing: list[str], layout: Layout, why: str) -> None:
    """Add to `missing` that a software does not support a layout's fp8 scales and fp8 gathering."""
    for name, usual in (("fp8_recipe", "default"), ("fp8_param_gather", False)):
        if getattr(layout, name) != usual:
            lacks(missing, layout, name, why)


def lacks_bundled_features(missing: list[str], layout: Layout, says_muon_mode: bool = False) -> None:
    """Add to `missing` the layout's features that only the bundled runtime supports, and the division of
    Muon's work.

    Args:
        says_muon_mode: True if the software supports that division.
    """
    if layout.muon_mode != "default" and not says_muon_mode:
        lacks(missing, layout, "muon_mode", "only Megatron-LM has words for how ranks share Muon's work")
    for name in ("expert_halves", "cuda_graphs"):
        if getattr(layout, name):
            lacks(missing, layout, name, "only the runtime that comes with the planner does this")


def lacks_some_layers(
    missing: list[str], layout: Layout, why: str = "all layers are recomputed, one by one"
) -> None:
    """Add to `missing` partial recomputation, for a software that always recomputes all layers, one by
    one."""
    for name, usual in (("recompute_method", "uniform"), ("recompute_num_layers", 1)):
        if getattr(layout, name) != usual:
            lacks(missing, layout, name, why)


def flag_lines(flags: Mapping[str, str]) -> str:
    """Flags as typed on a command line, one per line."""
    return "\n".join(f"{name} {_quoted(value)}".rstrip() for name, value in flags.items()) + "\n"


def _quoted(value: str) -> str:
    """The quoted words of a value, which are separated by blanks."""
    return " ".join(written(word, "word", "a flag's value") for word in value.split(" ")) if value else ""


def nested_mappings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as the mappings of a file.

    Examples:
        >>> nested_mappings({"a.b": 1, "a.c": 2, "d": 3})
        {'a': {'b': 1, 'c': 2}, 'd': 3}
    """
    found: dict[str, Any] = {}
    for path, value in values.items():
        *sections, key = path.split(".")
        inside = found
        for section in sections:
            inside = inside.setdefault(section, {})
        inside[key] = value
    return found


def yaml_text(values: Mapping[str, Any]) -> str:
    """A YAML file of values, in their order."""
    return yaml.dump(
        nested_mappings(values), Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=100
    )


class _Dumper(Dumper):
    """A YAML writer that writes lists on one line."""


def _list(dumper: yaml.SafeDumper, value: list[Any]) -> yaml.Node:
    return dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)


_Dumper.add_representer(list, _list)


def json_text(values: Mapping[str, Any]) -> str:
    """A JSON file of values, in their order."""
    return json.dumps(nested_mappings(values), indent=2) + "\n"


def flag_values(values: Mapping[str, Any]) -> dict[str, str]:
    """Values as text by path, spelled as in files and flags."""
    return {path: _text(value) for path, value in values.items()}


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (list, tuple)):
        return ",".join(map(_text, value))
    return json.dumps(value) if isinstance(value, dict) else str(value)
