"""The published layouts: well-formed data, and two of them ranked."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from benchmarks import experts
from costmodels.catalogue.yaml_files import parse
from planner.explanation.outcome import parse_layout
from planner.inputs.engine import resolve_engine
from planner.inputs.model import resolve_model
from planner.inputs.pins import parse_pins

GROUPS = parse(experts.DATA.read_text(encoding="utf-8"), "experts.yaml")["groups"]


@pytest.mark.parametrize("group", GROUPS, ids=[group["name"] for group in GROUPS])
def test_every_row_is_a_job_with_its_degrees(group):
    engine = resolve_engine(group["engine"]).with_constants(group.get("switches", {}))
    assert group["precision"] in engine.memory
    pins: dict[str, Any] = parse_pins(group["pins"], group.get("forbid"))
    assert any(word in group["source"] for word in ("arXiv", "gitee", "github"))
    for row in group["rows"]:
        degrees: dict[str, Any] = parse_layout(row["layout"])
        if isinstance(row["model"], str):
            resolve_model(row["model"], seq=row.get("seq"))
        # Published degrees agree with the pins, and divide the devices.
        assert all(
            pins[name] == value or value in pins[name] for name, value in degrees.items() if name in pins
        )
        assert row["devices"] % (degrees["tensor_parallel"] * degrees["pipeline_parallel"]) == 0


@pytest.mark.parametrize(("only", "measured"), [("sc21-1.7b", 3.53), ("korthikanti-530b", 37.83)])
def test_a_published_layout_is_near_the_top(only, measured):
    (one,) = experts.rows(only)
    assert one.near_the_top and one.place is not None and one.place <= one.feasible <= one.legal
    assert one.slower == pytest.approx(1.0, abs=0.05)
    assert one.measured_s == pytest.approx(measured, rel=1e-2)
    assert one.estimated_s == pytest.approx(measured, rel=0.1)


def test_it_prints_a_table_and_json(monkeypatch, capsys):
    for words in ([], ["--json"]):
        monkeypatch.setattr(sys, "argv", ["experts", "--rows", "korthikanti-530b", *words])
        experts.main()
    text, _, rest = capsys.readouterr().out.partition("[\n")
    assert "1 of 1 are in the top 5 % of the layouts that fit" in text
    (row,) = json.loads("[" + rest)
    assert row["model"] == "korthikanti-530b" and row["place"] == 1
