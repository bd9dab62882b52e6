"""Ranks of a CPU keep to their own cores."""

from __future__ import annotations

import os
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from costmodels import Layout
from costmodels.catalogue.local_machine import available_cores
from runtime.parallel.cores import own_cores, use_all_cores
from runtime.settings.training_options import TrainingOptions
from runtime.train.trainer import Trainer
from tests.support.models import LLAMA


@given(st.sets(st.integers(0, 63), min_size=1), st.integers(1, 16))
def test_ranks_share_the_cores_evenly(cores: set[int], ranks: int) -> None:
    shares = [own_cores(cores, rank, ranks) for rank in range(ranks)]
    assert all(share and share <= cores for share in shares)
    assert len({len(share) for share in shares}) == 1
    most = max(sum(core in share for share in shares) for core in cores)
    assert most == -(-ranks // len(cores)) if ranks > len(cores) else most == 1


def _cores_of_a_rank() -> tuple[set[int], set[int], set[int], int]:
    """Cores of the thread that trains before and after its first step, of one that it starts, and all."""
    layout = Layout(data_parallel=2, layers_per_stage=(LLAMA.layers,), global_batch_size=2)
    trainer = Trainer(LLAMA, layout, TrainingOptions(train_iters=2), torch.device("cpu"))
    before = os.sched_getaffinity(0)
    trainer.train_step(np.zeros((len(trainer.rows), LLAMA.seq + 1), dtype=np.int64))
    found: list[set[int]] = []

    def beside() -> None:
        use_all_cores()
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=beside)
    thread.start()
    thread.join()
    return before, os.sched_getaffinity(0), found[0], available_cores()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no threads")
def test_ranks_are_bound_after_their_first_step(pool) -> None:  # type: ignore[no-untyped-def]
    every = os.sched_getaffinity(0)
    for rank, (before, after, beside, known) in enumerate(pool.run(_cores_of_a_rank, 2)):
        assert before == beside == every
        assert after == own_cores(every, rank, 2)
        assert known == len(every)
