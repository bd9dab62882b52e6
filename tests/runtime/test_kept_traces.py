"""Dry runs are kept, under all that they depend on and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from costmodels import Layout, ModelSpec
from costmodels.errors import InputError
from runtime.dryrun import kept_traces, ranks
from runtime.dryrun.alike import alike_ranks
from runtime.dryrun.kept_traces import keep_trace, kept_trace, trace_name
from runtime.dryrun.memory_trace import CATEGORIES, MemoryTrace, Moment
from runtime.dryrun.ranks import trace_ranks
from runtime.processes.pools import brief_pool
from runtime.processes.preloading import preloading
from runtime.settings.training_options import TrainingOptions
from tests.support import ROOT
from tests.support.jobs import wait_until
from tests.support.layouts import layout_of
from tests.support.running_jobs import is_alive

GPT = ModelSpec.model_validate(
    {"name": "gpt", "layers": 8, "hidden": 64, "heads": 4, "vocab": 128, "seq": 32}
)

MOMENT = Moment("forward", dict.fromkeys(CATEGORIES, 512), dict.fromkeys(CATEGORIES, 5), {"mlp": 512})


def made(rank: int) -> MemoryTrace:
    return MemoryTrace(
        rank=rank,
        pipeline_rank=rank,
        device="cuda",
        compiled=False,
        peak=MOMENT,
        moments={"forward": MOMENT},
        host_bytes=7,
        micro_batches=2,
    )


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def name_of(layout: Layout, compiled: bool = False, **options: Any) -> str:
    return trace_name(GPT, layout, 0, compiled, "cuda", TrainingOptions(**options))


def test_a_dry_run_is_kept_whole() -> None:
    assert kept_trace("it") is None
    keep_trace("it", made(3))
    assert kept_trace("it") == made(3)


def test_damaged_files_are_removed_and_made_again(capsys: pytest.CaptureFixture[str]) -> None:
    keep_trace("it", made(3))
    path = kept_traces.folder() / "it.json"
    path.write_text(path.read_text()[:-9])
    assert kept_trace("it") is None
    assert not path.exists()
    assert "removed" in capsys.readouterr().err
    path.write_text("{}")
    assert kept_trace("it") is None


def test_names_are_of_what_memory_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(GPT, global_batch_size=4)
    names = [
        name_of(layout),
        name_of(layout, compiled=True),
        name_of(layout_of(GPT, global_batch_size=8)),
        name_of(layout, clip_grad=0.0),
        trace_name(GPT, layout, 1, False, "cuda", TrainingOptions()),
        trace_name(GPT, layout, 0, False, "cpu", TrainingOptions()),
        trace_name(GPT.model_copy(update={"ffn": 512}), layout, 0, False, "cuda", TrainingOptions()),
    ]
    monkeypatch.setattr(kept_traces, "full_version", lambda: "2.99.0")
    assert len({*names, name_of(layout)}) == len(names) + 1
    monkeypatch.undo()
    monkeypatch.setattr(kept_traces, "code_digest", lambda: "other")
    assert name_of(layout) not in names


def test_names_are_not_of_numbers_of_a_step() -> None:
    layout = layout_of(GPT)
    assert name_of(layout) == name_of(layout, lr=3e-3, train_iters=7, seed=5)


PLAIN = """
LIMIT = 3


class Doubling:
    def double(self, x):
        return 2 * x if x in {"a", "b"} else LIMIT
"""

COMMENTED = """
# A module.
LIMIT = 3  # The limit.



class Doubling:

    # Twice.
    def double(self, x):
        return (2 * x if x in {"a", "b"} else LIMIT)  # Plain.
"""


def digest_of(code: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    folder.mkdir()
    (folder / "one.py").write_text(code)
    monkeypatch.setattr(kept_traces, "_files", lambda: [folder / "one.py"])
    return kept_traces.code_digest.__wrapped__()


def test_comments_mean_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = (PLAIN.replace("2", "3"), PLAIN.replace("LIMIT", "MOST"), PLAIN.replace('"a"', '"c"'))
    digests = [
        digest_of(code, tmp_path / str(number), monkeypatch)
        for number, code in enumerate((PLAIN, COMMENTED, *others))
    ]
    assert digests[0] == digests[1]
    assert len({*digests}) == 4


def test_ranks_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages in the middle that run all microbatches forward before the first backward are alike."""
    layout = layout_of(GPT, pipeline_parallel=8, global_batch_size=2)
    groups = alike_ranks(GPT, layout, range(8))
    assert groups == {0: [0], 1: [1, 2, 3, 4, 5, 6], 7: [7]}
    many = layout_of(GPT, pipeline_parallel=8, global_batch_size=64)
    assert len(alike_ranks(GPT, many, range(8))) == 8
    traced: list[int] = []

    def job(spec: ModelSpec, layout: Layout, rank: int, **_: Any) -> MemoryTrace:
        traced.append(rank)
        return made(rank)

    monkeypatch.setattr(ranks, "_trace", job)
    monkeypatch.setattr(ranks, "available_cores", lambda: 1)
    told: list[str] = []
    for _ in range(2):
        found = trace_ranks(
            GPT,
            layout,
            range(8),
            compiled=False,
            device="cuda",
            options=TrainingOptions(),
            tell=told.append,
        )
        assert found == [replace(made(rank), pipeline_rank=rank) for rank in range(8)]
    assert traced == [0, 1, 7]
    assert told[0] == "loading PyTorch" and len(told) == 4


def process_of(rank: int) -> Any:
    """A stand-in for a dry run: the rank, the process that was asked, and the process that started it."""
    return rank, os.getpid(), os.getppid()


def trace_in_forks(cores: int) -> None:
    """Check that forks of one process make all dry runs; to be run in a process without a server of forks."""
    with (
        patch.object(ranks, "available_cores", lambda: cores),
        patch.object(ranks, "available_memory", lambda: 2**40),
        preloading(("json",)) as early,
    ):
        found: dict[int, Any] = {**ranks._traced(process_of, range(6), lambda _: None, early)}
    assert [found[rank][0] for rank in range(6)] == list(range(6))
    assert len({process for _, process, _ in found.values()}) <= cores
    (server,) = {parent for *_, parent in found.values()}
    assert server != os.getpid() and not is_alive(server)


def alone(text: str) -> None:
    """Run Python code in a new process, which must print nothing."""
    text = f"from tests.runtime.test_kept_traces import *\n{text}"
    done = subprocess.run([sys.executable, "-c", text], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("cores", [1, 2])
def test_ranks_are_traced_by_forks_of_a_process_that_loaded_pytorch(cores: int) -> None:
    alone(f"trace_in_forks({cores})")


def loaded(name: str) -> bool:
    return name in sys.modules


def share_modules() -> None:
    """Check that forks have loaded modules; to be run in a process without a server of forks."""
    with preloading(("no_such_module", "colorsys")) as context:
        with brief_pool(1, context) as pool:
            assert pool.submit(loaded, "colorsys").result()
        # The server of another context is not shared, as it has other modules.
        with preloading(("colorsys",)) as other:
            assert other.get_start_method() == "spawn"


@pytest.mark.slow
def test_forks_have_the_modules_of_their_server() -> None:
    alone("share_modules()")


def end_while_loading() -> None:
    """Check that a server ends while it loads; to be run in a process without a server of forks."""
    server: Any = vars(forkserver)["_forkserver"]
    with suppress(InputError), preloading(("torch",)):
        started = server._forkserver_pid
        raise InputError("no layout fits")
    assert server._forkserver_pid is None and not is_alive(started)


def test_a_server_that_is_still_loading_ends_with_its_context() -> None:
    alone("end_while_loading()")


@pytest.mark.parametrize("context", ["spawn_context()", "stack.enter_context(preloading(('json',)))"])
def test_processes_of_a_pool_end_with_a_parent_that_is_killed(context: str, tmp_path: Path) -> None:
    text = (
        "import os, time\n"
        "from contextlib import ExitStack\n"
        "from runtime.processes.pools import brief_pool, spawn_context\n"
        "from runtime.processes.preloading import preloading\n"
        "stack = ExitStack()\n"
        f"pool = stack.enter_context(brief_pool(1, {context}))\n"
        "print(pool.submit(os.getpid).result(), flush=True)\n"
        "pool.submit(time.sleep, 1e6).result()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", text], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    assert is_alive(worker)
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_alive(worker), "the worker to end")


def test_processes_are_new_where_no_server_can_start(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    text = (
        "from runtime.processes.pools import brief_pool\n"
        "from runtime.processes.preloading import preloading\n"
        "with preloading(('json',)) as context, brief_pool(1, context) as pool:\n"
        "    print(context.get_start_method(), pool.submit(abs, -1).result())\n"
    )
    environment = os.environ | {"TMPDIR": str(deep)}
    done = subprocess.run(
        [sys.executable, "-c", text], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    # Newer Pythons shorten the path themselves.
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout in ("spawn 1\n", "forkserver 1\n")


def test_one_core_loads_nothing_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "available_cores", lambda: 1)
    with ranks.early_tracer() as early:
        assert early is None


def test_old_files_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_traces, "MOST", 4)
    for number in range(5):
        keep_trace(str(number), made(number))
    left = sorted(path.stem for path in kept_traces.folder().iterdir())
    assert len(left) == 2 and "4" in left
