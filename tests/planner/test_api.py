"""Names that `import planner` offers, and errors for unknown keywords."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib import metadata
from typing import Any

import pytest

import planner
from costmodels import Layout
from costmodels.errors import InputError, NoLayoutFits
from planner.problem import SearchKeywords


def test_errors_version_and_questions_are_at_hand() -> None:
    assert planner.InputError is InputError and planner.NoLayoutFits is NoLayoutFits
    assert planner.__version__ == metadata.version("llm-parallelism-planner")
    assert set(planner.__all__) <= set(dir(planner))
    for name in planner.__all__:
        assert getattr(planner, name) is not None
    with pytest.raises(planner.NoLayoutFits):
        planner.suggest("gpt3-175b", world_size=1, device="v100", global_batch_size=1)


@pytest.mark.parametrize("ask", [planner.search, planner.suggest, planner.sizes, planner.explain])
def test_an_unknown_keyword_names_the_nearest(ask: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"^{ask.__name__}\(\) .* 'globl_batch'; did you mean global_batch_size\?$"
    ):
        ask("llama2-7b", world_size=8, globl_batch=8)
    with pytest.raises(TypeError, match=r"'nics_pernode'; did you mean nics_per_node\?"):
        ask("llama2-7b", world_size=8, global_batch_size=8, nics_pernode=4)


def test_a_keyword_that_nothing_is_near_lists_all() -> None:
    layout = Layout(layers_per_stage=(32,), global_batch_size=1)
    with pytest.raises(TypeError, match=r"evaluate\(\) .* 'zzz'; it takes layout, model, world_size, "):
        planner.evaluate(layout, model="llama2-7b", zzz=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("ask", [planner.search, planner.suggest, planner.sizes, planner.explain])
def test_help_lists_every_keyword_of_a_question(ask: Any) -> None:
    known = inspect.signature(ask).parameters
    assert list(known)[:2] == ["model", "world_size"] and "job" not in known
    assert {name for name in known if known[name].default is None} >= SearchKeywords.__annotations__.keys()
    assert known["global_batch_size"].annotation == "int | None"


def test_none_stands_for_a_keyword_that_is_left_out() -> None:
    job: Any = {"world_size": 2, "global_batch_size": 4}
    left_out: Any = dict.fromkeys(SearchKeywords.__annotations__)
    plain = planner.suggest("gpt2-nano", **job)
    assert planner.suggest("gpt2-nano", **left_out | job) == plain


def test_a_plan_is_read_without_the_search() -> None:
    heavy = ("planner.ranking", "planner.space", "planner.problem", "costmodels.pricing", "typer", "rich")
    code = f"import sys, planner.plan; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
