"""Files in a checkpoint's folder are whole, or refused in one line that names the file."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from costmodels.errors import InputError
from runtime import checkpoint
from runtime.checkpoint import folders, loader
from runtime.checkpoint.manifest import manifest_text
from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks import checkpoints as work
from tests.support.worker_pool import WorkerPool

SPEC = MODELS["llama"].model_copy(update={"layers": 1})
RUN = {"iteration": 3, "model": SPEC.model_dump(mode="json"), "consumed_samples": 12}


def write(folder: Path, iteration: int, contents: bytes) -> Path:
    """A checkpoint of one file."""
    checkpoint.clear_folder(folder)
    partial = checkpoint.partial_folder(folder, iteration)
    partial.mkdir()
    (partial / "file").write_bytes(contents)
    return checkpoint.publish(
        folder, iteration, {**RUN, "iteration": iteration}, checkpoint.file_records(partial)
    )


@pytest.fixture(scope="module")
def stored(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of checkpoints of iterations 1 and 2."""
    folder = tmp_path_factory.mktemp("stored")
    pool.run(work.saved, 2, SPEC, parse_layout("gbs=2,dp=2,zero=1", SPEC), str(folder), [1, 2])
    return folder


@pytest.fixture
def copy(stored: Path, tmp_path: Path) -> Path:
    """A copy of the stored checkpoint, to be damaged."""
    return Path(shutil.copytree(stored, tmp_path / "copy"))


def refusal(folder: Path, iteration: int = 2) -> str:
    with pytest.raises(InputError) as refused:
        checkpoint.verify(checkpoint.iteration_folder(folder, iteration))
    assert "\n" not in str(refused.value)
    return str(refused.value)


FILES = ("__0_0.distcp", "__1_0.distcp", ".metadata", "run.json")


def test_a_checkpoint_says_what_it_is_of(stored: Path) -> None:
    folder = checkpoint.iteration_folder(stored, 2)
    assert set(checkpoint.verify(folder).files) == set(FILES)
    run = checkpoint.read_run(folder)
    assert run.model == SPEC and run.iteration == 2
    assert run.run_state() == {"consumed_samples": 8, "note": "mine"}


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(st.sampled_from((*FILES, checkpoint.MANIFEST)), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
def test_any_bit_that_changes_is_found_and_its_file_named(
    stored: Path, name: str, where: float, bit: int
) -> None:
    path = checkpoint.iteration_folder(stored, 2) / name
    before = path.read_bytes()
    damaged = bytearray(before)
    damaged[int(where * len(before))] ^= 1 << bit
    path.write_bytes(damaged)
    try:
        if name != checkpoint.MANIFEST:
            assert refusal(stored) == f"{path}: the file is damaged: it differs from what was saved"
            return
        try:
            # White space says nothing.
            checkpoint.verify(path.parent)
        except InputError as error:
            assert str(error).startswith(f"{path}: the file is damaged: it ")
    finally:
        path.write_bytes(before)


@pytest.mark.parametrize("name", [*FILES, checkpoint.MANIFEST])
def test_short_and_missing_files_are_named(copy: Path, name: str) -> None:
    path = checkpoint.iteration_folder(copy, 2) / name
    size = path.stat().st_size
    os.truncate(path, size - 1)
    short = "is not a list of files" if name == checkpoint.MANIFEST else f"has {size - 1} of the {size} bytes"
    assert f"{path}: the file is damaged: it {short}" in refusal(copy)
    path.unlink()
    missing = (
        "holds no complete checkpoint" if name == checkpoint.MANIFEST else f"{path}: the file is missing"
    )
    assert missing in refusal(copy)


def test_a_checkpoint_whose_successor_never_came_is_put_back(tmp_path: Path) -> None:
    """Also by a run that only writes here, and so looks for none to load."""
    for iteration in (1, 2):
        target = write(tmp_path, iteration, b"contents")
    target.rename(target.with_name(target.name + folders.REPLACED_SUFFIX))
    assert checkpoint.iterations(tmp_path) == [1]
    checkpoint.clear_folder(tmp_path)
    assert checkpoint.iterations(tmp_path) == [1, 2]
    assert checkpoint.verify(target).files.keys() == {"file", "run.json"}


def test_a_run_is_told_to_go_on_from_the_last_good_checkpoint_before(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 5):
        write(tmp_path, iteration, b"contents")
    (checkpoint.iteration_folder(tmp_path, 2) / "file").unlink()
    advised = [folders.reload_advice(tmp_path, iteration) for iteration in (1, 3, 5)]
    assert [words.rpartition("--ckpt-step ")[2] for words in advised] == ["5", "1", "3"]


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_every_file_is_checked_by_one_rank(stored: Path, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[str] = []
    monkeypatch.setattr(loader, "run_on_first_rank", lambda work: work())
    monkeypatch.setattr(loader, "run_together", lambda work: work())
    monkeypatch.setattr(loader, "check_files", lambda folder, files: checked.extend(files))
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    for rank in range(ranks):
        monkeypatch.setattr(dist, "get_rank", lambda rank=rank: rank)
        loader._checked(checkpoint.iteration_folder(stored, 2), 2)
    assert sorted(checked) == sorted(FILES)


class Trap:
    """Leaves a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_all_ranks_refuse_a_damaged_checkpoint_before_it_is_unpickled(
    pool: WorkerPool, copy: Path, tmp_path: Path
) -> None:
    path = checkpoint.iteration_folder(copy, 2) / ".metadata"
    path.write_bytes(pickle.dumps(Trap(tmp_path / "sprung")).ljust(path.stat().st_size, b"."))
    layout = parse_layout("gbs=2,dp=2,zero=1", SPEC)
    refused = pool.run(work.loaded, 2, SPEC, layout, str(copy), 2)
    damage = f"{path}: the file is damaged: it differs from what was saved"
    assert refused == [f"{damage}; go on from another one with --ckpt-step 1"] * 2
    assert not (tmp_path / "sprung").exists()
    # Whoever plants something can write checksums, too.
    (path.parent / checkpoint.MANIFEST).unlink()
    (path.parent / checkpoint.MANIFEST).write_text(manifest_text(checkpoint.file_records(path.parent)))
    [planted, _] = pool.run(work.loaded, 2, SPEC, layout, str(copy), 2)
    assert planted.startswith(f"{path}: not what PyTorch writes: it names ")
    assert not (tmp_path / "sprung").exists()
    shutil.move(checkpoint.iteration_folder(copy, 1), checkpoint.iteration_folder(copy, 7))
    [renamed, _] = pool.run(work.loaded, 2, SPEC, layout, str(copy), 7)
    assert "iter_0000007 holds iteration 1: the folder has been renamed" in renamed


class Crash(BaseException):
    """The machine stops."""


OPERATIONS = [
    (os, "fsync"),
    (Path, "rename"),
    (Path, "replace"),
    (folders, "_write"),
    (shutil, "rmtree"),
]


@pytest.fixture
def crash_at(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Lets the machine stop at the operation of this number: before, or half-way through it."""
    left = [0]

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                if function.__name__ == "_write":
                    arguments[0].write_bytes(arguments[1][: len(arguments[1]) // 2])
                elif function.__name__ == "rmtree":
                    next(path for path in Path(arguments[0]).rglob("*") if path.is_file()).unlink()
                raise Crash
            return function(*arguments, **named)

        return counted

    for module, name in OPERATIONS:
        monkeypatch.setattr(module, name, wrap(getattr(module, name)))
    yield lambda number: left.__setitem__(0, number)


@pytest.mark.parametrize("iteration", [3, 4])
def test_a_crash_at_any_moment_leaves_a_whole_checkpoint(
    tmp_path: Path, crash_at: Callable[[int], None], iteration: int
) -> None:
    """The checkpoint of iteration 3 is followed by one of 4, or replaced by one of 3."""
    crashes = 0
    while True:
        folder = tmp_path / str(crashes)
        crash_at(0)
        write(folder, 3, b"old" * 1000)
        crash_at(crashes + 1)
        try:
            write(folder, iteration, b"new" * 1000)
            folders.prune_checkpoints(folder, iteration, 1)
            break
        except Crash:
            crashes += 1
        crash_at(0)
        latest = checkpoint.latest_iteration(folder)
        assert latest in (3, iteration)
        checkpoint.verify(checkpoint.iteration_folder(folder, latest))
        # The next save finds nothing in its way.
        write(folder, iteration, b"next" * 1000)
        assert checkpoint.latest_iteration(folder) == iteration
        checkpoint.verify(checkpoint.iteration_folder(folder, iteration))
        assert not list(folder.glob("*.partial")) and not list(folder.glob("*.replaced"))
    assert crashes > 10
    assert checkpoint.iterations(folder) == [iteration]
    contents = (checkpoint.iteration_folder(folder, iteration) / "file").read_bytes()
    assert contents == b"new" * 1000


def test_the_newest_checkpoint_is_the_one_that_the_tracker_names(tmp_path: Path) -> None:
    assert checkpoint.latest_iteration(tmp_path) is None
    assert checkpoint.latest_iteration(tmp_path / "nowhere") is None
    for iteration in (8, 4):
        write(tmp_path, iteration, b"")
    assert checkpoint.latest_iteration(tmp_path) == 4
    assert checkpoint.iteration_to_load(tmp_path, 8) == 8
    with pytest.raises(InputError, match=r"--ckpt-step 5: .* holds no such checkpoint; there are 4, 8"):
        checkpoint.iteration_to_load(tmp_path, 5)
    tracker = tmp_path / checkpoint.TRACKER
    tracker.write_text("12")
    with pytest.raises(
        InputError, match=r"12, but .*iter_0000012 holds no complete checkpoint; .* with --ckpt-step 8"
    ):
        checkpoint.latest_iteration(tmp_path)
    # As when the machine stopped before the first one was named.
    tracker.unlink()
    assert checkpoint.latest_iteration(tmp_path) == 8


@pytest.mark.parametrize("text", [b"release", b"", b"\xff\xfe", "٤".encode(), b"9" * 5000, b"-4", b"4.0"])
def test_a_tracker_that_names_no_iteration_is_refused(tmp_path: Path, text: bytes) -> None:
    write(tmp_path, 4, b"")
    (tmp_path / checkpoint.TRACKER).write_bytes(text)
    with pytest.raises(InputError, match="is not an iteration number; write the one to load"):
        checkpoint.latest_iteration(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"iteration": -1}, "iteration: input should be greater"),
        ({"iteration": None}, "iteration: input should be a valid integer"),
        ({"consumed_samples": "many"}, "consumed_samples: input should be a valid integer"),
        ({"skipped_iterations": 9}, "skipped_iterations exceed iteration"),
        ({"loss_scale": {"value": 0.0, "good_steps": 0, "overflows_left": 2}}, "loss_scale.value: "),
        ({"loss_scale": {"value": float("nan"), "good_steps": 0, "overflows_left": 2}}, "loss_scale.value: "),
        ({"model": {"name": "x"}}, "model.layers: field required"),
        ({"optimizer_state": [1]}, "optimizer_state.0: input should be a valid string"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_run_file_that_says_nothing_valid_is_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    (tmp_path / checkpoint.RUN_FILE).write_text(json.dumps(RUN | change))
    with pytest.raises(InputError) as refused:
        checkpoint.read_run(tmp_path)
    assert str(refused.value).startswith(f"{tmp_path / checkpoint.RUN_FILE}: the file is damaged: it says ")
    assert said in str(refused.value)


@pytest.mark.parametrize("text", [b"", b"[]", b"[" * 100_000, b"\xff", b'{"iteration": 1e999}', b"null"])
def test_a_run_file_that_is_none_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / checkpoint.RUN_FILE).write_bytes(text)
    with pytest.raises(InputError, match="the file is damaged: it says nothing valid"):
        checkpoint.read_run(tmp_path)
