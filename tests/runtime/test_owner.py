"""One job at a time writes into a folder, on one machine or several, and no crash leaves it locked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from costmodels.errors import InputError
from runtime.checkpoint import owner as module
from runtime.checkpoint import partial_folder
from runtime.checkpoint.owner import OWNER, Owner, Record, check_ownership, ownership
from runtime.checkpoint.writer import _begin
from runtime.huggingface.new_folder import new_folder
from tests.support import ROOT


def record(path: Path) -> Record:
    return Record.model_validate_json((path / OWNER).read_bytes())


def write(path: Path, told: Record) -> None:
    (path / OWNER).write_bytes(told.model_dump_json().encode().ljust(module.RECORD_BYTES))


def left_by_another_machine(folder: Path) -> Record:
    """The record of an owner elsewhere, which has not said that it ended."""
    told = Record(process=77, host="node7", machine="another kernel", since="2026-01-02 03:04:05", token="t7")
    write(folder, told)
    return told


@pytest.fixture
def watching(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """A clock whose sleeps make something happen while a record is watched."""
    now = [0.0]

    def watch(happens: Callable[[], None]) -> None:
        def sleep(seconds: float) -> None:
            now[0] += seconds
            happens()

        monkeypatch.setattr(time, "sleep", sleep)
        monkeypatch.setattr(time, "monotonic", lambda: now[0])

    return watch


def test_a_second_job_is_told_who_has_the_folder(tmp_path: Path) -> None:
    with ownership(tmp_path, "--save there"):
        told = record(tmp_path)
        with pytest.raises(InputError) as refused:
            Owner(tmp_path, "--save here").acquire(patience_s=0.0)
        check_ownership(tmp_path)
    assert str(refused.value) == (
        f"--save here: in use by process {os.getpid()} on host {told.host} since {told.since}; wait until it "
        "has ended, or give another folder"
    )
    assert (tmp_path / OWNER).read_bytes() == b""
    with ownership(tmp_path, "--save here"):
        pass


def test_a_killed_job_leaves_its_folder_to_the_next(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from runtime.checkpoint.owner import Owner; "
        "Owner(Path(sys.argv[1]), '--save x').acquire(); print('mine', flush=True); time.sleep(600)"
    )
    job = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert job.stdout is not None
    try:
        assert job.stdout.readline() == "mine\n"
        with pytest.raises(InputError, match=f"in use by process {job.pid} on host "):
            Owner(tmp_path, "--save x").acquire(patience_s=0.0)
        job.send_signal(signal.SIGKILL)
        job.wait()
        assert record(tmp_path).process == job.pid  # It had no time to say that it ended.
        with ownership(tmp_path, "--save x", patience_s=0.0):
            assert record(tmp_path).process == os.getpid()
    finally:
        job.kill()
        job.wait()
        job.stdout.close()


@pytest.mark.parametrize("locks", [True, None])
def test_an_owner_elsewhere_is_heeded_while_it_counts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    watching: Callable[[Callable[[], None]], None],
    locks: bool | None,
) -> None:
    """An owner is honoured where locks hold on one machine only, and where there are none."""
    monkeypatch.setattr(module, "_lock", lambda file: locks)
    told = left_by_another_machine(tmp_path)
    watching(lambda: write(tmp_path, told.model_copy(update={"beat": 5})))
    with pytest.raises(InputError, match="in use by process 77 on host node7 since 2026-01-02 03:04:05"):
        Owner(tmp_path, "--save x").acquire(patience_s=0.0)
    watching(lambda: None)
    with ownership(tmp_path, "--save x", patience_s=0.0):
        assert record(tmp_path).process == os.getpid()


def test_without_locks_a_crash_on_this_machine_is_watched_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watching: Callable[[Callable[[], None]], None]
) -> None:
    monkeypatch.setattr(module, "_lock", lambda file: None)
    watching(lambda: None)
    first = Owner(tmp_path, "--save x")
    first.acquire()
    first.close()  # As a crash does, it leaves the record.
    with ownership(tmp_path, "--save x", patience_s=0.0):
        assert record(tmp_path).token != first.record.token


def test_a_job_waits_for_one_that_is_just_ending(
    tmp_path: Path, watching: Callable[[Callable[[], None]], None]
) -> None:
    first = Owner(tmp_path, "--save x")
    first.acquire()
    watching(first.release)
    Owner(tmp_path, "--save x").acquire(patience_s=1.0)


def test_the_owner_goes_on_counting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.001)
    with ownership(tmp_path, "--save x"):
        while record(tmp_path).beat < 3:
            time.sleep(0.001)


def test_a_count_on_its_way_does_not_outlive_the_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BEAT_S", 0.001)
    owner, began = Owner(tmp_path, "--save x"), threading.Event()
    write_now = owner._write

    def late() -> None:
        if threading.current_thread() is not threading.main_thread():
            began.set()
            owner.ended.wait()
        write_now()

    monkeypatch.setattr(owner, "_write", late)
    owner.acquire()
    began.wait()
    owner.release()
    owner.beats.join()
    assert (tmp_path / OWNER).read_bytes() == b""


def test_a_job_that_lost_its_folder_touches_nothing_there(tmp_path: Path) -> None:
    """Two that began at once where there are no locks: the last one has it."""
    other = partial_folder(tmp_path, 7)
    with ownership(tmp_path, "--save x"):
        taken = left_by_another_machine(tmp_path)
        other.mkdir()
        with pytest.raises(InputError, match=r"in use by process 77 on host node7 .* taken it over"):
            _begin(tmp_path)
        assert other.is_dir()
    assert record(tmp_path) == taken


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / OWNER).mkdir()
    with pytest.raises(InputError, match="--save x: cannot write there"):
        Owner(tmp_path, "--save x").acquire()


def test_two_conversions_do_not_delete_each_others_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Owner.acquire, "__defaults__", (0.0,))
    target = tmp_path / "new"
    with new_folder(target, "--output") as first:
        (first / "weights").write_text("first")
        with (
            pytest.raises(InputError, match=f"--output {target}: in use by process {os.getpid()} on host"),
            new_folder(target, "--output"),
        ):
            pytest.fail("the second one may not write")
        assert (first / "weights").read_text() == "first"
    assert [path.name for path in target.iterdir()] == ["weights"]
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
