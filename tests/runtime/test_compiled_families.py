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

CASES = [
    ("sinks", ""),
    ("capped", ""),
    ("delta", ""),
    # Norms over the heads of all ranks, and layers whose input enters attention as it is.
    ("after", "tp=2,sp=1,"),
    ("after", "tp=2,sp=0,"),
    ("after", "dp=2,zero=3,tp=2,sp=0,"),
]
"""Families that no other test compiles, and their splits."""


@pytest.mark.parametrize(("name", "split"), CASES)
def test_compiled_layers_train_as_eager_ones(pool: WorkerPool, name: str, split: str) -> None:
    """Experts are compiled in bf16 alone; AOTAutograd's graphs show lost gradients."""
    whole: ModelSpec = FAMILIES[name]
    spec = whole.model_copy(update={"layers": max(2, len(whole.attention_pattern))})
    layout = parse_layout(f"mbs=1,gbs=2,{split}precision=bf16", spec)
    for compiled, eager in pool.run(compiled_and_eager, layout.world_size, spec, layout, "aot_eager"):
        assert compiled.training.losses == pytest.approx(eager.training.losses, rel=1e-3)
        assert compiled.training.norms == pytest.approx(eager.training.norms, rel=4e-3)
