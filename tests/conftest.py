"""Fixtures that several test folders share."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.commands import Command
from tests.support.worker_pool import WorkerPool

# Tests run beside each other: a second thread for each of their tiny products waits longer than it works (20
# times as long where other processes want the cores), as does a pool of compilers that each rank starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Neither of the two that go by the clock: a busy machine is no failure. What fails prints how to see it
# again.
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("any machine")

# To look through all that tests import for garbage takes a fifth of the time.
gc.disable()

STARTS_JOBS = (
    *("test_batch_ramp", "test_fault_soak", "test_launch", "test_launch_command", "test_pretrained"),
    *("test_ranks", "test_restarts", "test_resume", "test_trial"),
)
"""Modules whose tests start jobs of several processes, as many as this machine has cores or more."""


SLOW = (
    *("test_convert", "test_data_parallel", "test_dry_build", "test_dryrun", "test_dryrun_command"),
    *("test_dryrun_repeats", "test_fit_memory", "test_generate", "test_hf_agreement", "test_initialise"),
    *("test_latent_attention", "test_loss", "test_memory_formula", "test_memory_of_features"),
    *("test_memory_of_schedules", "test_model", "test_offload", "test_recompute"),
)
"""Modules that trace or compute for minutes, without ranks."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what starts ranks, what is slow, and the quick rest.

    Tests of one file that start ranks stay in one process of pytest and share what one rank computes.
    """
    for item in items:
        starts_ranks = "pool" in getattr(item, "fixturenames", ()) or item.path.stem in STARTS_JOBS
        if starts_ranks:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
            item.add_marker(pytest.mark.ranks)
        if item.path.stem in SLOW:
            item.add_marker(pytest.mark.slow)
        elif not starts_ranks:
            item.add_marker(pytest.mark.quick)


def pytest_collection_finish() -> None:
    """Spare collectors what the tests have imported, which stays: they look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def pool() -> WorkerPool:
    """Up to eight gloo ranks at a time."""
    return WorkerPool(8)


@pytest.fixture
def planner_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """The command line, run in this process."""
    from cli.main import main

    def command(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["planner", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        code = stop.value.code
        out, err = capsys.readouterr()
        return code if isinstance(code, int) else 0, out, err

    return command
