"""Ranks: who they are, and that all of them end with the same answer or the same refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from costmodels.errors import InputError
from runtime.parallel.ranks import Ranks, start_process_group
from tests.support.ranks import agreement as work
from tests.support.ranks import collectives
from tests.support.worker_pool import WorkerPool

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*NAMES, "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)


def test_a_process_without_torchrun_is_a_job_of_one() -> None:
    assert Ranks.from_environment() == Ranks(0, 0, 1, 1)


def test_torchruns_environment_places_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in zip(NAMES, ("13", "5", "16", "8"), strict=True):
        monkeypatch.setenv(name, value)
    assert Ranks.from_environment() == Ranks(13, 5, 16, 8)


def test_without_a_local_world_size_all_ranks_are_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert Ranks.from_environment() == Ranks(0, 0, 4, 4)


@pytest.mark.parametrize("text", ["two", "-1", "1.5"])
def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", text)
    with pytest.raises(InputError, match=f"WORLD_SIZE={text}: must be a whole number, as torchrun sets it"):
        Ranks.from_environment()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK=5 with WORLD_SIZE=2: must be below it"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "RANK=0 with WORLD_SIZE=0: must be below it"),
        (
            {"WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK=2 with LOCAL_WORLD_SIZE=2",
        ),
    ],
)
def test_a_rank_that_nobody_waits_for_is_refused(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], message: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=message):
        Ranks.from_environment()


def test_many_ranks_need_an_address_to_meet_at() -> None:
    with pytest.raises(InputError, match="WORLD_SIZE=2 without MASTER_ADDR: start the ranks with torchrun"):
        start_process_group(Ranks(0, 0, 2, 2), torch.device("cpu"), 1.0)


def test_all_ranks_get_one_answer_or_one_refusal(pool: WorkerPool, tmp_path: Path) -> None:
    answers = pool.run(work.agreement, 4, str(tmp_path))
    assert [answer["own"] for answer in answers] == [0, 1, 2, 3]
    for answer in answers:
        assert answer["first"] == "from 0"
        assert answer["refused by 0"] == answer["refused by first"] == "rank 0 refuses"
        assert answer["refused by 1"] == "rank 1 refuses"
    # Rank 0, then rank 2 (the first of the second node), then the others.
    turns = [answer["turn"] for answer in answers]
    assert turns[0] == 0 and turns[2] == 1
    assert min(turns[1], turns[3]) >= 2


@pytest.mark.oldest
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="needs /proc")
def test_a_group_of_gloo_has_one_worker_thread(pool: WorkerPool) -> None:
    # Two write one string without a lock. The default group is one more.
    assert pool.run(collectives.gloo_threads, 2, "lo", 3) == [(4, 2.0)] * 2


@pytest.mark.oldest
def test_groups_of_gloo_use_the_interface_of_the_environment(pool: WorkerPool) -> None:
    with pytest.raises(RuntimeError, match="nowhere0"):
        pool.run(collectives.gloo_threads, 2, "nowhere0", 1)
