"""Compiled layers in chains, and called one by one."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

from costmodels import Layout, ModelSpec
from tests.support.ranks.parity import Training, trained


class Seen(NamedTuple):
    """A training, and what its routers have counted."""

    training: Training
    loads: list[list[int]]
    """Counts of how often each expert of each layer was chosen."""
    totals: list[float]
    """Sums of the losses of routers."""


class Both(NamedTuple):
    """Training with chained layers, and with layers apart."""

    chained: Training
    apart: Training
    runs: int
    """The number of times that chains ran."""
    loads: tuple[list[list[int]], list[list[int]]]
    totals: tuple[list[float], list[float]]
    """Both of `Seen`, in either way."""


def seen(spec: ModelSpec, layout: Layout, compiled: bool) -> Seen:
    """Two steps of a training; runs on every rank of a process group."""
    from runtime.train.balance import Balance

    make = Balance.__init__
    balances: list[Balance] = []

    def made(balance: Balance, *arguments: Any) -> None:
        make(balance, *arguments)
        balances.append(balance)

    with patch.object(Balance, "__init__", made):
        training = trained(spec, layout, 2, compiled=compiled)
    if not balances:
        return Seen(training, [], [])
    (balance,) = balances
    return Seen(training, balance.counts().tolist(), balance.totals.tolist())


def compiled_and_eager(spec: ModelSpec, layout: Layout, backend: str) -> tuple[Seen, Seen]:
    """One training with layers compiled by a backend, and one without; runs on ranks of a process group."""
    import torch

    torch._dynamo.reset()
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        return seen(spec, layout, True), seen(spec, layout, False)


def chained_and_apart(spec: ModelSpec, layout: Layout, other_tables: int | None, backend: str) -> Both:
    """Train two steps in both ways; runs on every rank of a process group.

    Args:
        other_tables: a layer that has rotary tables of its own, for other positions.
        backend: of torch.compile. Chains see both functions of AOTAutograd, whoever compiles these; a C++
            compiler takes most of a minute for what it makes of a few layers.
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
    by_backend = partial(torch.compile, backend=backend)
    with patch.object(Transformer, "place", placed), patch.object(torch, "compile", by_backend):
        with patch.object(layer_chain._Chain, "apply", counted):
            chained = seen(spec, layout, True)
        with patch.object(stages, "_chain_layers", lambda *_: None):
            apart = seen(spec, layout, True)
    return Both(
        chained.training,
        apart.training,
        runs,
        (chained.loads, apart.loads),
        (chained.totals, apart.totals),
    )
