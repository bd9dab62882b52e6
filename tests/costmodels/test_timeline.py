"""Timelines: every pass once, files that trace viewers read, and what is refused."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from costmodels import timeline as timelines
from costmodels.errors import InputError
from costmodels.timeline import timeline


@pytest.fixture
def timeline_of(gpt, cluster, engine, layout):
    """Makes the timeline of a layout of 16 devices from abbreviations."""

    def make(**fields):
        return timeline(gpt, cluster(16), engine("bundled"), layout(gpt, **fields))

    return make


@pytest.mark.parametrize(
    ("fields", "kinds"),
    [
        ({"pp": 4, "dp": 4, "m": 6}, "FB"),
        ({"pp": 2, "vpp": 2, "dp": 8, "m": 4}, "FB"),
        ({"pp": 4, "vpp": 2, "dp": 4, "m": 8, "schedule": "zbv"}, "FIW"),
        ({"dp": 16, "m": 3}, "FB"),
    ],
)
def test_each_micro_batch_passes_each_stage_once_in_each_direction(timeline_of, fields, kinds):
    found = timeline_of(**fields)
    pp, vpp, m = fields.get("pp", 1), fields.get("vpp", 1), fields["m"]
    assert (found.ranks, found.chunks) == (pp, vpp)
    seen = Counter((event.kind, event.stage, event.micro_batch) for event in found.passes)
    assert seen == {(kind, s, i): 1 for kind in kinds for s in range(pp * vpp) for i in range(m)}
    for event in found.passes:
        assert 0 <= event.start_s < event.end_s <= found.seconds * (1 + 1e-12)
    assert [sum(pair) for pair in zip(found.busy_s, found.idle_s, strict=True)] == pytest.approx(
        [found.seconds] * pp
    )


def test_messages_leave_when_a_pass_ends_and_reach_the_next_rank_in_time(timeline_of):
    found = timeline_of(pp=4, vpp=2, dp=4, m=8, schedule="dualpipev")
    starts = {(e.kind if e.kind == "F" else "B", e.stage, e.micro_batch): e for e in found.passes}
    for message in found.messages:
        step = 1 if message.kind == "F" else -1
        receiver = starts["F" if step == 1 else "B", message.stage + step, message.micro_batch]
        assert receiver.rank != message.rank
        assert message.start_s < message.end_s <= receiver.start_s * (1 + 1e-12)
    # Eight stages have seven boundaries; the one at the point of the V lies inside the last rank.
    assert len(found.messages) == 2 * 6 * 8


def test_a_trace_has_a_row_for_each_rank_and_names_passes(timeline_of, tmp_path):
    timeline_of(pp=2, vpp=2, dp=8, m=4).save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    titles = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert titles == {0: "compute", 1: "activations sent", 2: "gradients sent"}
    rows = [e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 0]
    assert rows == ["rank 0", "rank 1"]
    passes = [e for e in events if e["ph"] == "X" and e["pid"] == 0]
    assert len(passes) == 2 * 4 * 4
    assert {e["name"] for e in passes} == {f"{k}{i}.{c}" for k in "FB" for i in range(4) for c in range(2)}
    last: dict[Any, Any] = {}
    for event in passes:
        assert event["ts"] >= last.get(event["tid"], 0.0) - 1e-6
        last[event["tid"]] = event["ts"] + event["dur"]


def test_a_trace_without_a_pipeline_has_one_row(timeline_of):
    events = timeline_of(dp=16, m=3).chrome_trace()["traceEvents"]
    assert {event["pid"] for event in events} == {0}
    assert [event["name"] for event in events if event["ph"] == "X"] == ["F0", "B0", "F1", "B1", "F2", "B2"]


def test_what_cannot_be_drawn_is_refused_in_one_line(timeline_of, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="schedule interleaved does not run 9 microbatches on 4 pipeline"):
        timeline_of(pp=4, vpp=2, dp=4, m=9)
    with pytest.raises(InputError, match=r"timeline .*none/trace.json: cannot be written: No such file"):
        timeline_of(dp=16, m=1).save(tmp_path / "none" / "trace.json")
    monkeypatch.setattr(timelines, "MOST_PASSES", 100)
    with pytest.raises(InputError, match="13 microbatches are too many to draw; use a batch of at most 12"):
        timeline_of(pp=4, dp=4, m=13)


def test_a_trace_that_cannot_be_written_leaves_the_old_one(timeline_of, tmp_path, monkeypatch):
    found, file = timeline_of(), tmp_path / "trace.json"
    found.save(file)
    old = file.read_text()

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(InputError, match=r"trace\.json: cannot be written: No space left on device"):
        found.save(file)
    assert file.read_text() == old
    assert list(tmp_path.iterdir()) == [file]
