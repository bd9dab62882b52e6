"""The dry run of a plan in commands: a proof that they accept, refuse or show."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from cli import proof
from cli.proof import proven_plan
from cli.status import Status
from costmodels.errors import InputError
from costmodels.spec.record import GIB
from planner import search
from planner.plan import Plan
from runtime.dryrun import requirements
from runtime.dryrun.fit import Proof, needed_bytes, needs_proof
from runtime.dryrun.memory_trace import CATEGORIES, MemoryTrace, Moment
from runtime.settings.training_options import TrainingOptions
from tests.support.commands import Command

Traced = list[str]

JOB = ("--model", "gpt2-124m", "--world-size", "8", "--device", "h100", "--max-global-batch-size", "64")


@pytest.fixture(scope="module")
def plans() -> list[Plan]:
    return search("gpt2-124m", world_size=8, device="h100", max_global_batch_size=64).plans(4)


def made(rank: int, stage: int, size: float) -> MemoryTrace:
    held = dict.fromkeys(CATEGORIES, 0) | {"activations": int(size)}
    moment = Moment("backward", held, held, {})
    return MemoryTrace(rank, stage, "cuda", True, moment, {"backward": moment}, 0, 1)


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sequence[float]], Traced]:
    """Let dry runs find so many GiB, one plan after the other; what they were asked for."""

    def use(sizes: Sequence[float]) -> Traced:
        asked: Traced = []

        def trace_ranks(spec: Any, layout: Any, ranks: Sequence[int], **_: Any) -> list[MemoryTrace]:
            asked.append(layout.describe())
            size = GIB * sizes[len(asked) - 1]
            return [made(rank, stage, size) for stage, rank in enumerate(ranks)]

        monkeypatch.setattr(proof, "trace_ranks", trace_ranks)
        return asked

    return use


def chosen(plans: list[Plan], wanted: bool | None, more: list[Plan] | None = None) -> Plan:
    with Status() as status:
        return proven_plan(plans, lambda _: more or plans, wanted, TrainingOptions(), status)


def test_a_plan_that_fits_is_taken_with_what_was_traced(plans: list[Plan], traced: Any) -> None:
    asked = traced([20.0])
    found = chosen(plans[:1], wanted=True)
    assert asked == [plans[0].layout.describe()]
    assert found.layout == plans[0].layout
    stage = found.estimate.memory[0]
    assert stage.activations == 20 * GIB and stage.parameters == 0
    overhead = plans[0].estimate.memory[0].overhead
    assert stage.overhead == overhead
    assert found.estimate.peak_memory_bytes == pytest.approx(needed_bytes(plans[0], made(0, 0, 20 * GIB)))
    assert 20 * GIB + overhead <= found.estimate.peak_memory_bytes < 22 * GIB + overhead
    assert Proof(plans[0], (made(0, 0, 20 * GIB),)).proven_plan() == found


def test_the_next_plan_that_fits_is_taken(
    plans: list[Plan], traced: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = traced([90.0, 85.0, 40.0])
    found = chosen(plans[:1], wanted=True, more=plans)
    assert asked == [plan.layout.describe() for plan in plans[:3]]
    assert found.layout == plans[2].layout
    told = capsys.readouterr().err
    assert told.count("of 79.10 GiB by its dry run; takes the next plan") == 2
    refused = [f"planner: {plan.layout.describe()} does not fit" in told for plan in plans[:3]]
    assert refused == [True, True, False]


def test_plans_that_are_given_are_refused(plans: list[Plan], traced: Any) -> None:
    traced([90.0, 90.0])
    with pytest.raises(InputError, match=r"does not fit: .* GiB by its dry run; .* --no-dry-run"):
        chosen(plans[:1], wanted=True)
    traced([90.0] * 4)
    with pytest.raises(InputError, match="none of the first 4 plans fits into"):
        chosen(plans[:1], wanted=True, more=plans)


def test_plans_near_the_limit_are_traced_unless_told_otherwise(plans: list[Plan], traced: Any) -> None:
    limit = plans[0].cluster.memory_bytes

    def held(share: float) -> Plan:
        estimate = plans[0].estimate.model_copy(update={"peak_memory_bytes": share * limit})
        return plans[0].model_copy(update={"estimate": estimate})

    assert [needs_proof(held(share)) for share in (0.5, 0.79, 0.81, 0.99)] == [False, False, True, True]
    asked = traced([1.0, 1.0])
    chosen([held(0.79)], wanted=None)
    chosen([held(0.95)], wanted=False)
    assert not asked
    chosen([held(0.81)], wanted=None)
    assert len(asked) == 1


def test_suggest_shows_what_was_traced(planner_command: Command, traced: Any) -> None:
    asked = traced([20.0])
    code, out, _ = planner_command("suggest", *JOB, "--dry-run")
    assert code == 0 and len(asked) == 1
    assert ", dry run 2" in next(line for line in out.splitlines() if line.startswith("memory"))
    asked = traced([20.0, 21.0, 40.0])
    code, out, _ = planner_command("suggest", *JOB, "--dry-run", "--top", "3")
    assert code == 0 and len(asked) == 3
    assert "dry run" in out
    code, out, _ = planner_command("suggest", *JOB)
    assert "dry run" not in out


def test_without_pytorch_one_line_says_so(planner_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requirements, "find_spec", lambda _: None)
    code, _, err = planner_command("suggest", *JOB, "--dry-run")
    assert code == 2
    assert err.strip().splitlines() == [
        "planner: error: --dry-run runs the real training step: install torch, on a laptop its CPU build"
    ]
    code, _, err = planner_command("suggest", *JOB, "--dry-run", "--engine", "megatron")
    assert code == 2


def test_other_engines_have_no_dry_run(planner_command: Command) -> None:
    code, _, err = planner_command("suggest", *JOB, "--dry-run", "--engine", "megatron")
    assert code == 2 and "--dry-run runs the engine bundled, not megatron" in err
    sizes = [word if word != "8" else "8..16" for word in JOB]
    code, _, err = planner_command("suggest", *sizes, "--dry-run")
    assert code == 2 and "--dry-run is about one world size" in err


def test_launch_takes_one_of_both_flags(planner_command: Command) -> None:
    code, _, err = planner_command("launch", "--model", "gpt2-nano", "--dry-run", "--no-dry-run")
    assert code == 2 and "--dry-run and --no-dry-run exclude each other" in err
