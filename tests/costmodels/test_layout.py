"""Layers shared by stages."""

from __future__ import annotations

import pytest

from costmodels import Layout, even_split
from costmodels.errors import InputError


@pytest.mark.parametrize("stages", [5, 0, -1])
def test_a_split_into_empty_stages_is_refused_in_one_line(stages: int) -> None:
    with pytest.raises(
        InputError, match=f"{stages} stages cannot share 4 layers.*use 1 to 4 stages"
    ) as caught:
        even_split(4, stages)
    assert "\n" not in str(caught.value)


def test_stages_differ_by_one_layer_and_the_first_have_more() -> None:
    assert even_split(30, 4) == (8, 8, 7, 7)
    assert even_split(4, 4) == (1, 1, 1, 1)


def test_offloading_what_recomputation_drops_anyway_is_refused() -> None:
    usual = {"layers_per_stage": (4,), "global_batch_size": 8, "offload_activations": True}
    with pytest.raises(ValueError, match="offload_activations has nothing to send with recompute full; use"):
        Layout(**usual, recompute="full")
    for fields in (
        {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {"recompute": "selective"},
        {"recompute": "none"},
    ):
        assert Layout(**usual, **fields).offload_activations
