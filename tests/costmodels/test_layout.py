"""Layers shared by stages."""

from __future__ import annotations

from typing import Any

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


@pytest.mark.parametrize(("ep", "etp", "legal"), [(8, 1, True), (2, 4, True), (4, 4, False), (3, 1, False)])
def test_experts_are_spread_over_the_devices_of_a_stage(ep: int, etp: int, legal: bool) -> None:
    fields: dict[str, Any] = {
        "tensor_parallel": 2,
        "data_parallel": 4,
        "layers_per_stage": (4,),
        "global_batch_size": 8,
    }
    experts: dict[str, Any] = {"expert_parallel": ep, "expert_tensor_parallel": etp}
    if legal:
        assert f"ep={ep}" in Layout(**fields, **experts).describe()
        return
    with pytest.raises(
        ValueError, match=f"expert_parallel {ep} x expert_tensor_parallel {etp} does not divide"
    ):
        Layout(**fields, **experts)


def test_the_optimizer_is_described_when_it_is_not_adam() -> None:
    usual: dict[str, Any] = {"layers_per_stage": (4,), "global_batch_size": 8}
    assert "optimizer" not in Layout(**usual).describe()
    assert Layout(**usual, optimizer="muon").describe().endswith("optimizer=muon")


def test_stages_differ_by_one_layer_and_the_first_have_more() -> None:
    assert even_split(30, 4) == (8, 8, 7, 7)
    assert even_split(4, 4) == (1, 1, 1, 1)


def test_offloading_what_recomputation_drops_anyway_is_refused() -> None:
    usual: dict[str, Any] = {"layers_per_stage": (4,), "global_batch_size": 8, "offload_activations": True}
    with pytest.raises(ValueError, match="offload_activations has nothing to send with recompute full; use"):
        Layout(**usual, recompute="full")
    for fields in (
        {"recompute": "full", "recompute_method": "block", "recompute_num_layers": 2},
        {"recompute": "selective"},
        {"recompute": "none"},
    ):
        assert Layout(**usual, **fields).offload_activations
