"""Compiled layers in chains, and called one by one."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest.mock import patch

from costmodels import Layout, ModelSpec
from tests.support.ranks.parity import Training, trained


class Both(NamedTuple):
    """The same training in both ways."""

    chained: Training
    apart: Training
    runs: int
    """Of chains."""


def chained_and_apart(spec: ModelSpec, layout: Layout, other_tables: int | None = None) -> Both:
    """Train two steps in both ways; runs on every rank of a process group.

    Args:
        other_tables: a layer that has rotary tables of its own, for other positions.
    """
    import torch

    from runtime.model.transformer import Transformer
    from runtime.parallel import layer_chain
    from runtime.train import stages

    place, run = Transformer.place, layer_chain._Chain.apply
    runs = 0

    def placed(stage: Transformer, positions: Any) -> None:
        place(stage, positions)
        if other_tables is not None:
            attention = stage.stack[other_tables].attention
            assert attention.make_tables is not None
            attention.tables = attention.make_tables(positions.flip(0))

    def counted(*arguments: Any) -> Any:
        nonlocal runs
        runs += 1
        return run(*arguments)

    torch._dynamo.reset()
    with patch.object(Transformer, "place", placed):
        with patch.object(layer_chain._Chain, "apply", counted):
            chained = trained(spec, layout, 2, compiled=True)
        with patch.object(stages, "_chain_layers", lambda *_: None):
            apart = trained(spec, layout, 2, compiled=True)
    return Both(chained, apart, runs)
