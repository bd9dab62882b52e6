"""Compiled layers of every family train as eager ones."""

from __future__ import annotations

import pytest

from costmodels import ModelSpec
from tests.support.layouts import parse_layout
from tests.support.models import FORMS, MODELS
from tests.support.ranks.chains import compiled_and_eager
from tests.support.worker_pool import WorkerPool

pytestmark = [pytest.mark.oldest, pytest.mark.slow]

FAMILIES = {**MODELS, **FORMS}

ODD = ("sinks", "capped", "delta")
"""Families that no other test compiles."""


@pytest.mark.parametrize("name", ODD)
def test_compiled_layers_train_as_eager_ones(pool: WorkerPool, name: str) -> None:
    """Experts are compiled in bf16 alone; AOTAutograd's graphs show lost gradients."""
    whole: ModelSpec = FAMILIES[name]
    spec = whole.model_copy(update={"layers": max(2, len(whole.attention_pattern))})
    layout = parse_layout("mbs=1,gbs=2,precision=bf16", spec)
    ((compiled, eager),) = pool.run(compiled_and_eager, 1, spec, layout, "aot_eager")
    assert compiled.training.losses == pytest.approx(eager.training.losses, rel=1e-3)
    assert compiled.training.norms == pytest.approx(eager.training.norms, rel=4e-3)
