"""Fixtures that several test folders share."""

from __future__ import annotations

import gc
import os
import sys
from collections import defaultdict
from collections.abc import Iterator
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

USUAL_S = {"ranks": 8.0, "slow": 2.0, "quick": 0.05}
"""Seconds that a test takes, by its first mark of these: they say nothing but which files come first."""

# To look through all that tests import for garbage takes a fifth of the time.
gc.disable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what takes ranks from the pool, and what is quick: neither `ranks` nor `slow`.

    A file stays in one process of pytest, whose tests share what one of them computes. Long files come
    first, so that none is left to one process at the end.
    """
    seconds: defaultdict[Path, float] = defaultdict(float)
    for item in items:
        if "pool" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.ranks)
        if not (item.get_closest_marker("ranks") or item.get_closest_marker("slow")):
            item.add_marker(pytest.mark.quick)
        seconds[item.path] += next(most for mark, most in USUAL_S.items() if item.get_closest_marker(mark))
    items.sort(key=lambda item: -seconds[item.path])


def pytest_collection_finish() -> None:
    """Spare collectors what the tests have imported, which stays: they look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def no_measured_devices(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever somebody has calibrated on this machine, tests plan with the catalogue."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.getbasetemp() / "config"))


@pytest.fixture(autouse=True, scope="session")
def imports_stay_frozen() -> Iterator[None]:
    """Imported modules stay out of all collections, also after a dry run, and are counted once.

    A collection that looks through them takes half a second; the count, which the command takes too, 30 ms.
    """
    frozen = gc.get_freeze_count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "get_freeze_count", lambda: frozen)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def history_of_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Measurements of jobs of tests stay out of the history of the user who runs the tests."""
    os.environ["XDG_DATA_HOME"] = str(tmp_path_factory.getbasetemp() / "data")


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
