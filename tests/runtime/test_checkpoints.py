"""Checkpoints load under any layout, are snapshots, and outlive full disks."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from costmodels.errors import InputError
from costmodels.memory.checkpoints import checkpoint_bytes, checkpoint_memory
from costmodels.pricing import estimate
from planner.inputs.cluster import resolve_cluster
from planner.inputs.engine import resolve_engine
from runtime import checkpoint
from runtime.checkpoint.tensors import _PaddedPlanner
from runtime.checkpoint.writer import ALIGNMENT
from runtime.settings.training_options import OutputOptions
from tests.support.jobs import losses, write_corpus
from tests.support.layouts import parse_layout
from tests.support.models import MODELS
from tests.support.ranks import checkpoints as work
from tests.support.worker_pool import WorkerPool

SMALL = MODELS["llama"].model_copy(update={"layers": 1})


def test_rows_of_a_vocabulary_alone_may_be_more_or_fewer_than_are_stored() -> None:
    chunks = [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([4, 2]))]
    stored = TensorStorageMetadata(TensorProperties(torch.float32), torch.Size([4, 2]), chunks)
    for name, rows in (("embedding.tokens.weight", 6), ("norm.weight", 4), ("norm.weight", 6)):
        planner = _PaddedPlanner()
        planner.set_up_planner({name: torch.zeros(rows, 2)}, Metadata({name: stored}), True)
        if (name, rows) == ("norm.weight", 6):
            with pytest.raises(ValueError, match="Size mismatch"):
                planner.create_local_plan()
        else:
            assert [item.lengths for item in planner.create_local_plan().items] == [torch.Size([4, 2])]


@pytest.mark.parametrize("optimizer", ["adafactor", "came"])
def test_vocabularies_of_other_padding_load_both_ways(
    pool: WorkerPool, tmp_path: Path, optimizer: str
) -> None:
    spec = SMALL.model_copy(update={"hidden": 48, "heads": 6, "kv_heads": 3, "ffn": 96})
    layouts = [parse_layout(f"gbs=3,{text}", spec) for text in (f"dp=3,zero=1,optimizer={optimizer}",) * 3]
    layouts[1] = parse_layout(f"gbs=3,tp=3,optimizer={optimizer}", spec)
    assert spec.padded_vocab(3) > spec.padded_vocab(1)
    [first, *others] = pool.run(work.losses_of_other_padding, 3, spec, layouts, str(tmp_path))[0]
    for other in others:
        assert other == pytest.approx(first, rel=1e-6)


def test_an_asynchronous_save_holds_what_was_when_it_began(pool: WorkerPool, tmp_path: Path) -> None:
    layout = parse_layout("gbs=4,dp=2,zero=1", SMALL)
    ranks = pool.run(work.snapshot, 2, SMALL, layout, str(tmp_path))
    for went_on, resumed, _, said in ranks:
        assert resumed == went_on
        assert said == [f"saved checkpoint {tmp_path / 'iter_0000002'}"]
    # The ranks share the work also of tensors that both hold: nothing is copied twice.
    copied = sum(copied for _, _, copied, _ in ranks)
    numbers = 3 * (SMALL.parameters + (SMALL.padded_vocab(1) - SMALL.vocab) * 2 * SMALL.hidden)
    assert 4 * numbers <= copied < 4 * numbers + 2 * 30 * ALIGNMENT


@pytest.mark.parametrize(("read", "left"), [(None, [4, 5]), (1, [1, 4, 5])])
def test_the_last_checkpoints_are_kept_and_those_that_are_read(
    pool: WorkerPool, tmp_path: Path, read: int | None, left: list[int]
) -> None:
    # A checkpoint of a run that was set back, which has yet to come to it.
    pool.run(work.saved, 1, SMALL, parse_layout("gbs=4", SMALL), str(tmp_path), [9])
    layout = parse_layout("gbs=4", SMALL)
    [found] = pool.run(work.kept, 1, SMALL, layout, str(tmp_path), read)
    assert found == [*left, 9]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {checkpoint.TRACKER, *(checkpoint.iteration_folder(tmp_path, i).name for i in found)}
    assert checkpoint.latest_iteration(tmp_path) == 5


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_is_told_once_and_ends_the_run_when_it_stays_full(
    pool: WorkerPool, tmp_path: Path, asynchronous: bool
) -> None:
    layout = parse_layout("gbs=4,dp=2,zero=1", SMALL)
    for said, ended, names, whole in pool.run(work.full_disk, 2, SMALL, layout, str(tmp_path), asynchronous):
        file = tmp_path / "iter_0000002.partial" / "__1_0.distcp"
        assert said[0] == f"saved checkpoint {tmp_path / 'iter_0000001'}"
        assert said[1] == (
            f"checkpoint {tmp_path / 'iter_0000002'} could not be written ({file}: File too large); "
            "the last good one is of iteration 1; the run ends if the next one fails too"
        )
        assert said[2] == f"saved checkpoint {tmp_path / 'iter_0000003'}"
        assert "iter_0000004 could not be written" in said[3] and len(said) == 4
        assert "iter_0000005 could not be written" in ended and "\n" not in ended
        assert (
            f"the last good one is of iteration 3; make room and start again with --load {tmp_path}" in ended
        )
        assert names == ["iter_0000001", checkpoint.TRACKER]
        assert whole == [1, 3]
    checkpoint.verify(tmp_path / "iter_0000003")


def test_a_run_does_not_end_well_without_its_last_checkpoint(pool: WorkerPool, tmp_path: Path) -> None:
    layout = parse_layout("gbs=4", SMALL)
    [ended] = pool.run(work.last_save_fails, 1, SMALL, layout, str(tmp_path))
    assert "iter_0000000 could not be written" in ended and "there is none before it" in ended
    assert not list(tmp_path.iterdir())


def test_weights_can_be_loaded_alone(pool: WorkerPool, tmp_path: Path) -> None:
    layout = parse_layout("gbs=4,dp=2,zero=3", SMALL)
    [(stored, read, iteration), _] = pool.run(work.weights_alone, 2, SMALL, layout, str(tmp_path))
    assert read == stored
    assert iteration == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"async_save": True}, "--async-save needs --save FOLDER"),
        ({"keep_last": 2}, "--keep-last needs --save FOLDER"),
        ({"keep_last": 0, "save": "x"}, "--keep-last 0: must be at least 1"),
        ({"ckpt_step": 4}, "--ckpt-step needs --load FOLDER"),
        ({"ckpt_step": -4, "load": "x"}, "--ckpt-step -4: must be the iteration of a checkpoint"),
        ({"exit_on_missing_checkpoint": True}, "--exit-on-missing-checkpoint needs --load FOLDER"),
        ({"exit_duration_in_mins": 0.0}, "--exit-duration-in-mins 0.0: must be positive"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError) as refused:
        OutputOptions(**options).check()
    assert str(refused.value) == said


def test_what_one_rank_is_asked_all_ranks_do(pool: WorkerPool) -> None:
    expected = [
        ("NOTHING", False),
        ("SAVE", False),
        ("NOTHING", False),
        ("STOP", True),
        ("NOTHING", False),
        ("STOP_IN_TIME", True),
    ]
    assert pool.run(work.requests, 2) == [expected, expected]


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_later_to_the_bit(
    pool: WorkerPool, tmp_path: Path
) -> None:
    data = write_corpus(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    pool.run(work.job, 2, data, str(whole), {}, {})
    expected = losses(whole)
    assert list(expected) == list(range(1, 13))
    saved = parts / "checkpoints"
    # The second rank is asked for a checkpoint, later to stop.
    asked = {2: (1, signal.SIGUSR1), 5: (1, signal.SIGTERM)}
    pool.run(work.job, 2, data, str(parts), asked, {})
    assert checkpoint.iterations(saved) == [2, 5]
    assert losses(parts) == {step: expected[step] for step in range(1, 6)}
    # Back to the earlier one, and on to the end.
    rest = {"load": str(saved), "ckpt_step": 2, "keep_last": 2, "async_save": True}
    pool.run(work.job, 2, data, str(parts), {}, rest)
    assert checkpoint.iterations(saved) == [5, 12]
    assert losses(parts) == expected


@pytest.mark.parametrize("words", ["gbs=4,dp=2,zero=1", "gbs=4,pp=2", "gbs=4,tp=2,sp=true"])
def test_a_save_writes_and_copies_what_is_predicted(pool: WorkerPool, tmp_path: Path, words: str) -> None:
    spec = MODELS["llama"].model_copy(update={"layers": 3})
    layout = parse_layout(words, spec)
    results = pool.run(work.snapshot, 2, spec, layout, str(tmp_path))
    cluster, engine = resolve_cluster("cpu", 2), resolve_engine("bundled", None)
    where = spec, cluster, engine, layout
    memory = checkpoint_memory(*where, estimate(*where), async_save=True)
    assert memory.host_bytes == memory.device_bytes and memory.node_host_bytes == 2 * memory.device_bytes
    # One rank writes the tensors that both hold: norms under tensor parallelism, all else in turns.
    assert max(result[2] for result in results) == pytest.approx(memory.device_bytes, rel=0.08)
    files = sum(path.stat().st_size for path in tmp_path.rglob("*.distcp"))
    assert files == pytest.approx(checkpoint_bytes(*where), rel=0.3)
    assert sum(result[2] for result in results) == pytest.approx(checkpoint_bytes(*where), rel=0.02)
