"""Proposals of the command line where nothing fits: each proposed command is run."""

from __future__ import annotations

import json
from typing import Any

import pytest

SMALL = (
    *("--num-layers", "8", "--hidden-size", "1024", "--num-attention-heads", "16", "--vocab-size", "32000"),
    *("--seq-length", "2048", "--device", "a100-80g"),
)

JOBS = [
    ("1.3", (*SMALL, "--world-size", "2", "--global-batch-size", "16", "--swap-attention")),
    # Pins by flags of Megatron-LM, by ranges and by forbidden values.
    (
        "1.15",
        (
            *(
                *SMALL,
                "--world-size",
                "8",
                "--global-batch-size",
                "64",
                "--pipeline-model-parallel-size",
                "1",
            ),
            *("--pin", "tp=1", "--forbid", "zero=1..3", "--recompute-granularity", "selective"),
        ),
    ),
    (
        "3",
        (
            *(*SMALL, "--world-size", "1", "--global-batch-size", "4", "--pin", "precision=fp32"),
            *("--pin", "offload_optimizer=false"),
        ),
    ),
    (
        "24",
        ("--model", "llama2-13b", "--device", "rtx-4090", "--world-size", "1", "--global-batch-size", "4"),
    ),
]


@pytest.mark.parametrize(("memory", "job"), JOBS)
def test_every_proposed_command_works(
    planner_command: Any, monkeypatch: pytest.MonkeyPatch, memory: str, job: tuple[str, ...]
) -> None:
    monkeypatch.setenv("DEVICE_MEMORY_GB", memory)
    code, out, err = planner_command("suggest", *job, "--json")
    assert code == 3, err
    proposals = json.loads(out)["proposals"]
    assert proposals
    for one in proposals:
        code, out, after = planner_command("suggest", *job, *one["flags"], "--json")
        assert code == 0, (one, after)
        plan = json.loads(out)["plans"][0]
        assert plan["layout"] == one["layout"] and plan["estimate"]["step_time_s"] == one["step_time_s"]
        assert json.loads(out)["proposals"] == []
        assert f"({' '.join(one['flags'])})" in err


def test_adapters_on_a_base_in_4_bits_are_proposed_where_others_do_not_fit(planner_command: Any) -> None:
    _, job = JOBS[-1]
    code, out, _ = planner_command("suggest", *job, "--json")
    [one] = [one for one in json.loads(out)["proposals"] if one["kind"] == "adapters"]
    assert code == 3 and one["flags"] == ["--lora-rank", "16", "--quantize-base", "nf4"]
    assert planner_command("suggest", *job, *one["flags"][:2])[0] == 3


def test_people_see_the_same_priced(planner_command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, job = JOBS[-1]
    monkeypatch.setenv("DEVICE_MEMORY_GB", memory)
    _, out, _ = planner_command("suggest", *job, "--json")
    [pin] = [one for one in json.loads(out)["proposals"] if one["kind"] == "devices"][:1]
    for command in ("suggest", "explain"):
        code, out, err = planner_command(command, *job)
        assert code == 3 and len(err.strip().splitlines()) == 1
        said = " ".join(out.split())
        assert "changes that would fit, the smallest of each kind:" in said
        size = f"{pin['peak_memory_bytes'] / 2**30:.1f} GiB; add {' '.join(pin['flags'])}"
        assert f"{pin['what']}: " in said and size in said
    code, out, _ = planner_command("explain", *job, "--json")
    assert code == 3 and [one["flags"] for one in json.loads(out)["proposals"]].count(pin["flags"]) == 1


def test_a_degree_that_is_not_known_cannot_be_left_to_the_search(planner_command: Any) -> None:
    code, _, err = planner_command("suggest", *JOBS[0][1], "--unpin", "tensor")
    assert code == 2 and len(err.strip().splitlines()) == 1 and "unpin tensor: no such field" in err


def test_what_other_flags_pin_is_left_to_the_search(planner_command: Any) -> None:
    asked = ("suggest", "--model", "llama3-8b", "--world-size", "8", "--global-batch-size", "64", "--json")
    pinned = (*asked, "--tp", "8", "--use-distributed-optimizer", "--recompute-granularity", "full")
    block = ("--recompute-method", "block", "--recompute-num-layers", "2")
    free = [json.loads(planner_command(*asked)[1])["pins"]]
    names = ("--unpin", "tp", "--unpin", "zero_stage", "--unpin", "recompute")
    free.append(json.loads(planner_command(*pinned, *block, *names)[1])["pins"])
    assert free == [{}, {}]
