"""Plan files: what is saved loads back equal, and broken files end in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels import Engine, Estimate, StageMemory, StepTime
from costmodels.errors import InputError
from planner import Plan, search
from tests.support.models import TINY


def plan_of(world: int = 4, **arguments: Any) -> Plan:
    best = search(TINY, world_size=world, max_global_batch_size=16, **arguments).best
    assert best is not None
    return best


PLAN = plan_of()

SIZES = st.floats(min_value=0, allow_nan=False, allow_infinity=False)
RATES = st.floats(min_value=0, exclude_min=True, allow_nan=False, allow_infinity=False)
ESTIMATES = st.builds(
    Estimate,
    step_time_s=RATES,
    step_time_low_s=RATES,
    step_time_high_s=RATES,
    time=st.builds(StepTime, **dict.fromkeys(StepTime.model_fields, SIZES)),
    memory=st.lists(
        st.builds(StageMemory, **dict.fromkeys(StageMemory.model_fields, SIZES)),
        min_size=PLAN.layout.pipeline_parallel,
        max_size=PLAN.layout.pipeline_parallel,
    ).map(tuple),
    peak_memory_bytes=RATES,
    tokens_per_s=RATES,
    tokens_per_s_per_device=RATES,
    tflops_per_device=RATES,
    mfu=RATES,
)


@settings(max_examples=50, deadline=None)
@given(
    estimate=ESTIMATES,
    reason=st.text(),
    fits=st.booleans(),
    rejected=st.dictionaries(st.text(), st.integers(0, 10**15)),
    rank=st.integers(0, 30),
)
def test_a_saved_plan_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory,
    estimate: Estimate,
    reason: str,
    fits: bool,
    rejected: dict[str, int],
    rank: int,
) -> None:
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    plan = PLAN.model_copy(
        update={"estimate": estimate, "reason": reason, "fits": fits, "rejected": rejected}
    )
    plan.save(path)
    assert Plan.load(path) == plan


def test_a_plan_of_before_ranges_has_its_point_for_both_ends() -> None:
    fields = PLAN.estimate.model_dump()
    assert 0 < fields["step_time_low_s"] < fields["step_time_s"] < fields["step_time_high_s"]
    old = {
        name: value for name, value in fields.items() if name not in ("step_time_low_s", "step_time_high_s")
    }
    loaded = Estimate.model_validate(old)
    assert loaded.step_time_low_s == loaded.step_time_high_s == loaded.step_time_s


@pytest.mark.parametrize("engine", ["bundled", "megatron", "nanotron"])
def test_every_search_result_round_trips(tmp_path: Path, engine: str) -> None:
    plan = plan_of(8, engine=engine, pin="pp=2")
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert isinstance(loaded.engine, Engine)
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def change(**fields: Any) -> str:
    return json.dumps({**PLAN.model_dump(mode="json"), **fields})


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('{"version": 1,\n  "model": }', "broken JSON at line 2, column 12"),
        ("", "broken JSON at line 1, column 1"),
        ("[1, 2]", "expected a JSON object, not list"),
        ("{}", "model: Field required"),
        (change(version=2), "version 2 is of a later planner; this one reads up to 1"),
        (change(colour="red"), "colour 'red': Extra inputs are not permitted"),
        (change(considered=-1), "considered -1: Input should be greater than or equal to 0"),
        (change(model={**TINY.model_dump(mode="json"), "layers": 5}), "layers_per_stage adds up to 4 layers"),
        (
            change(layout={**PLAN.layout.model_dump(mode="json"), "global_batch_size": 7}),
            "global_batch_size 7 is not divisible",
        ),
        (
            change(cluster={**PLAN.cluster.model_dump(mode="json"), "world_size": 2}),
            "occupies 4 devices, but the cluster's world_size is 2",
        ),
    ],
)
def test_a_broken_plan_file_ends_in_one_line_that_names_it(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        Plan.load(path)
    assert line in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_cannot_be_read_end_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file; write one with planner suggest --save"):
        Plan.load(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        Plan.load(tmp_path)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not a text file"):
        Plan.load(tmp_path / "binary.json")


def test_saving_into_a_missing_folder_ends_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"plan .*plan.json: cannot be written: No such file or directory"):
        PLAN.save(tmp_path / "none" / "plan.json")


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match="No space left on device"):
        PLAN.model_copy(update={"reason": "new"}).save(path)
    monkeypatch.undo()
    assert Plan.load(path) == PLAN
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_a_plan_that_was_edited_by_hand_does_not_keep_its_estimate(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    PLAN.save(path)
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "reason": "mine"}))
    assert Plan.load(path).layout == PLAN.layout
    for part, name, value in (
        ("layout", "global_batch_size", 2 * PLAN.layout.global_batch_size),
        ("model", "vocab", 999),
        ("estimate", "mfu", 0.9),
    ):
        path.write_text(json.dumps({**values, part: {**values[part], name: value}}))
        with pytest.raises(
            InputError, match="the file was edited, and its estimate is of the plan before the edit"
        ):
            Plan.load(path)
    # Files of older planners do not say what their estimate is of.
    del values["digest"]
    path.write_text(json.dumps(values))
    assert Plan.load(path) == PLAN
