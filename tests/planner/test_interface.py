"""What `import planner` gives, and what it says of keywords that it does not know."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

import planner
from costmodels import Layout
from costmodels.errors import InputError, NoLayoutFits


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
