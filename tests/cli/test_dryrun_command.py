"""`planner dryrun`: what it prints, and wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from costmodels import ModelSpec
from planner import search
from runtime.dryrun.memory_trace import CATEGORIES
from tests.support.commands import Command

TINY = ModelSpec.model_validate(
    {"name": "tiny", "layers": 4, "hidden": 64, "heads": 4, "vocab": 1000, "seq": 64}
)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of two stages of two ranks each."""
    best = search(
        TINY, world_size=4, device="a100-80g", global_batch_size=8, pin=["pp=2", "dp=2", "vpp=1", "zero=1"]
    ).best
    assert best is not None
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    best.save(path)
    return path


def test_json_has_every_stage_with_its_composition(planner_command: Command, plan: Path) -> None:
    code, out, _ = planner_command("dryrun", "--plan", plan, "--no-compile", "--json", "--stage", "1")
    assert code == 0
    answer = json.loads(out)
    assert (answer["model"], answer["device"], answer["compiled"]) == ("tiny", "a100-80g", False)
    (rank,) = answer["ranks"]
    assert (rank["rank"], rank["pipeline_rank"]) == (2, 1)
    peak = rank["peak"]
    assert list(peak["composition"]) == list(CATEGORIES)
    assert peak["bytes"] == sum(peak["composition"].values()) >= peak["live_bytes"]
    assert peak["bytes"] == max(
        moment["bytes"] for label, moment in rank["moments"].items() if label != "build"
    )
    assert rank["estimate"]["bytes"] > 0
    assert rank["needed_bytes"] > peak["bytes"]
    assert rank["fits"]


@pytest.mark.slow
def test_tables_show_a_row_for_each_stage(
    planner_command: Command, plan: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    # Other tests keep traces of the same plan.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    code, out, err = planner_command("dryrun", "--plan", plan, "--no-compile")
    assert code == 0
    first, *_, last = err.splitlines()
    assert first == "planner: loading PyTorch"
    # One after the other, or both at a time.
    assert last in {f"planner: {doing} pipeline rank 2 of 2" for doing in ("tracing", "traced")}
    lines = [line.split() for line in out.splitlines()]
    assert "eager layers on a100-80g" in out
    heads = [line for line in lines if line[:1] == ["pp"]]
    assert [head[1] for head in heads[:2]] == ["rank", "params"]
    for stage, rank in (("0", "0"), ("1", "2")):
        assert any(line[:2] == [stage, rank] for line in lines)


@pytest.mark.slow
def test_gpus_compile_unless_told_otherwise(planner_command: Command, plan: Path) -> None:
    code, out, _ = planner_command("dryrun", "--plan", plan, "--json", "--rank", "1")
    assert code == 0
    answer = json.loads(out)
    assert answer["compiled"]
    assert [rank["rank"] for rank in answer["ranks"]] == [1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--stage", "2"), "--stage 2: the plan has pipeline ranks 0 to 1"),
        (("--rank", "4"), "--rank 4: the plan has ranks 0 to 3"),
        (("--rank", "-1"), "--rank -1: the plan has ranks 0 to 3"),
        (("--stage", "0", "--rank", "0"), "--stage and --rank exclude each other; give one"),
        (("--model", "gpt2"), "--model"),
        (("--compile", "--no-compile"), "--compile"),
    ],
)
def test_wrong_input_is_one_line(
    planner_command: Command, plan: Path, words: tuple[str, ...], message: str
) -> None:
    code, out, err = planner_command("dryrun", "--plan", plan, *words)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_plans_of_other_engines_are_refused(planner_command: Command, tmp_path: Path) -> None:
    best = search(TINY, world_size=2, device="a100-80g", global_batch_size=8, engine="megatron").best
    assert best is not None
    best.save(tmp_path / "plan.json")
    code, _, err = planner_command("dryrun", "--plan", tmp_path / "plan.json")
    assert code == 2
    assert "the plan was made for engine megatron" in err
