"""Calls that several processes make: the results are those of one, whatever helpers do."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner
from costmodels.spec.record import GIB
from planner import processes
from planner.api import search_problem
from planner.explanation import changes
from planner.problem import resolve_problem
from planner.processes import Calls, helpers_for
from planner.ranking.ranking import rank
from tests.support.jobs import TIMEOUT_S
from tests.support.models import TINY, TINY_EXPERTS

PATH = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_helpers_make_calls_and_results_keep_their_order(tmp_path: Path) -> None:
    calls = [partial(pow, 2, number) for number in range(40)]
    with Calls([partial(os.getpid), *calls], 1) as made:
        processes_before = [helper.process for helper in made._helpers]
        found = made.results()
    assert found[1:] == [2**number for number in range(40)]
    assert len(processes_before) == 1 and processes_before[0].returncode is not None


def test_a_helper_is_another_process() -> None:
    """This one waits until the helper has made the only call."""
    with Calls([partial(os.getpid)], 1) as made:
        made._threads[0].join(TIMEOUT_S)
        [pid] = made.results()
    assert pid == made._helpers[0].process.pid != os.getpid()


@pytest.mark.parametrize("helpers", [0, 1])
def test_what_a_call_raises_is_raised_here(helpers: int) -> None:
    calls: list[partial[Any]] = [partial(int, "7"), partial(int, "seven"), partial(int, "8")]
    with pytest.raises(ValueError, match="seven"), Calls(calls, helpers) as made:
        made.results()


def test_what_only_this_process_knows_is_called_here() -> None:
    with Calls([partial(lambda: 1), partial(lambda: 2)], 1) as made:
        assert made._helpers == [] and made.results() == [1, 2]


def test_what_the_script_of_a_caller_defines_is_called_there(tmp_path: Path) -> None:
    """Functions of `__main__` are pickled by name, which a helper does not know."""
    script = tmp_path / "script.py"
    script.write_text(
        "from functools import partial\n"
        "from planner.processes import Calls\n"
        "def mine(number):\n    return number + 1\n"
        "with Calls([partial(mine, number) for number in range(4)], 1) as made:\n"
        "    made._threads[0].join(60)\n"
        "    print(made.results())\n"
    )
    ran = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, env=dict(os.environ) | PATH
    )
    assert (ran.stdout.strip(), ran.stderr) == ("[1, 2, 3, 4]", "")


def test_a_helper_ends_amid_its_call_when_nobody_waits_any_more() -> None:
    with Calls([partial(time.sleep, 60)], 1) as made:
        helper = made._helpers[0].process
        time.sleep(0.2)
        assert helper.stdin is not None
        helper.stdin.close()
        helper.wait(TIMEOUT_S)
        made._threads[0].join(TIMEOUT_S)
        made._calls = [partial(time.sleep, 0)]
        assert made.results() == [None]


def test_a_helper_that_dies_leaves_its_calls_to_this_process() -> None:
    with Calls([partial(pow, 3, number) for number in range(20)], 1) as made:
        made._helpers[0].process.kill()
        assert made.results() == [3**number for number in range(20)]


def test_a_helper_ends_with_the_one_that_asks() -> None:
    with Calls([partial(pow, 3, 2)], 1) as made:
        made._threads[0].join(60)
        process = made._helpers[0].process
        assert process.stdin is not None and process.poll() is None
        process.stdin.close()
        assert process.wait(TIMEOUT_S) == 0


def test_where_no_process_can_be_started_this_one_makes_all_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*words: Any, **named: Any) -> None:
        raise OSError("no processes here")

    monkeypatch.setattr(subprocess, "Popen", refuses)
    with Calls([partial(pow, 3, 2)], 1) as made:
        assert made.results() == [9]


def test_short_calls_and_single_ones_get_no_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    assert helpers_for(6, processes.LONG_S / 2) == 0
    assert [helpers_for(calls, 10.0) for calls in (0, 1, 2, 6)] == [0, 0, 1, 3]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert helpers_for(6, 10.0) == 0


def test_a_script_that_has_no_guard_is_not_run_again(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from functools import partial\n"
        "from planner.processes import Calls\n"
        "print('once')\n"
        "with Calls([partial(pow, 2, 3)] * 4, 1) as made:\n"
        "    made._threads[0].join()\n"
        "    print(made.results())\n"
    )
    # A module of the folder that has the name of one of Python's is not imported.
    (tmp_path / "pickle.py").write_text("raise SystemExit('the wrong one')\n")
    where = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(
        [sys.executable, "-P", str(script)] if sys.version_info >= (3, 11) else [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env=where,
        cwd=tmp_path,
    )
    if sys.version_info >= (3, 11):
        assert (done.returncode, done.stdout) == (0, "once\n[8, 8, 8, 8]\n"), done.stderr


def test_sizes_and_changes_are_the_same_with_helpers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes give the sizes and changes of one."""
    job: dict[str, Any] = {"device": "h100", "global_batch_size": 16, "tokens": "1B"}
    question: dict[str, Any] = {"device": "h100", "global_batch_size": 16, "pin": ["tp=1..2"]}
    alone = planner.sizes(TINY, world_size="2,3,4,8", **job)
    explained = planner.explain(TINY, world_size=4, **question)
    for module in (planner.world_sizes, changes):
        monkeypatch.setattr(module, "helpers_for", lambda calls, seconds: 1)
    together = planner.sizes(TINY, world_size="2,3,4,8", **job)
    assert [(one.world_size, one.plan, one.run, one.problem) for one in together.sizes] == [
        (one.world_size, one.plan, one.run, one.problem) for one in alone.sizes
    ]
    assert together.recommendation == alone.recommendation
    again = planner.explain(TINY, world_size=4, **question)
    assert again.changes == explained.changes and len(again.changes) >= 4
    assert (again.binding, again.neighbours) == (explained.binding, explained.neighbours)


def test_searches_of_the_same_layouts_share_what_those_need() -> None:
    job: dict[str, Any] = {"device": "h100", "max_global_batch_size": 16, "prefer": "fastest"}
    roomy = search_problem(resolve_problem(TINY_EXPERTS, 16, **job))
    assert roomy.listed is not None
    middle = float(np.median(roomy.listed.peaks)) / GIB
    result = search_problem(resolve_problem(TINY_EXPERTS, 16, device_memory_gib=middle, **job))
    assert result.listed is not None and 0 < result.feasible < result.legal
    assert pickle.loads(pickle.dumps(result)).listed is None
    # More memory, and so little that fewer layouts fit.
    for times in (1.02, 0.98):
        problem = result.problem
        memory = problem.cluster.memory_bytes * times
        changed = replace(problem, cluster=problem.cluster.model_copy(update={"memory_bytes": memory}))
        anew, shared = (
            rank(changed, changed.space() if known is None else known.space, 0.0, known=known)
            for known in (None, result.listed)
        )
        assert anew.feasible != result.feasible and anew.rejected == shared.rejected
        assert [(one.layout, one.estimate) for one in anew.plans(10)] == [
            (one.layout, one.estimate) for one in shared.plans(10)
        ]
